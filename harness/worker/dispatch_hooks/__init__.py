"""Dispatcher hooks: notify observers of every operator that a rank executes, on every device and in compiled code.

Importing this package installs them, once per process.
"""

from harness.worker.dispatch_hooks import collectives, fused, products, scaled_mm

__all__ = ["collectives", "fused", "products", "scaled_mm"]
