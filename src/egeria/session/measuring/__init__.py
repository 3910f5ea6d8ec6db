"""What is measured of a training: losses, time, and what compiling costs."""
