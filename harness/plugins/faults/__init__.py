"""Planted faults, and mutation testing: which checks find which fault."""
