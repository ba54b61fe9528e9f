"""Probes: they watch a run and never change a number."""
