"""The expected casts to float8 of every rank in one step: which linears, how often, in what form.

Derived from torchao 0.18: `Float8Linear`, its tensor-parallel styles and its FSDP2 extension.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from harness.expect.model import Model
from harness.expect.upstream import SEPARATE_BACKWARD_CASTS, Changes
from harness.matrix.case import Case
from harness.matrix.layout import DP_AXES
from harness.matrix.linears import ROWWISE
from harness.matrix.recipes import E4M3, E5M2, Operand
from harness.trace.operands import CastPhase, CastRecord, Role


class CastForm(NamedTuple):
    axiswise_dim: int | None
    source_dtype: str
    target_dtype: str


class CastSite(NamedTuple):
    fqn: str
    role: Role
    phase: CastPhase


class CompiledCasts(NamedTuple):
    """How many casts of a step compiled blocks must execute, of those that no compiler may merge.

    Each is of another tensor: weights, and gradients of outputs, which alone are cast to e5m2.
    """

    weights_forward: int
    e5m2_forward: int
    e5m2_backward: int


OF_GATHERS = frozenset({"all_gather", "gathered"})  # phases: FSDP2 casts, not a linear, and how often is its choice
_FORWARDS: tuple[CastPhase, ...] = ("evaluation", "forward", "recompute")


def expected_casts(case: Case, model: Model) -> dict[CastSite, tuple[CastForm, ...]]:
    """The forms of the casts at every site, in execution order. FSDP2 may cast more often at `all_gather`."""
    expected: dict[CastSite, tuple[CastForm, ...]] = {}
    for fqn in model.converted:
        calls, again = model.calls[fqn], model.recomputed[fqn]
        evaluated = calls * case.train.evaluate
        times_of: dict[CastPhase, int] = {
            "all_gather": 1,
            "gathered": evaluated + 2 * calls + again,
            "evaluation": evaluated,
            "recompute": again,
        }
        casts_again = fqn not in model.styled
        for site, forms in (
            *_inputs(case, fqn, model.input_sites[fqn], casts_again=casts_again),
            *_weights(case, fqn, gathered=fqn in model.gathered),
            *_grad_outputs(case, fqn, casts_again=casts_again),
        ):
            times = times_of.get(site.phase, calls)
            if times and forms:
                expected[site] = forms * times
    return expected


def compiled_casts(case: Case, fqns: Collection[str], changes: Changes) -> CompiledCasts:
    """The casts of compiled blocks in one step. `fqns`: the converted linears in them."""
    weights, gradients = len(fqns), len(fqns)
    if SEPARATE_BACKWARD_CASTS in changes and case.layout.tp > 1 and case.float8.traits.one_scale_per_tensor:
        weights += sum(not case.checkpointing.wraps(int(fqn.split(".")[1])) for fqn in fqns)
        if case.float8.tp_styles != "float8":  # a style casts a gradient once, before both of its matmuls
            gradients += sum(fqn.split(".", 2)[2] not in ROWWISE for fqn in fqns)
    return CompiledCasts(
        weights_forward=0 if case.gathers_float8 else weights,
        e5m2_forward=0,
        e5m2_backward=gradients if case.float8.traits.grad_output_dtype == E5M2 else 0,
    )


def _inputs(case: Case, fqn: str, site: str, *, casts_again: bool) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    yield from _forwards(site, "input", _forms(case, "i", -1, E4M3))
    if casts_again:
        yield CastSite(fqn, "input", "backward"), _forms(case, "i_gw", 0, E4M3)


def _weights(case: Case, fqn: str, *, gathered: bool) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    if gathered:
        form = CastForm(None, case.parameter_dtype, E4M3)
        yield CastSite(fqn, "weight", "all_gather"), (form,)
        yield CastSite(fqn, "weight", "gathered"), (form,)  # read in every forward, and in backward
        return
    forward, backward = (-1, 0) if case.float8.traits.in_blocks else (0, -1)  # Float8Linear casts the transposed weight
    yield from _forwards(fqn, "weight", _forms(case, "w", forward, E4M3))
    yield CastSite(fqn, "weight", "backward"), _forms(case, "w_gi", backward, E4M3)


def _grad_outputs(case: Case, fqn: str, *, casts_again: bool) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    dtype = case.float8.traits.grad_output_dtype
    forms = _forms(case, "go", -1, dtype)
    if casts_again:
        forms += _forms(case, "go_gw", 0, dtype)  # torchao casts it once for dgrad and once for wgrad
    yield CastSite(fqn, "grad_output", "backward"), forms


def _forwards(site: str, role: Role, forms: tuple[CastForm, ...]) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    for phase in _FORWARDS:
        yield CastSite(site, role, phase), forms


def _forms(case: Case, operand: Operand, dim: int, dtype: str) -> tuple[CastForm, ...]:
    """How an operand is cast that a matmul contracts along `dim`; () in high precision."""
    scaling = case.float8.traits.scaling[operand]
    form = CastForm(dim if scaling in ("axs", "blk") else None, case.train.dtype, dtype)
    return () if scaling == "dis" else (form,)


# Which ranks must share the scale of a cast, and which hold the same shard of its tensor


def scale_axes(case: Case, cast: CastRecord) -> Collection[str]:
    """Mesh axes along which ranks share one scale: the tensor is replicated there, or sharded along the scaled dim.

    A weight is the same on every data-parallel rank, and one tensor for everything that multiplies it.
    """
    axes = {
        axis for axis, placement in zip(cast.mesh_axes, cast.placements, strict=True) if _is_one_scale(cast, placement)
    }
    if cast.role == "weight":
        axes |= set(DP_AXES)
    return axes


def replica_axes(cast: CastRecord) -> Collection[str]:
    """Mesh axes along which the ranks hold the same shard of the tensor."""
    axes = {axis for axis, placement in zip(cast.mesh_axes, cast.placements, strict=True) if placement == "Replicate()"}
    if cast.role == "weight" and cast.phase not in ("all_gather", "gathered"):
        axes |= set(DP_AXES)
    return axes


def scaled_dim(cast: CastRecord) -> int | None:
    """The dim that one scale spans, counted from 0; None when one scale spans the tensor."""
    return None if cast.axiswise_dim is None else cast.axiswise_dim % len(cast.shape)


def _is_one_scale(cast: CastRecord, placement: str) -> bool:
    dim = scaled_dim(cast)
    return dim is None or placement == "Replicate()" or (placement == f"Shard({dim})" and not cast.block)
