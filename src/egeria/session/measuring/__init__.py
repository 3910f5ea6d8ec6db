"""What is measured of a training: time, losses, noise, the worth of steps, the rate to come."""
