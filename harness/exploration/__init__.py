"""Searching for failures in simulation, shrinking a failing run, and explaining where it was decided."""
