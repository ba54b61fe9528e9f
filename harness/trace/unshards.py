"""Unshards: what FSDP2 gathered of a weight whose operands a trainer owns, and the operands that were made of it.

Recorded by `worker/probes/unshards.py`. Steps are 1-based; a step of 0 is none.
"""

from harness.trace.record import Record


class HeldOperand(Record, frozen=True, kw_only=True):
    """One tensor that is held from an unshard to the next reshard: float8 data of one orientation, or scales."""

    dtype: str
    shape: tuple[int, ...]
    right: bool  # the bytes that making operands of the current weight anew gives
    since: int = 0  # the step whose operands have the same bytes, if it is not right


class Unshard(Record, frozen=True, kw_only=True):
    """One gather of one weight. `casts`: of all of it to a narrow dtype meanwhile; `fresh_casts`: in one making."""

    step: int
    index: int  # on its rank
    fqn: str
    sent: str  # dtypes
    asked: str
    arrived: bool  # what was gathered are the shards of all ranks
    casts: int
    fresh_casts: int
    operands: tuple[HeldOperand, ...]
    again: bool  # without a reshard since the last one
    padded: bool  # another value in the padding of uneven shards gives other operands
    holds_gathered: bool  # although the operands need it no longer


class OperandUse(Record, frozen=True, kw_only=True):
    """A matmul reads an operand that is not what its last unshard left."""

    step: int
    index: int
    fqn: str
    operand: int
    made: int  # the step of that unshard
    updated: bool  # the weight has been, since
    changed: bool  # the bytes


class HeldAfterStep(Record, frozen=True, kw_only=True):
    step: int
    fqn: str
    what: str


class UnshardTrace(Record, frozen=True, kw_only=True):
    """All of one rank. `weights` whose operands a trainer owns; those of `read` a matmul has read."""

    weights: tuple[str, ...]
    read: tuple[str, ...]
    unshards: tuple[Unshard, ...]
    uses: tuple[OperandUse, ...]  # those that are wrong
    held: tuple[HeldAfterStep, ...]
