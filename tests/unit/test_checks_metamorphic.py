"""The check `metamorphic`: bits where bits are promised, numbers where numbers are, and no claim without a partner."""

from __future__ import annotations

import math
import struct

import msgspec
import pytest

from harness.checks.judge import judge
from harness.checks.metamorphic import EXACT, check_metamorphic
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case, Checkpointing, Layout, Train
from harness.spec.relations import Relation
from harness.trace import RankTrace, Run, StepTrace
from harness.trace.sketches import SKETCH_SIZE, TensorSketch
from harness.verdict import Finding, Verdict

CASE = Case(layout=Layout(tp=2), checkpointing=Checkpointing(mode="full"), train=Train(steps=2))
PLAIN = msgspec.structs.replace(CASE, checkpointing=Checkpointing())
BITWISE = Relation(name="checkpointing", partner=PLAIN, promise="bitwise", reason="r")
SUMS = Relation(name="tp", partner=PLAIN, promise="exact", reason="r")


def sketch(fqn: str, step: int, kind: str = "grad", *, value: float = 1.0, digest: str = "d") -> TensorSketch:
    return TensorSketch(
        fqn=fqn,
        kind=kind,  # type: ignore[arg-type]
        step=step,
        shape=(4, 4),
        offset=(0, 0),
        local_shape=(4, 4),
        owner=True,
        norm_squared=value * value,
        sums=struct.pack(f"<{SKETCH_SIZE}d", *[value] * SKETCH_SIZE),
        digest=digest,
    )


GRADS = tuple(sketch(fqn, step) for step in (1, 2) for fqn in ("a", "b"))
PARAMS = tuple(sketch(fqn, 2, "param") for fqn in ("a", "b"))


def trace(rank: int, *, loss: float = 8.0, grad_norm: float = 1.0) -> RankTrace:
    steps = tuple(
        StepTrace(step=number, loss=loss, grad_norm=grad_norm, scaled_mm_calls=0, seconds=0.1) for number in (1, 2)
    )
    return RankTrace(
        rank=rank,
        steps=steps,
        converted_fqns=(),
        unmatched_filters=(),
        peak_memory_bytes=0,
        data_digest="d",
        software={},
        device="cpu",
        virtual=(),
        sketches=(*GRADS, *PARAMS) if rank == 0 else tuple(msgspec.structs.replace(s, owner=False) for s in GRADS),
    )


def run(*traces: RankTrace) -> Run:
    return Run(traces=traces or (trace(0), trace(1)), failures=())


def with_sketch(changed: TensorSketch, rank: int = 0) -> Run:
    """A run whose sketch of the same tensor, kind and step on one rank is another one."""
    place = (changed.fqn, changed.kind, changed.step)
    traces = tuple(
        msgspec.structs.replace(
            each,
            sketches=tuple(
                msgspec.structs.replace(changed, owner=sketch.owner)
                if each.rank == rank and (sketch.fqn, sketch.kind, sketch.step) == place
                else sketch
                for sketch in each.sketches or ()
            ),
        )
        for each in run().traces
    )
    return Run(traces=traces, failures=())


def with_step(step: int, rank: int, **changes: float) -> Run:
    traces = tuple(
        msgspec.structs.replace(
            each,
            steps=tuple(
                msgspec.structs.replace(s, **changes) if (s.step, each.rank) == (step, rank) else s for s in each.steps
            ),
        )
        for each in run().traces
    )
    return Run(traces=traces, failures=())


def witnesses(relation: Relation | None, partner: Run | None) -> Witnesses:
    return Witnesses(
        golden=None,
        tolerance=None,
        refusal=None,
        expected_fqns=(),
        expected_scaled_mm=0,
        relation=relation,
        partner=partner,
    )


def check(found: Run, relation: Relation = BITWISE, partner: Run | None = None) -> list[Finding]:
    return check_metamorphic(CASE, found, witnesses(relation, partner or run()))


@pytest.mark.parametrize("relation", [BITWISE, SUMS])
def test_the_same_run_has_no_findings(relation: Relation) -> None:
    assert check(run(), relation) == []


@pytest.mark.parametrize("number", ["loss", "grad_norm"])
@pytest.mark.parametrize(("step", "rank"), [(1, 0), (2, 1)])
def test_one_unit_in_the_last_place_of_a_number_breaks_a_bitwise_promise(number: str, step: int, rank: int) -> None:
    value = {"loss": 8.0, "grad_norm": 1.0}[number]
    off = with_step(step, rank, **{number: math.nextafter(value, 9)})
    (finding,) = check(off)
    assert (finding.step, finding.rank, finding.verdict) == (step, rank, Verdict.NUMERIC)
    assert (finding.expected, finding.found) == (repr(value), repr(math.nextafter(value, 9)))
    assert number.replace("_", " ") in finding.message and "tp2-bf16-v2048-s2-f32 (checkpointing)" in finding.message
    assert check(off, SUMS) == []


@pytest.mark.parametrize("number", ["loss", "grad_norm"])
@pytest.mark.parametrize("relation", [BITWISE, SUMS])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_equals_nothing(number: str, relation: Relation, bad: float) -> None:
    off = with_step(2, 0, **{number: bad})
    assert check(off, relation) and check(run(), relation, off) and check(off, relation, off)


def test_the_first_step_that_differs_is_reported() -> None:
    everywhere = run(trace(0, loss=8.5), trace(1, loss=8.5))
    (finding,) = check(everywhere)
    assert (finding.step, finding.rank) == (1, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_other_bits_of_a_gradient_are_found_on_every_rank(rank: int) -> None:
    (finding,) = check(with_sketch(sketch("b", 2, digest="x"), rank))
    assert (finding.step, finding.rank, finding.module, finding.verdict) == (2, rank, "b", Verdict.NUMERIC)
    assert "other gradients: 1 of 2" in finding.message
    assert finding.expected == "[4, 4] at [0, 0]: d" and finding.found == "[4, 4] at [0, 0]: x"


def test_the_gradient_that_is_furthest_away_is_named() -> None:
    off = with_sketch(sketch("b", 1, value=1.5, digest="x"))
    first, second = off.traces
    changed = tuple(msgspec.structs.replace(s, digest="y") if s.fqn == "a" else s for s in first.sketches or ())
    (finding,) = check(run(msgspec.structs.replace(first, sketches=changed), second))
    assert (finding.module, finding.found) == ("b", "[4, 4] at [0, 0]: x")
    assert "other gradients: 2 of 2" in finding.message and "0.5 of its norm" in finding.message


def test_bits_are_compared_where_numbers_are_equal() -> None:
    """-0.0 and 0.0, or two elements that changed places between positions of equal sign."""
    off = with_sketch(sketch("a", 2, "param", digest="x"))
    (finding,) = check(off)
    assert "final parameters: 1 of 2" in finding.message and "0 of its norm" in finding.message
    assert check(off, SUMS) == []


def test_equal_bits_that_are_not_numbers_are_not_equal() -> None:
    off = with_sketch(sketch("a", 2, "param", value=math.nan))
    assert check(off, BITWISE, off) and check(off, SUMS, off)


def test_an_exact_promise_allows_rounding_and_no_more() -> None:
    assert check(with_sketch(sketch("a", 1, value=1 + EXACT / 2, digest="x")), SUMS) == []
    (finding,) = check(with_sketch(sketch("a", 1, value=1 + 2 * EXACT, digest="x")), SUMS)
    assert (finding.step, finding.module, finding.expected) == (1, "a", "distance <= 1e-11")


def test_only_the_promised_steps_are_compared() -> None:
    first_only = msgspec.structs.replace(BITWISE, steps=1)
    assert check(with_sketch(sketch("a", 2, digest="x")), first_only) == []
    assert check(with_step(2, 0, loss=3.0), first_only) == []
    assert check(with_sketch(sketch("a", 1, digest="x")), first_only)
    assert check(with_step(1, 0, loss=3.0), first_only)


@pytest.mark.parametrize("relation", [BITWISE, SUMS])
def test_a_tensor_on_one_side_alone_is_found(relation: Relation) -> None:
    lacking = Run(
        traces=tuple(
            msgspec.structs.replace(each, sketches=tuple(s for s in each.sketches or () if s.fqn == "a"))
            for each in run().traces
        ),
        failures=(),
    )
    (here,) = check(run(), relation, lacking)
    (there,) = check(lacking, relation)
    assert (here.module, there.module) == ("b", "b")
    assert here.message.endswith("grad of b here only") and there.message.endswith("grad of b there only")


@pytest.mark.parametrize("relation", [BITWISE, SUMS])
def test_a_partner_that_recorded_nothing_proves_nothing(relation: Relation) -> None:
    empty = Run(traces=tuple(msgspec.structs.replace(each, sketches=()) for each in run().traces), failures=())
    assert any("nothing was compared" in finding.message for finding in check(empty, relation, empty))


def test_a_partner_that_could_not_be_run_is_a_finding() -> None:
    (finding,) = check_metamorphic(CASE, run(), witnesses(BITWISE, None))
    assert finding.verdict is Verdict.INVARIANT and "could not be run" in finding.message


def test_the_judge_claims_the_check_only_for_cases_with_a_relation() -> None:
    asked = judge(CASE, run(), "ok", witnesses(BITWISE, run()))
    assert "metamorphic" in asked.checks and not any(f.check == "metamorphic" for f in asked.findings)
    assert "metamorphic" in judge(CASE, run(), "ok", witnesses(BITWISE, None)).checks
    assert "metamorphic" not in judge(CASE, run(), "ok", witnesses(None, None)).checks


def test_the_judge_does_not_ask_runs_without_sketches() -> None:
    bare = Run(traces=tuple(each.slim for each in run().traces), failures=())
    assert "metamorphic" not in judge(CASE, bare, "ok", witnesses(BITWISE, run())).checks
