"""FLOPs: what a rank multiplied in a step, added up by part and precision. A formula predicts them exactly."""

from __future__ import annotations

from harness.trace.record import Record


def multiplied_words(*, part: str, precision: str) -> str:
    """The key of products in words: "matmuls in float8", "attention in bfloat16"."""
    return f"{part} in {precision}"


class FlopsRecord(Record, frozen=True, kw_only=True):
    """Operators of one kind in one step, evaluation and recomputation included.

    A multiplication and an addition are 2 FLOPs; fused attention has 2 products in forward and 4 in backward.
    """

    step: int
    part: str  # "matmuls" or "attention"
    precision: str  # "float8", or the dtype of the factors
    calls: int
    flops: int
