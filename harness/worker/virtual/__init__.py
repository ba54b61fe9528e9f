"""The virtual FP8 device: what a CPU lacks to run the real FP8 path. The only package that patches torch."""
