"""Compiled blocks: `torch.compile` of the target, async TP, and the graphs that come out of it."""
