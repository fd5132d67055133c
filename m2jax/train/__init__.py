"""Training: the jitted step and the loops around it."""
