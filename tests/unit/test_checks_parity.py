"""The check `parity`: everything that is further from one rank than its kind may be is found and named."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checks.parity import FLOAT32_LOSS, LOSS_SHARE, check_parity, worst_distance
from harness.checks.witnesses import Witnesses
from harness.measured.tolerance import Tolerance
from harness.spec.case import Case, Dtype, Layout, Train
from harness.trace import RankTrace, Run, StepTrace
from harness.trace.sketches import SKETCH_SIZE, TensorSketch
from harness.verdict import Finding, Verdict

ALLOWED = (1e-3, 2e-3)
FQNS = ("a", "b")


def case(dtype: Dtype = "float64") -> Case:
    return Case(layout=Layout(tp=2), train=Train(steps=2, dtype=dtype))


def sketch(fqn: str, step: int, kind: str = "grad", *, rank: int = 0, value: float = 1.0) -> TensorSketch:
    """One of two halves of a tensor whose norm is `value`; the sketch of the whole is `value` in every sum."""
    return TensorSketch(
        fqn=fqn,
        kind=kind,  # type: ignore[arg-type]
        step=step,
        shape=(4, 4),
        offset=(2 * rank, 0),
        local_shape=(2, 4),
        owner=True,
        norm_squared=value * value / 2,
        sums=struct.pack(f"<{SKETCH_SIZE}d", *[value / 2] * SKETCH_SIZE),
        digest=f"{rank}{value!r}",
    )


def trace(rank: int, sketches: tuple[TensorSketch, ...]) -> RankTrace:
    return RankTrace(
        rank=rank,
        steps=tuple(StepTrace(step=n, loss=8.0, grad_norm=1.0, scaled_mm_calls=0, seconds=0.1) for n in (1, 2)),
        converted_fqns=(),
        unmatched_filters=(),
        peak_memory_bytes=0,
        data_digest="d",
        software={},
        device="cpu",
        virtual=(),
        sketches=sketches,
    )


def places() -> list[tuple[str, int, str]]:
    return [(fqn, step, "grad") for step in (1, 2) for fqn in FQNS] + [(fqn, 2, "param") for fqn in FQNS]


def run(**off: Any) -> Run:
    """Two ranks that hold a half of every tensor each. `off`: values of tensors by `kind_fqn_step`."""
    traces = []
    for rank in range(2):
        values = {place: off.get(f"{place[2]}_{place[0]}_{place[1]}", 1.0) for place in places()}
        traces.append(trace(rank, tuple(sketch(*place, rank=rank, value=value) for place, value in values.items())))
    return Run(traces=tuple(traces), failures=())


def solo(**off: Any) -> Run:
    """The same on one rank, which holds everything."""
    both = [sketch for each in run(**off).traces for sketch in each.sketches or ()]
    return Run(traces=(trace(0, tuple(both)),), failures=())


def with_loss(found: Run, step: int, rank: int, loss: float) -> Run:
    return Run(
        traces=tuple(
            msgspec.structs.replace(
                each,
                steps=tuple(
                    msgspec.structs.replace(s, loss=loss) if (each.rank, s.step) == (rank, step) else s
                    for s in each.steps
                ),
            )
            for each in found.traces
        ),
        failures=(),
    )


def with_sketches(found: Run, rank: int, sketches: tuple[TensorSketch, ...]) -> Run:
    traces = [msgspec.structs.replace(t, sketches=sketches) if t.rank == rank else t for t in found.traces]
    return Run(traces=tuple(traces), failures=())


def check(found: Run, expected: Run | None, *, dtype: Dtype = "float64", tolerance: bool = True) -> list[Finding]:
    allowed = Tolerance(name="parity", key="k", per_step=ALLOWED, margin=2.0, evidence="e")
    given = Witnesses(
        golden=None,
        tolerance=None,
        solo=expected,
        parity_tolerance=allowed if tolerance else None,
        refusal=None,
        expected_fqns=(),
        expected_scaled_mm=0,
    )
    return check_parity(case(dtype), found, given)


def test_what_one_rank_computes_has_no_findings() -> None:
    assert check(run(), solo()) == []


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("fqn", FQNS)
def test_one_gradient_of_one_step_is_found_and_named(fqn: str, step: int) -> None:
    (finding,) = check(run(**{f"grad_{fqn}_{step}": 1.01}), solo())
    assert (finding.step, finding.module, finding.verdict) == (step, fqn, Verdict.NUMERIC)
    assert "gradients of 1 of 2 parameters" in finding.message
    assert (finding.expected, finding.found) == (f"distance <= {ALLOWED[step - 1]:.2g}", "0.01")


def test_the_worst_gradient_is_named_and_nan_is_the_worst() -> None:
    (finding,) = check(run(grad_a_1=1.01, grad_b_1=1.02), solo())
    assert finding.module == "b" and "gradients of 2 of 2" in finding.message
    (finding,) = check(run(grad_a_1=math.nan, grad_b_1=5.0), solo())
    assert finding.module == "a"


@given(st.sampled_from([1, 2]), st.floats(0, 0.02))
@settings(deadline=None)
def test_each_step_has_its_own_tolerance(step: int, distance: float) -> None:
    found = check(run(**{f"grad_a_{step}": 1 + distance}), solo())
    assert bool(found) == (distance > ALLOWED[step - 1] + 1e-15) or distance == pytest.approx(ALLOWED[step - 1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    for place in ("grad_a_1", "grad_b_2", "param_a_2"):
        assert check(run(**{place: bad}), solo()), place
        assert check(run(), solo(**{place: bad})), place
        assert check(run(**{place: bad}), solo(**{place: bad})), place


def test_a_gradient_must_not_be_where_one_rank_has_none() -> None:
    (finding,) = check(run(), solo(grad_a_1=0.0))
    assert finding.module == "a" and finding.found == "inf"


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 0.0])
def test_what_adamw_hides_is_found(factor: float) -> None:
    """A constant factor of all gradients changes no parameter and no loss."""
    factors = {f"grad_{fqn}_{step}": factor for fqn in FQNS for step in (1, 2)}
    (finding,) = check(run(**factors), solo())
    assert finding.step == 1  # the first step that is off; the next are off because of it


def test_final_parameters_are_compared() -> None:
    (finding,) = check(run(param_b_2=1.01), solo())
    assert (finding.step, finding.module) == (2, "b") and "1 of 2 final parameters" in finding.message


@pytest.mark.parametrize(("step", "rank"), [(1, 0), (2, 1)])
def test_a_loss_is_compared_on_every_rank(step: int, rank: int) -> None:
    allowed = ALLOWED[step - 1] * LOSS_SHARE
    (finding,) = check(with_loss(run(), step, rank, 8.0 + 1.1 * allowed), solo())
    assert (finding.step, finding.rank, finding.expected) == (step, rank, "8.0")
    assert check(with_loss(run(), step, rank, 8.0 + 0.9 * allowed), solo()) == []
    assert check(with_loss(run(), step, rank, math.nan), solo())


def test_a_float32_loss_may_be_a_few_units_of_its_last_place_off() -> None:
    tight = Tolerance(name="parity", key="k", per_step=(1e-9, 1e-9), margin=2.0, evidence="e")
    given = Witnesses(
        golden=None,
        tolerance=None,
        solo=solo(),
        parity_tolerance=tight,
        refusal=None,
        expected_fqns=(),
        expected_scaled_mm=0,
    )
    off = with_loss(run(), 1, 0, 8.0 + FLOAT32_LOSS / 2)
    assert check_parity(case("bfloat16"), off, given) == []
    assert len(check_parity(case("float64"), off, given)) == 1


@pytest.mark.parametrize("lost", [("grad", 1), ("grad", 2), ("param", 2)])
def test_a_lost_half_of_a_tensor_is_found(lost: tuple[str, int]) -> None:
    kept = tuple(s for s in run().traces[1].sketches or () if (s.kind, s.step) != lost or s.fqn != "b")
    found = check(with_sketches(run(), 1, kept), solo())
    (finding,) = [each for each in found if each.verdict is Verdict.INVARIANT]
    assert (finding.step, finding.module) == (lost[1], "b") and "hold 8 elements" in finding.message


@pytest.mark.parametrize("lost", [("grad", 1), ("grad", 2), ("param", 2)])
def test_a_tensor_on_one_side_alone_is_found(lost: tuple[str, int]) -> None:
    def without(found: Run) -> Run:
        for each in found.traces:
            kept = tuple(s for s in each.sketches or () if (s.kind, s.step) != lost or s.fqn != "b")
            found = with_sketches(found, each.rank, kept)
        return found

    (missing,) = check(without(run()), solo())
    (unknown,) = check(run(), without(solo()))
    assert f"{lost[0]} of b is missing" in missing.message and f"{lost[0]} of b is unknown" in unknown.message
    assert missing.step == unknown.step == lost[1]


@pytest.mark.parametrize("kind", ["grad", "param"])
def test_comparing_nothing_never_passes(kind: str) -> None:
    def without(found: Run) -> Run:
        for each in found.traces:
            found = with_sketches(found, each.rank, tuple(s for s in each.sketches or () if s.kind != kind))
        return found

    for finding in check(without(run()), without(solo())):
        assert "was compared" in finding.message and finding.verdict is Verdict.INVARIANT
    assert len(check(without(run()), without(solo()))) == 1


def test_replicas_that_differ_are_found() -> None:
    """Two ranks hold the same half, as under HSDP; what the second one has is not what counts."""
    copies = tuple(msgspec.structs.replace(s, owner=False) for s in run(grad_a_2=1.5).traces[0].sketches or ())
    both = Run(traces=(*run().traces, trace(2, copies)), failures=())
    (finding,) = check(both, solo())
    assert (finding.step, finding.module, finding.verdict) == (2, "a", Verdict.INVARIANT)
    assert "1 pieces are not the same bits" in finding.message and finding.found == "rank 0: 01.0, rank 2: 01.5"


def test_without_a_witness_or_a_tolerance_nothing_passes() -> None:
    (no_solo,) = check(run(), None)
    (no_tolerance,) = check(run(), solo(), tolerance=False)
    assert "solo witness could not be run" in no_solo.message
    assert "fp8-harness tolerance measure" in no_tolerance.message


def test_the_worst_distance_of_a_step_is_what_tolerances_are_fitted_to() -> None:
    off = run(grad_a_1=1.25, grad_b_1=1.5, grad_a_2=1.125)
    assert worst_distance(off, solo(), step=1) == pytest.approx(0.5)
    assert worst_distance(off, solo(), step=2) == pytest.approx(0.125)
    assert math.isnan(worst_distance(off, solo(), step=3))


def test_the_reported_gradient_norm_is_compared() -> None:
    """Sketches cannot see a norm that counts replicas twice: only what the ranks report does."""
    traces = run().traces
    steps = tuple(msgspec.structs.replace(step, grad_norm=step.grad_norm * 1.5) for step in traces[0].steps)
    found = Run(traces=(msgspec.structs.replace(traces[0], steps=steps), *traces[1:]), failures=())
    (finding,) = check(found, solo())
    assert "grad_norm" in finding.message and (finding.step, finding.rank) == (1, 0)
