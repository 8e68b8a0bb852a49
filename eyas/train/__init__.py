"""Training of draft heads for a target, their measurements, and their formats."""
