"""Sketches: gradients and parameters, small enough to keep, exact enough to compare.

A sketch is SKETCH_SIZE signed sums of all elements of the logical tensor. The sign of an element depends only on its
position. Sketches are linear: those of the shards add up to that of the tensor, and the distance between two sketches
estimates the distance between their tensors within about a quarter. Recorded by `worker/probes/sketches.py`.
"""

from __future__ import annotations

from typing import Literal

from harness.trace.record import Record

SKETCH_SIZE = 32


class TensorSketch(Record, frozen=True, kw_only=True):
    """One rank's shard of one gradient or parameter at one step.

    `owner` is True on exactly one of the ranks that hold the same shard: `sums` and `norm_squared` of owners add up to
    those of the logical tensor. Replicas of the same shard (`offset`) must have the same `digest`.
    """

    fqn: str
    kind: Literal["grad", "param"]  # param: after the optimizer step
    step: int
    shape: tuple[int, ...]  # of the logical tensor
    offset: tuple[int, ...]  # of this rank's shard
    local_shape: tuple[int, ...]
    owner: bool
    norm_squared: float
    sums: bytes  # SKETCH_SIZE little-endian float64
    digest: str  # of the bytes of this rank's shard
