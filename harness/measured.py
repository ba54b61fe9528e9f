"""What one run of a case measured: the numbers that are kept with its result, which `compare` reads and reports draw.

Small enough to keep for every case of every run; what the ranks recorded in full is not kept.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Loss (nats) and global gradient norm of every step."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


class CastRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The casts to float8 of one operand of a linear in one step, over all ranks and phases."""

    fqn: str
    role: str  # "input", "weight", "grad_output"
    step: int  # 1-based
    amax: float  # of the high-precision tensor
    scale_min: float
    scale_max: float
    saturated: float  # share of the elements whose scaled magnitude exceeds the largest float8 value
    flushed: float  # share of the elements that are not zero and became zero

    @property
    def lost(self) -> float:
        """The share of elements that lost their value; infinite where it is not known."""
        lost = self.saturated + self.flushed
        return math.inf if math.isnan(lost) else lost


class Sent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Collectives of one kind, of all ranks and steps. `payload_bytes` is the sum of the inputs of all ranks."""

    calls: int
    payload_bytes: int


class Multiplied(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Products of one kind, of all ranks and steps: evaluation, recomputation and padding are among them."""

    calls: int
    flops: int


def sent_by(words: Iterable[tuple[str, int, int]]) -> Mapping[str, Sent]:
    return {name: Sent(calls=calls, payload_bytes=nbytes) for name, (calls, nbytes) in _sums(words).items()}


def multiplied_by(words: Iterable[tuple[str, int, int]]) -> Mapping[str, Multiplied]:
    return {name: Multiplied(calls=calls, flops=flops) for name, (calls, flops) in _sums(words).items()}


def _sums(words: Iterable[tuple[str, int, int]]) -> Mapping[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for name, first, second in words:
        before = sums.get(name, (0, 0))
        sums[name] = (before[0] + first, before[1] + second)
    return dict(sorted(sums.items()))


class Speedup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much faster a case trains than its BF16 twin: paired ratios of seconds, with their 95 % interval.

    Tokens a second are of one device, in the median pair.
    """

    twin: str  # id
    pairs: int
    ratio: float  # above 1: faster
    low: float
    high: float
    tokens_per_s: float
    twin_tokens_per_s: float


class WorstGradient(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gradient that is furthest from one rank's, relative to its norm, and how far it may be."""

    fqn: str
    step: int  # 1-based
    distance: float
    allowed: float | None  # None: there is no tolerance for cases like this


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that are followed over runs. None, or empty: not recorded, or not compared.

    `curves` are of "case" and of what it was compared with: "golden" (BF16) and "solo" (the same recipe on one rank).
    `digests` are equal where every bit is: of "casts", "matmuls", "gradients" and "parameters".
    """

    curves: Mapping[str, Curve] = {}
    loss_distance: float | None = None  # the largest from the golden, in nats
    parity: float | None = None  # the largest relative distance of a gradient from solo
    local_parity: float | None = None  # the largest relative distance of a tensor of a module from its replay
    flushed: float | None = None  # the share of all values that casts to float8 made zero; None: no cast was recorded
    scaled_mm_calls: int | None = None  # of all ranks and steps
    flops: Mapping[str, Multiplied] = {}  # by part and precision: "matmuls in float8", "attention in bfloat16"
    wire: Mapping[str, Sent] = {}  # by kind, dtype and mesh axis: "all_gather in uint8 along dp_shard"
    saved_bytes: int | None = None  # for backward, of all ranks and steps
    speedup: Speedup | None = None  # of `predict measure` alone
    fused: Mapping[str, int] = {}  # executions of fused operators, of all ranks and steps
    digests: Mapping[str, str] = {}

    @property
    def wire_bytes(self) -> int | None:
        """Inputs of all collectives of all ranks and steps; None where none were recorded."""
        return sum(sent.payload_bytes for sent in self.wire.values()) if self.wire else None


class Measured(Numbers, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of one run.

    Of a cast in a compiled graph it is known neither in which block it is nor how much it flushes: it counts in
    `digests` alone. `peak_memory_bytes` and `step_s` never repeat exactly, so nothing compares them.
    """

    allowed_loss: tuple[float, ...] = ()  # nats from the golden, of every step
    worst_gradient: WorstGradient | None = None
    same_bits: bool | None = None  # every gradient and updated parameter has those of one rank; None: not compared
    expected_flops: Mapping[str, Multiplied] = {}  # by the formula; empty where it does not apply
    expected_wire: Mapping[str, Sent] = {}  # by the formula, without kinds of which it gives only limits
    expected_saved_bytes: int | None = None  # by the formula; None where there is none, or where it gives only limits
    casts: tuple[CastRange, ...] = ()
    cast_calls: int | None = None  # casts of all ranks and steps, by linears; None where compiled code casts
    expected_cast_calls: int | None = None  # by the formula; None where it does not apply
    peak_memory_bytes: int | None = None  # of the rank with most. CUDA: allocator; CPU: growth of the resident set
    step_s: tuple[float, ...] = ()  # of every step, of the slowest rank, with all that probes take
