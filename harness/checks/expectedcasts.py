"""The casts to float8 that a case asks of every rank in one step: which linears, how often, in what form.

Written down from torchao 0.18: `Float8Linear`, its tensor-parallel styles and its FSDP2 extension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.spec.case import Case
from harness.spec.gemms import OUTPUT_FQN, converted_fqns
from harness.trace.operands import CastPhase, Role

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
_OWN_INPUT = ("attention.wo", "feed_forward.w2")  # with float8 styles the others share the input of their parent


class CastForm(NamedTuple):
    """What a cast must be like."""

    axiswise_dim: int | None
    source_dtype: str
    target_dtype: str


class CastSite(NamedTuple):
    """Where casts happen in every step."""

    fqn: str
    role: Role
    phase: CastPhase


def expected_casts(case: Case) -> dict[CastSite, tuple[CastForm, ...]]:
    """The forms of the casts at every site, in execution order. At `all_gather` there may be more: FSDP2 decides."""
    expected: dict[CastSite, tuple[CastForm, ...]] = {}
    for fqn in converted_fqns(case):
        for site, forms in (*_inputs(case, fqn), *_weights(case, fqn), *_grad_outputs(case, fqn)):
            expected[site] = forms
    return expected


def uses_fsdp(case: Case) -> bool:
    """FSDP2 shards, or gives one data-parallel rank its mixed precision."""
    return case.layout.dp > 1 or case.train.dtype == "bfloat16"


def gathers_float8(case: Case) -> bool:
    """Weights of converted linears travel, and arrive, in float8."""
    return case.float8.fp8_all_gather and uses_fsdp(case)


def is_recomputed(case: Case, fqn: str) -> bool:
    """The linear is in a block whose forward runs again in the backward pass. All of its casts run again."""
    if fqn == OUTPUT_FQN or case.checkpointing.mode == "none":
        return False
    layer = int(fqn.split(".")[1])
    return case.checkpointing.mode != "selective_layer" or (layer + 1) % case.checkpointing.every == 0


def input_site(case: Case, fqn: str) -> str:
    """The module at which the input of this linear is cast: the linear, or with float8 styles its parent."""
    if case.float8.tp_styles != "float8" or fqn == OUTPUT_FQN or case.layout.tp == 1 or fqn.endswith(_OWN_INPUT):
        return fqn
    return fqn.rpartition(".")[0]


def _inputs(case: Case, fqn: str) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    site, styled = input_site(case, fqn), _is_styled(case, fqn)
    yield from _forwards(case, fqn, site, "input", CastForm(_dim(case, -1), case.train.dtype, E4M3))
    if not styled and case.float8.recipe != "rowwise_with_gw_hp":
        yield CastSite(fqn, "input", "backward"), (CastForm(_dim(case, 0), case.train.dtype, E4M3),)


def _weights(case: Case, fqn: str) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    if gathers_float8(case):
        master = "float32" if case.train.dtype == "bfloat16" else case.train.dtype
        form = CastForm(None, master, E4M3)
        times = 2 + is_recomputed(case, fqn)  # as forward, recomputation and backward find it
        yield CastSite(fqn, "weight", "all_gather"), (form,)
        yield CastSite(fqn, "weight", "gathered"), (form,) * times
        return
    yield from _forwards(case, fqn, fqn, "weight", CastForm(_dim(case, 0), case.train.dtype, E4M3))
    for_grad_input = None if case.float8.recipe == "rowwise_with_gw_hp" else _dim(case, -1)
    yield CastSite(fqn, "weight", "backward"), (CastForm(for_grad_input, case.train.dtype, E4M3),)


def _grad_outputs(case: Case, fqn: str) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    target = E5M2 if case.float8.recipe == "tensorwise" else E4M3
    dims = [_dim(case, -1)]
    if not _is_styled(case, fqn) and case.float8.recipe != "rowwise_with_gw_hp":
        dims.append(_dim(case, 0))  # torchao casts it once for each gradient
    yield CastSite(fqn, "grad_output", "backward"), tuple(CastForm(dim, case.train.dtype, target) for dim in dims)


def _forwards(
    case: Case, fqn: str, site: str, role: Role, form: CastForm
) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    yield CastSite(site, role, "forward"), (form,)
    if is_recomputed(case, fqn):
        yield CastSite(site, role, "recompute"), (form,)


def _is_styled(case: Case, fqn: str) -> bool:
    return case.float8.tp_styles == "float8" and case.layout.tp > 1 and fqn != OUTPUT_FQN


def _dim(case: Case, dim: int) -> int | None:
    return None if case.float8.recipe == "tensorwise" else dim
