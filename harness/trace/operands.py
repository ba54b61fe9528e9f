"""Operands: every cast to float8 and every scaled matmul of a rank, in execution order.

Recorded by `worker/probes/operands.py`. Numbers are of the local tensor of this rank unless they say otherwise.
"""

from typing import Literal

from harness.trace.record import Record

Role = Literal["input", "weight", "grad_output"]
# all_gather: the cast of this rank's shard before FSDP2 gathers it. gathered: not a cast, but the gathered weight right
# before a linear uses it: this rank's own rows of it, compared with its master weights at that moment. evaluation: a
# forward that no backward follows.
CastPhase = Literal["evaluation", "forward", "recompute", "backward", "all_gather", "gathered"]
GemmRole = Literal["evaluation", "forward", "dgrad", "wgrad", "recompute"]

# The operands a and b of a linear's matmuls.
GEMM_OPERANDS: dict[GemmRole, tuple[Role, Role]] = {
    "evaluation": ("input", "weight"),
    "forward": ("input", "weight"),
    "recompute": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}

# What was used again: float8 data, a scale, the high-precision tensor that is cast. other_scale: a scale, for another
# tensor than it was used for first.
Aging = Literal["data", "scale", "source", "other_scale"]


class ScaleSummary(Record, frozen=True, kw_only=True):
    """A scale tensor, summarized. As in torchao, the high-precision value times the scale is what is cast.

    Of MXFP8 it is the inverse, in the order of rows and blocks: the float8 value times the scale is the operand.
    """

    shape: tuple[int, ...]
    dtype: str  # "float32", "float8_e8m0fnu"
    minimum: float
    maximum: float
    total: float  # sum in float64: adds up over shards
    log2_total: float  # sum of the base-2 logarithms: adds up too, and the smallest rows do not outweigh all others
    digest: str  # of the bytes
    power_of_two: bool  # every value is an exact power of two

    def __str__(self) -> str:
        """Return its value, or the range and sum of its values."""
        if self.minimum == self.maximum:
            return f"{self.minimum!r}"
        return f"{self.minimum!r} to {self.maximum!r}, sum {self.total!r}"


class CastStatistics(Record, frozen=True, kw_only=True):
    """The numbers of one cast to float8, eager or in a compiled graph. They are of the local tensor."""

    target_dtype: str  # "float8_e4m3fn", "float8_e5m2"
    scale: ScaleSummary
    amax: float  # largest magnitude of the high-precision tensor
    scaled_amax_minimum: float  # smallest over the scales of (amax of its row) * scale, rows of zeros left out
    scaled_amax_maximum: float
    saturated: int  # elements whose scaled magnitude exceeds the largest float8 value
    nonfinite: int  # elements of the float8 result that are NaN or infinite
    mismatched: int  # elements of the float8 result that are not the cast of their source by their scale
    elements: int


class CastRecord(CastStatistics, frozen=True, kw_only=True):
    """One cast of a high-precision tensor to float8."""

    index: int  # execution order on this rank, over the whole run, shared with matmuls
    step: int  # 1-based
    fqn: str  # of the linear, or of the module whose input or output is cast
    role: Role
    phase: CastPhase
    shape: tuple[int, ...]  # of the logical tensor
    local_shape: tuple[int, ...]
    placements: tuple[str, ...]  # "Shard(0)", "Replicate()", ... per mesh axis; empty for a plain tensor
    mesh_axes: tuple[str, ...]  # names of the mesh axes, in the order of `placements`
    source_dtype: str  # "float32", "bfloat16"
    axiswise_dim: int | None  # None: one scale for the tensor
    block: tuple[int, int] = (0, 0)  # rows, and values along that dim, that share a scale; 0: all of them
    extreme_blocks: tuple[int, ...] = ()  # which have the smallest and the largest amax * scale, in the order of scales
    flushed: int  # elements that are not zero and became zero; in float64 without those that are its rounding
    largest: float | None = None  # largest value with its sign, where one scale spans the tensor
    data_digest: str


class CastShare(Record, frozen=True, kw_only=True):
    """What the casts of one operand lost in one step, over ranks and phases: of a linear, in one form of cast."""

    step: int
    fqn: str
    role: Role
    axiswise_dim: int | None
    target_dtype: str
    elements: int
    flushed: int
    saturated: int

    @property
    def operand(self) -> tuple[int, str, Role, int | None, str]:
        return self.step, self.fqn, self.role, self.axiswise_dim, self.target_dtype


class MatmulRecord(Record, frozen=True, kw_only=True):
    """One scaled matmul: [m, k] x [k, n] on this rank."""

    index: int
    step: int
    fqn: str
    gemm: GemmRole
    m: int
    k: int
    n: int
    a_dtype: str
    b_dtype: str
    a_scale: ScaleSummary  # as in torch._scaled_mm, the inverse: the float8 value times the scale is the operand
    b_scale: ScaleSummary
    a_digest: str
    b_digest: str


class Aged(Record, frozen=True, kw_only=True):
    """Memory that a cast or matmul used, and that another step had used before, of an activation another microbatch."""

    index: int  # of the cast or matmul
    what: Aging
    step: int
    fqn: str
    role: Role
    where: str  # phase of the cast, or which matmul it is
    microbatch: int  # 1-based; 0 where it is not known
    first_step: int
    first_fqn: str
    first_role: Role
    first_phase: CastPhase
    first_microbatch: int


class KeptWeight(Record, frozen=True, kw_only=True):
    """A weight that FSDP2 holds gathered when a step is over."""

    step: int
    fqn: str  # of its module
    name: str


class OperandTrace(Record, frozen=True, kw_only=True):
    """Everything that the operand probe recorded on one rank."""

    casts: tuple[CastRecord, ...]
    matmuls: tuple[MatmulRecord, ...]
    aged: tuple[Aged, ...] = ()
    kept: tuple[KeptWeight, ...] = ()
