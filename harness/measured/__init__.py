"""Numbers on disk and what they rest on: goldens, tolerances, the runs that measure them."""
