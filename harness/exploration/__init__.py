"""Searching for failures in simulation, cutting a failure down, and running it again elsewhere."""
