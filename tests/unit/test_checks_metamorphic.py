"""The check `metamorphic`: every bit is the partner's, and there is no claim without a partner."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from harness.checks.check import Witnesses
from harness.checks.judge import judge
from harness.checks.metamorphic import (
    GRAD_NORM,
    GRADIENTS,
    LOSS,
    NO_PARTNER,
    NOTHING_COMPARED,
    ONE_SIDE,
    PARAMETERS,
    check_metamorphic,
)
from harness.expect.relations import Relation
from harness.trace import Run
from harness.trace.model import TensorSketch
from harness.verdict import Finding, Verdict
from tests.builders import (
    make_case,
    make_fused,
    make_graphs,
    make_run,
    make_sketch,
    make_trace,
    make_witnesses,
    rules,
    run_of,
    with_sketches,
    with_step,
)

CASE = make_case(tp=2, checkpointing="full", steps=2)
PLAIN = make_case(tp=2, steps=2)
BITWISE = Relation(name="checkpointing", partner=PLAIN)

GRADS = tuple(make_sketch(fqn, step) for step in (1, 2) for fqn in ("a", "b"))
PARAMS = tuple(make_sketch(fqn, 2, "param") for fqn in ("a", "b"))


def run(losses: tuple[float, float] = (8.0, 8.0)) -> Run:
    """Two ranks that hold every gradient; the first one owns them, and the final parameters."""
    first = make_trace(CASE, 0, losses=losses, sketches=(*GRADS, *PARAMS))
    second = make_trace(CASE, 1, losses=losses, sketches=tuple(replace(sketch, owner=False) for sketch in GRADS))
    return run_of(first, second)


def with_sketch(changed: TensorSketch, rank: int = 0) -> Run:
    """A run whose sketch of the same tensor, kind and step on one rank is another one."""
    place = (changed.fqn, changed.kind, changed.step)

    def change(sketch: TensorSketch) -> TensorSketch:
        same = (sketch.fqn, sketch.kind, sketch.step) == place
        return replace(changed, owner=sketch.owner) if same else sketch

    return with_sketches(run(), change, rank=rank)


def witnesses(relation: Relation | None, partner: Run | None) -> Witnesses:
    return make_witnesses(CASE, relation=relation, partner=partner)


def check(checked_run: Run, relation: Relation = BITWISE, partner: Run | None = None) -> list[Finding]:
    return check_metamorphic(CASE, checked_run, witnesses(relation, partner or run()))


def test_the_same_run_has_no_findings_and_tensors_that_one_side_or_both_lack_have() -> None:
    assert check(run()) == []
    lacking = with_sketches(run(), lambda s: s if s.fqn == "a" else None)
    (here,) = check(run(), partner=lacking)
    (there,) = check(lacking)
    for finding, side in ((here, "here only"), (there, "there only")):
        assert (finding.rule, finding.module) == (ONE_SIDE.name, "b")
        assert (finding.values["kind"], finding.values["side"], finding.values["count"]) == ("grad", side, 3)
    empty = make_run(CASE, sketches=())
    assert NOTHING_COMPARED.name in rules(check(empty, partner=empty))


@pytest.mark.parametrize("number", ["loss", "grad_norm"])
@pytest.mark.parametrize(("step", "rank"), [(1, 0), (2, 1)])
def test_one_unit_in_the_last_place_of_a_number_breaks_a_bitwise_promise(number: str, step: int, rank: int) -> None:
    value = {"loss": 8.0, "grad_norm": 1.0}[number]
    off = with_step(run(), rank, step, **{number: math.nextafter(value, 9)})
    (finding,) = check(off)
    assert (finding.step, finding.rank, finding.verdict) == (step, rank, Verdict.NUMERIC)
    assert (finding.expected, finding.found) == (repr(value), repr(math.nextafter(value, 9)))
    assert finding.rule == {"loss": LOSS, "grad_norm": GRAD_NORM}[number].name
    assert "tp2-bf16-v2048-s2-f32 (checkpointing)" in str(finding.values["partner"])


@pytest.mark.parametrize("number", ["loss", "grad_norm"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_equals_nothing(number: str, bad: float) -> None:
    off = with_step(run(), 0, 2, **{number: bad})
    assert check(off) and check(run(), partner=off) and check(off, partner=off)


def test_the_first_step_that_differs_is_reported() -> None:
    (finding,) = check(run(losses=(8.5, 8.5)))
    assert (finding.step, finding.rank, finding.ranks) == (1, None, ())  # the number of all ranks


@pytest.mark.parametrize(("name", "operand"), [("async_tp", "fused_all_gather_matmul"), ("checkpointing", "")])
def test_what_async_tp_fused_is_named_where_the_partner_has_none(name: str, operand: str) -> None:
    off = run(losses=(8.5, 8.5))
    fused = make_graphs(calls=(make_fused(), make_fused(step=2)))
    off = run_of(*(replace(trace, graphs=fused) for trace in off.traces))
    (finding,) = check(off, replace(BITWISE, name=name))
    assert (finding.rule, finding.operand) == (LOSS.name, operand)


@pytest.mark.parametrize("rank", [0, 1])
def test_other_bits_of_a_gradient_are_found_on_every_rank(rank: int) -> None:
    (finding,) = check(with_sketch(make_sketch("b", 2, digest="x"), rank))
    assert (finding.step, finding.rank, finding.module, finding.verdict) == (2, rank, "b", Verdict.NUMERIC)
    assert (finding.rule, finding.values["count"], finding.values["compared"]) == (GRADIENTS.name, 1, 2)
    assert finding.expected == "[4, 4] at [0, 0]: 0 1.0" and finding.found == "[4, 4] at [0, 0]: x"


def test_the_gradient_that_is_furthest_away_is_named() -> None:
    off = with_sketch(make_sketch("b", 1, value=1.5, digest="x"))
    both = with_sketches(off, lambda s: replace(s, digest="y") if s.fqn == "a" else s, rank=0)
    (finding,) = check(both)
    assert (finding.module, finding.found) == ("b", "[4, 4] at [0, 0]: x")
    assert (finding.rule, finding.values["count"], finding.values["compared"]) == (GRADIENTS.name, 2, 2)
    assert finding.values["distance"] == finding.size == 0.5


def test_bits_are_compared_where_numbers_are_equal() -> None:
    """-0.0 and 0.0, or two elements that changed places between positions of equal sign."""
    off = with_sketch(make_sketch("a", 2, "param", digest="x"))
    (finding,) = check(off)
    assert (finding.rule, finding.values["count"], finding.values["compared"]) == (PARAMETERS.name, 1, 2)
    assert finding.values["distance"] == finding.size == 0
    off = with_sketch(make_sketch("a", 2, "param", value=math.nan))
    assert check(off, partner=off)


def test_a_partner_that_could_not_be_run_is_a_finding() -> None:
    (finding,) = check_metamorphic(CASE, run(), witnesses(BITWISE, None))
    assert (finding.verdict, finding.rule, finding.judged) == (Verdict.INVARIANT, NO_PARTNER.name, False)


def test_the_judge_claims_the_check_only_for_sketched_cases_with_a_relation() -> None:
    asked = judge(CASE, run(), "ok", witnesses(BITWISE, run()))
    assert "metamorphic" in asked.checks and not any(f.check == "metamorphic" for f in asked.findings)
    assert "metamorphic" in judge(CASE, run(), "ok", witnesses(BITWISE, None)).checks
    assert "metamorphic" not in judge(CASE, run(), "ok", witnesses(None, None)).checks
    assert "metamorphic" not in judge(CASE, run().without_records, "ok", witnesses(BITWISE, run())).checks
