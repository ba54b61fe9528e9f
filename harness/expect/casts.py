"""The expected casts to float8 of every rank in one step: which linears, how often, in what form.

Derived from torchao 0.18: `Float8Linear`, its tensor-parallel styles and its FSDP2 extension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.expect.model import Model
from harness.expect.versions import CURRENT
from harness.matrix.case import Case
from harness.matrix.linears import OUTPUT_FQN
from harness.matrix.recipes import E4M3
from harness.trace.operands import CastPhase, Role

VERIFIED = CURRENT

# With float8 TP styles these linears cast their own input; the others share the one that their parent module casts.
_OWN_INPUT = ("attention.wo", "feed_forward.w2")


class CastForm(NamedTuple):
    """The scaled dim and the dtypes of a cast."""

    axiswise_dim: int | None
    source_dtype: str
    target_dtype: str


class CastSite(NamedTuple):
    """Where casts happen in every step."""

    fqn: str
    role: Role
    phase: CastPhase


def expected_casts(case: Case, model: Model) -> dict[CastSite, tuple[CastForm, ...]]:
    """The forms of the casts at every site, in execution order. FSDP2 may cast more often at `all_gather`."""
    expected: dict[CastSite, tuple[CastForm, ...]] = {}
    for fqn in model.converted:
        calls, again = model.calls[fqn], model.recomputed[fqn]
        for site, forms in (*_inputs(case, fqn), *_weights(case, fqn), *_grad_outputs(case, fqn)):
            times = {"all_gather": 1, "gathered": 2 * calls + again, "recompute": again}.get(site.phase, calls)
            if times:
                expected[site] = forms * times
    return expected


def input_site(case: Case, fqn: str) -> str:
    """The module that casts the input of this linear: the linear itself, or with float8 TP styles its parent."""
    if case.float8.tp_styles != "float8" or fqn == OUTPUT_FQN or case.layout.tp == 1 or fqn.endswith(_OWN_INPUT):
        return fqn
    return fqn.rpartition(".")[0]


def _inputs(case: Case, fqn: str) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    site, styled = input_site(case, fqn), _has_float8_style(case, fqn)
    yield from _forwards(case, fqn, site, "input", CastForm(_dim(case, -1), case.train.dtype, E4M3))
    if not styled and case.float8.traits.float8_weight_gradient:
        yield CastSite(fqn, "input", "backward"), (CastForm(_dim(case, 0), case.train.dtype, E4M3),)


def _weights(case: Case, fqn: str) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    if case.gathers_float8:
        form = CastForm(None, case.wide_dtype, E4M3)
        yield CastSite(fqn, "weight", "all_gather"), (form,)
        yield CastSite(fqn, "weight", "gathered"), (form,)  # read in forward, recomputation and backward
        return
    yield from _forwards(case, fqn, fqn, "weight", CastForm(_dim(case, 0), case.train.dtype, E4M3))
    for_grad_input = None if case.float8.traits.one_scale_per_weight_in_dgrad else -1
    yield CastSite(fqn, "weight", "backward"), (CastForm(for_grad_input, case.train.dtype, E4M3),)


def _grad_outputs(case: Case, fqn: str) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    dims = [_dim(case, -1)]
    if not _has_float8_style(case, fqn) and case.float8.traits.float8_weight_gradient:
        dims.append(_dim(case, 0))  # torchao casts it once for dgrad and once for wgrad
    yield (
        CastSite(fqn, "grad_output", "backward"),
        tuple(CastForm(dim, case.train.dtype, case.float8.traits.grad_output_dtype) for dim in dims),
    )


def _forwards(
    case: Case, fqn: str, site: str, role: Role, form: CastForm
) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    yield CastSite(site, role, "forward"), (form,)
    yield CastSite(site, role, "recompute"), (form,)


def _has_float8_style(case: Case, fqn: str) -> bool:
    return case.float8.tp_styles == "float8" and case.layout.tp > 1 and fqn != OUTPUT_FQN


def _dim(case: Case, dim: int) -> int | None:
    return None if case.float8.traits.one_scale_per_tensor else dim
