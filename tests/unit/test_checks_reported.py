"""The checks of reported numbers: `finite`, `clipping` and `evaluation` find every number that is missing or wrong."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks import reported
from harness.expect.traffic import expected_transfers
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.trace import Run
from harness.verdict import Finding, Verdict
from tests.builders import make_case, make_run, make_steps, make_witnesses, not_judged, run_of, with_rank, with_step


def case(tp: int = 2, steps: int = 3) -> Case:
    return make_case(tp=tp, steps=steps)


def run(world: int = 2, steps: int = 3) -> Run:
    return make_run(case(world), losses=(7.0,) * steps)


def check(checked_run: Run, of: Case | None = None) -> list[Finding]:
    of = of or case()
    return reported.check_finite(of, checked_run, make_witnesses(of))


@given(st.integers(1, 8), st.integers(1, 6))
def test_a_whole_run_has_no_findings(tp: int, steps: int) -> None:
    assert check(run(tp, steps), case(tp, steps)) == []


@given(
    st.integers(1, 3), st.integers(0, 1), st.sampled_from(["loss", "grad_norm"]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)  # fmt: skip
def test_no_number_that_is_not_finite_passes(number: int, rank: int, quantity: str, value: float) -> None:
    findings = check(with_step(run(), rank, number, **{quantity: value}))
    assert len(findings) == 1
    finding = findings[0]
    assert (finding.step, finding.rank, finding.verdict) == (number, rank, Verdict.NUMERIC)
    assert finding.rule == {"loss": reported.LOSS, "grad_norm": reported.GRAD_NORM}[quantity].name
    assert dict(finding.values) == {"quantity": quantity, "value": str(value), "count": 1}


@pytest.mark.parametrize(
    ("number", "good"), [({"grad_norm": 0.0}, False), ({"grad_norm": -1.0}, False), ({"loss": 0.0}, True)]
)
def test_a_gradient_vanishes_and_is_found_and_a_loss_of_zero_is_a_number(number: dict[str, float], good: bool) -> None:
    assert [finding.step for finding in check(with_step(run(), 1, 2, **number))] == ([] if good else [2])


def test_the_first_step_wins_then_the_lowest_rank_and_all_are_counted() -> None:
    broken = run()
    for rank, number in ((0, 3), (1, 3), (1, 2)):
        broken = with_step(broken, rank, number, loss=math.nan)
    (finding,) = check(broken)
    assert (finding.step, finding.rank) == (2, 1)
    assert (finding.rule, finding.values["count"], finding.ranks) == (reported.LOSS.name, 3, (0, 1))


@given(st.permutations(range(4)), st.sets(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=4))
def test_the_order_of_ranks_does_not_matter(order: list[int], bad: set[tuple[int, int]]) -> None:
    broken = run(4)
    for rank, number in bad:
        broken = with_step(broken, rank, number, loss=math.nan)
    shuffled = run_of(*(broken.traces[index] for index in order))
    assert check(shuffled, case(4)) == check(broken, case(4))


@pytest.mark.parametrize("numbers", [(), (1, 2), (1, 2, 3, 4), (0, 1, 2), (1, 3, 2), (1, 2, 2), (1, 1, 2, 3)])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_only_steps_1_to_n_in_order_are_right(numbers: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    (one,) = make_steps([7.0])
    broken, steps = run(), tuple(replace(one, step=number) for number in numbers)
    for rank in ranks:
        broken = with_rank(broken, rank, lambda trace: replace(trace, steps=steps))
    (finding,) = check(broken)
    assert (finding.rule, finding.verdict) == (reported.STEPS.name, Verdict.INVARIANT)
    assert (finding.ranks, finding.values["steps"]) == (ranks, 3)


def test_every_rank_must_answer_exactly_once() -> None:
    full = run(3).traces
    for traces, rule, ranks in (
        ((), reported.NO_TRACE, (0, 1)),
        (full[:1], reported.NO_TRACE, (1,)),
        (full, reported.OTHER_WORLD, (2,)),
        ((full[0], full[1], full[1]), reported.SEVERAL_TRACES, (1,)),
    ):
        assert [(finding.rule, finding.ranks) for finding in check(run_of(*traces))] == [(rule.name, ranks)]


def test_the_words_of_the_findings() -> None:
    (lost,) = check(run(1), case(3))
    assert (lost.rule, lost.rank, lost.ranks, lost.found) == (reported.NO_TRACE.name, 1, (1, 2), "1 trace")
    (none, *_) = check(run(2, steps=0))
    assert none.found == "0 steps: none"
    (short,) = check(run(2, steps=12), case(steps=13))
    assert short.found == "12 steps: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
    assert (short.expected or "").endswith("11, 12, …")
    (bad,) = check(with_step(run(), 0, 2, loss=math.nan))
    assert (bad.expected, bad.found) == ("a finite number", "nan")
    (bad,) = check(with_step(run(), 0, 2, grad_norm=0.0))
    assert (bad.expected, bad.found) == ("a finite number above 0", "0.0")


EVALUATED = make_case(evaluate=True, dtype="float64", steps=2)


def of_steps(checked: Run, rank: int, **numbers: float | None) -> Run:
    """The run in which a rank has these numbers in both steps."""
    return with_step(with_step(checked, rank, 1, **numbers), rank, 2, **numbers)


def findings_of_loss(evaluated: float | None, *, rank: int = 0, case: Case = EVALUATED) -> list[Finding]:
    fine = of_steps(of_steps(run(steps=2), 0, loss=7.0, evaluation_loss=7.0), 1, loss=7.0, evaluation_loss=7.0)
    checked = with_step(fine, rank, 2, evaluation_loss=evaluated)
    return [*reported.check_evaluation(case, checked, make_witnesses(case))]


def test_the_loss_of_training_has_no_findings() -> None:
    assert findings_of_loss(7.0) == []


@pytest.mark.parametrize("evaluated", [math.nextafter(7.0, 8), 8.0, math.nan, None])
@pytest.mark.parametrize("rank", [0, 1])
def test_any_other_loss_is_found(evaluated: float | None, rank: int) -> None:
    (finding,) = findings_of_loss(evaluated, rank=rank)
    assert (finding.step, finding.rank, finding.expected) == (2, rank, "7.0")
    assert finding.rule == reported.OTHER_LOSS.name


@pytest.mark.plugin("torchtitan")
@pytest.mark.parametrize(("dtype", "rounding"), [("float64", 2.0**-53), ("bfloat16", 2.0**-24)])
@pytest.mark.parametrize("packed", [{"ignored_tokens": "unequal"}, {"packing": "padded"}, {"global_batch": 6}])
def test_a_sum_that_is_divided_rounds_otherwise_than_two_parts(
    packed: dict[str, object], dtype: str, rounding: float
) -> None:
    axes: dict[str, object] = {"target": "torchtitan", "dp_shard": 2, "evaluate": True, "dtype": dtype, "steps": 2}
    rounds = make_case(**axes, **packed)
    found = [findings_of_loss(7 * (1 + times * rounding), case=rounds) for times in (-2, 2, -4, 4)]
    assert [len(findings) for findings in found] == [0, 0, 1, 1]
    assert len(findings_of_loss(7 * (1 + 2 * rounding), case=make_case(**axes))) == 1, "by 256 nothing is rounded"
    assert len(findings_of_loss(7 * (1 + 2 * rounding), case=replace(rounds, target="reference"))) == 1
    assert len(findings_of_loss(math.nan, case=rounds)) == 1


def test_without_an_evaluation_nothing_is_judged() -> None:
    assert "evaluation" in not_judged(make_case(dtype="float64"))
    assert "evaluation" not in not_judged(EVALUATED)


@pytest.mark.parametrize(
    "text", ["tp2-nolp-tensorwise-tpstyle.fp8-v2048-eval-f64", "hsdp2x2-tp2-nosp-rowwise-head.fp8-v2048-eval-f64"]
)
def test_an_evaluation_sends_no_gradient_and_every_weight_and_activation_once_more(text: str) -> None:
    def sent(text: str) -> dict[str, int]:
        transfers = expected_transfers(parse_case_id(text), step=2, rank=0)
        return {f"{transfer.purpose} {transfer.kind} {transfer.axis}": transfer.times for transfer in transfers}

    more, fewer = sent(text), sent(text.replace("-eval", ""))
    added = {purpose for purpose, times in more.items() if times > fewer[purpose]}
    assert all(times - fewer[purpose] <= fewer[purpose] for purpose, times in more.items())
    assert not {purpose for purpose in added if "gradient" in purpose or "dgrad" in purpose}
    assert not {purpose for purpose in more.keys() - added if "outputs of" in purpose or "weights of" in purpose}


CLIPPED = make_case(max_norm=0.5, dtype="float64", steps=2)
FINE = {"reported_grad_norm": 0.4, "grad_norm": 0.4}


def clipped(grad_norm: float, told: float | None, *, ranks: tuple[int, ...] = (0,)) -> list[Finding]:
    """What is found where `ranks` have these norms, and the others 0.4, unclipped."""
    checked = of_steps(of_steps(run(steps=2), 0, **FINE), 1, **FINE)
    for rank in ranks:
        checked = of_steps(checked, rank, reported_grad_norm=told, grad_norm=grad_norm)
    return reported.check_clipping(CLIPPED, checked, make_witnesses(CLIPPED))


@pytest.mark.parametrize(
    ("grad_norm", "told"), [(0.5 * (1 - 1e-6), 2.0), (0.4, 0.4), (0.5, 0.5), (0.5, None), (0.3, None)]
)
def test_clipped_gradients_have_no_findings(grad_norm: float, told: float | None) -> None:
    assert clipped(grad_norm, told) == []


@pytest.mark.parametrize(
    ("grad_norm", "told"),
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
def test_any_other_norm_is_found(grad_norm: float, told: float | None, rank: int) -> None:
    (finding,) = clipped(grad_norm, told, ranks=(rank,))
    assert (finding.rule, finding.step, finding.rank) == (reported.NOT_CLIPPED.name, 1, rank)
    assert (finding.values["max_norm"], repr(finding.values["norm"])) == (0.5, repr(grad_norm))
    assert ("ranks clip by different norms" in finding.message) == (told not in (None, 0.4))


def test_a_norm_of_all_ranks_names_none() -> None:
    (finding,) = clipped(2.0, 2.0, ranks=(0, 1))
    assert (finding.rule, finding.step, finding.rank, finding.ranks) == (reported.NOT_CLIPPED.name, 1, None, ())
    assert "ranks clip by different norms" not in finding.message
