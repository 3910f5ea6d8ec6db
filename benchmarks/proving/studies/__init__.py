"""What takes many runs to find out: the oracle, sensitivity, trials of worth, analysis afterwards, and SmartFRZ."""
