"""The float8 matmul of a device against the exact one.

Torch-free: defines the checks, what error a kernel may have, and judges. A rank runs them in `harness/worker/kernels`.
"""
