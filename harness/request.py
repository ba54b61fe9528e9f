"""The input of a rank. The controller encodes it as the payload of a job, and the rank decodes it."""

from typing import Literal

import msgspec

from harness.matrix.case import Case
from harness.matrix.numerics import Numerics
from harness.trace.model import ModuleShard
from harness.trace.record import Patch

# What collectives run on: shared memory of one machine, torch's gloo over TCP, or NCCL.
Backend = Literal["shared", "gloo", "nccl"]
# What multiplies float8: torch's own kernel of the device, or the exact one in float64 (`worker/virtual/scaled_mm.py`).
Arithmetic = Literal["kernel", "exact"]


def default_arithmetic(device: str) -> Arithmetic:
    """Return what multiplies float8 on this kind of device where nothing is asked for."""
    return "exact" if device == "cpu" else "kernel"


def numerics_of(device: str, backend: Backend, arithmetic: Arithmetic) -> Numerics:
    """Return which bits a run on this kind of device, over this backend and with this arithmetic promises."""
    return Numerics(in_rank_order=backend == "shared", same_in_parts=device == "cpu" and arithmetic == "exact")


class Noise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Random errors as large as those of float8, in a case without FP8 (`worker/training/noise.py`)."""

    draws: tuple[int, ...]  # seeds of the errors: each is a training of its own
    float8_fqns: tuple[str, ...]  # linears with the errors of float8; all others have those of bfloat16
    grad_output_dtype: str  # float8 dtype of their gradients
    saturates: int = 0  # in blocks of so many values, whose scales are rounded down: that cuts the largest of some


def noise_of(case: Case, draws: tuple[int, ...], float8_fqns: tuple[str, ...]) -> Noise:
    """Return the errors of BF16 runs where the case casts these linears to float8."""
    traits = case.float8.traits
    return Noise(
        draws=draws,
        float8_fqns=float8_fqns,
        grad_output_dtype=traits.grad_output_dtype,
        saturates=traits.block if traits.rounds_scales_down else 0,
    )


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Train one case. `injections` are applied in order before the target is built.

    `solo`: a single rank computes what all ranks of the layout must compute together.
    """

    case: Case
    device: str = "cpu"  # "cpu" or "cuda"
    backend: Backend = "shared"
    arithmetic: Arithmetic = "exact"
    injections: tuple[Patch, ...] = ()
    probes: tuple[str, ...] = ()  # fields of RankTrace to record: "sketches", "operands", "traffic", ...
    solo: bool = False
    digests_built: bool = False  # record what the target had put into its parameters, for a check of the target
    noise: Noise | None = None
    # By rank, what the modules of a parallel run had (`RankTrace.module_tensors`): a single rank repeats them.
    replayed: tuple[tuple[ModuleShard, ...], ...] = ()

    @property
    def numerics(self) -> Numerics:
        return numerics_of(self.device, self.backend, self.arithmetic)

    @property
    def world_size(self) -> int:
        return 1 if self.solo or self.replayed else self.case.world_size


CALL = b"call "  # what the payload of a `CallRequest` starts with; that of a `RunRequest` cannot


class CallRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Call `build` of a module with arguments that `harness/worker/calls.py` encoded, in the process group of a job."""

    module: str
    arguments: bytes
    backend: Backend = "shared"
    arithmetic: Arithmetic = "exact"
