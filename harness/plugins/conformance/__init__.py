"""Conformance of DTensor's sharding strategies for the operators of the FP8 path.

Torch-free: defines the checks and judges their results. Ranks run them in `harness/worker/conformance`.
"""
