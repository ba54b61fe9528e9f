"""Planted faults: the catalogue, the runs that plant them, and the matrix of what saw them."""
