"""Traffic: the collectives a rank took part in, added up per step, axis, kind and dtype.

Recorded by `worker/probes/traffic.py` on the virtual fabric. Memory saved for backward is here too: both are bytes
that a formula predicts.
"""

from __future__ import annotations

from harness.trace.record import Record


class TrafficRecord(Record, frozen=True, kw_only=True):
    """`count` collectives of one kind over one mesh axis in one step.

    `payload_bytes` is what this rank put in, summed: the shard for all_gather, the full input for reduce_scatter and
    all_reduce.
    """

    step: int
    axis: str  # "dp_shard", "dp_replicate", "tp", "world", or several joined by "+"
    group_size: int
    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", ...
    op: str = ""  # "sum", "max", ... of a reduction: every "max" is an amax or the largest logit
    dtype: str  # "float32", "bfloat16", "uint8" for float8 gathered as bytes by FSDP2, ...
    count: int
    payload_bytes: int
    scalars: int  # how many of them carried a single element: amax reductions of tensorwise scaling


class SavedMemory(Record, frozen=True, kw_only=True):
    """What autograd kept for the backward pass of one step on this rank, parameters, buffers and tokens left out."""

    step: int
    saved_bytes: int  # distinct storages
    float8_bytes: int  # the part of it that is float8
    by_dtype: dict[str, int]
