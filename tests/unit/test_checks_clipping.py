"""The check `clipping`: the norm that the optimizer gets is the reported one, clipped."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from harness.checks.reported import NOT_CLIPPED, check_clipping
from harness.verdict import Finding
from tests.builders import make_case, make_steps, make_trace, make_witnesses, run_of

CASE = make_case(max_norm=0.5, dtype="float64", steps=2)


def check(grad_norm: float, reported: float | None, *, rank: int = 0) -> list[Finding]:
    steps = make_steps([8.0, 7.9], grad_norm=grad_norm)
    traces = [make_trace(rank=0, losses=[8.0, 7.9]), make_trace(rank=1, losses=[8.0, 7.9])]
    fine = tuple(replace(step, reported_grad_norm=0.4, grad_norm=0.4) for step in steps)
    asked = tuple(replace(step, reported_grad_norm=reported) for step in steps)
    traces = [replace(trace, steps=asked if trace.rank == rank else fine) for trace in traces]
    return check_clipping(CASE, run_of(*traces), make_witnesses(CASE))


@pytest.mark.parametrize(
    ("grad_norm", "reported"), [(0.5 * (1 - 1e-6), 2.0), (0.4, 0.4), (0.5, 0.5), (0.5, None), (0.3, None)]
)
def test_clipped_gradients_have_no_findings(grad_norm: float, reported: float | None) -> None:
    assert check(grad_norm, reported) == []


@pytest.mark.parametrize(
    ("grad_norm", "reported"),
    [
        (2.0, 2.0),
        (0.25, 2.0),
        (0.5, 0.4),
        (0.5001, 2.0),
        (0.6, None),
        (math.nan, 2.0),
        (math.nan, None),
        (0.5, math.nan),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_any_other_norm_is_found(grad_norm: float, reported: float | None, rank: int) -> None:
    (finding,) = check(grad_norm, reported, rank=rank)
    assert (finding.rule, finding.step, finding.rank) == (NOT_CLIPPED.name, 1, rank)
    assert (finding.values["max_norm"], repr(finding.values["norm"])) == (0.5, repr(grad_norm))


def test_a_norm_of_all_ranks_names_none() -> None:
    steps = tuple(replace(step, reported_grad_norm=2.0) for step in make_steps([8.0, 7.9], grad_norm=2.0))
    traces = (replace(make_trace(rank=rank, losses=[8.0, 7.9]), steps=steps) for rank in range(2))
    (finding,) = check_clipping(CASE, run_of(*traces), make_witnesses(CASE))
    assert (finding.rule, finding.step, finding.rank, finding.ranks) == (NOT_CLIPPED.name, 1, None, ())
