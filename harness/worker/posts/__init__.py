"""Posts: what observers are told of the operators that a rank really executes, on every device and in compiled code.

They are put up, once in a process, when this package is imported.
"""

from harness.worker.posts import collectives, fused, products, scaled_mm

__all__ = ["collectives", "fused", "products", "scaled_mm"]
