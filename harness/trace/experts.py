"""What became of tokens in blocks with experts: whom they were sent to, what arrived there, and what came back."""

from typing import Literal

from harness.trace.record import Record

Phase = Literal["forward", "recompute", "evaluation"]


class Rows(Record, frozen=True, kw_only=True):
    """Digests of rows, int64 each: before and behind the exchange of tokens, and of the exchange of results.

    A rank sends `sent` by expert, and `arrived` are those for its own experts; these return `computed`, and the rank
    that sent the token gets `returned`.
    """

    sent: bytes = b""
    arrived: bytes = b""
    computed: bytes = b""
    returned: bytes = b""


class ExpertCall(Record, frozen=True, kw_only=True):
    """One call of the experts of a block. `number` counts the calls of a phase and step, from 0."""

    step: int
    fqn: str  # of the block's mixture: "layers.1.moe"
    phase: Phase
    number: int
    tokens: bytes  # digests of those that the router got, int64
    chosen: bytes  # experts [tokens, top_k], int64
    weights: bytes  # of them, float64
    counts: tuple[int, ...]  # rows of every expert of the block, as the experts were called
    local_counts: tuple[int, ...]  # rows of every expert of this rank
    values: Rows
    gradients: Rows = Rows()  # of forward alone


class ExpertBias(Record, frozen=True, kw_only=True):
    """The bias of the choice of experts behind the update of a step."""

    step: int
    fqn: str
    bias: tuple[float, ...]


class GroupedMatmuls(Record, frozen=True, kw_only=True):
    """Grouped matmuls of one step. `wgrad`: of weight gradients; the others are of forward and of dgrad."""

    step: int
    wgrad: bool
    scaled: bool  # of float8 operands
    times: int


class ExpertTrace(Record, frozen=True, kw_only=True):
    calls: tuple[ExpertCall, ...]  # in order of execution
    matmuls: tuple[GroupedMatmuls, ...] = ()
    biases: tuple[ExpertBias, ...]
