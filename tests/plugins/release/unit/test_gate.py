"""The gate: every kind of reason, what gates, what two equal results say, and the signed-rank test of its times."""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.divergence import OPERAND
from harness.matrix.records import Quarantine, Required
from harness.plugins.release.gate import Answer, Gate, GatePolicy, gate
from harness.plugins.release.numbers import signed_rank_p
from harness.plugins.release.sides import Allowance, Kind, Reason
from harness.result import CaseResult, CastRange, Curve, Environment, Multiplied, RunResult, Sent
from harness.verdict import FailureSignature, NotJudged, Verdict
from tests.builders import (
    WQ,
    a_finding,
    make_attempt,
    make_cast_range,
    make_golden,
    make_measured,
    make_result,
    make_results,
    with_facts,
)

CASE, OTHER, TWIN = "tp2-rowwise-v2048-s2-b16", "fsdp2-tensorwise-v2048-s2-b16", "tp2-bf16-v2048-s2-b16"
NOW = datetime.datetime(2026, 11, 22, 12, tzinfo=datetime.UTC)
TERMS = GatePolicy(now=NOW)
SIGNATURE = FailureSignature(kind="parity/gradients", where=("wq",), first_step=1)
GOOD = make_measured()
DIVERGES = "first operand that diverges: scale of weight"


def result(case_id: str = CASE, verdict: Verdict = Verdict.PASSED, **changes: Any) -> CaseResult:
    given = {"measured": GOOD, "checks": ("finite", "parity", "loss_vs_golden"), **changes}
    return make_result(case_id, verdict, **given)


def failed(case_id: str = CASE, signature: FailureSignature = SIGNATURE, **changes: Any) -> CaseResult:
    findings = (
        a_finding(check="parity", message="gradients differ by 3 %\nmore", verdict=Verdict.NUMERIC, step=1, module=WQ),
        a_finding(check="divergence", message=DIVERGES, step=1, rank=1, module=WQ),
    )
    return result(case_id, Verdict.NUMERIC, findings=findings, failure_signature=signature, **changes)


def known(*faults: str) -> CaseResult:
    return result(verdict=Verdict.KNOWN, expectation=", ".join(faults))


def held(before: Sequence[CaseResult], after: Sequence[CaseResult], terms: GatePolicy = TERMS, **changes: Any) -> Gate:
    return gate(make_results(*before), make_results(*after, **changes), terms)


def only(decision: Gate) -> Reason:
    (reason,) = decision.reasons
    return reason


def required_of(decision: Gate) -> Reason:
    return next(reason for reason in decision.gating if reason.kind is Kind.REQUIRED)


def test_a_new_failure_says_what_where_and_how_to_see_it() -> None:
    reason = only(decision := held([result()], [failed()]))
    assert (decision.go, reason.kind, reason.case, reason.gates) == (False, Kind.NEW_FAILURE, CASE, True)
    assert reason.what == f"parity/test [step 1, module {WQ}]: gradients differ by 3 %"
    assert (reason.baseline, reason.candidate) == ("passed", "numeric")
    assert reason.details == ("signature: parity/gradients in wq, from step 1 on", DIVERGES)
    assert reason.command == f"fp8-harness run {CASE}"
    finding = OPERAND.finding(what="scale of weight", module=WQ, step=1, rank=0)
    reason = only(held([result()], [result(verdict=Verdict.NUMERIC, findings=(finding,))]))
    assert reason.what == f"divergence/operand: {finding.message}" and reason.what.count(WQ) == 1
    reason = only(held([result(OTHER)], [result(OTHER), failed()]))
    assert (reason.kind, reason.baseline, reason.gates) == (Kind.NEW_FAILURE, "not in the baseline", True)


def test_what_failed_before_gates_when_it_fails_otherwise_or_when_asked() -> None:
    decision = held([failed()], [failed()])
    assert (decision.answer, only(decision).kind) == (Answer.NOT_COMPARED, Kind.STILL_FAILING)
    assert held([failed()], [failed()], replace(TERMS, strict=True)).answer is Answer.NO_GO
    other = only(held([failed()], [failed(signature=replace(SIGNATURE, kind="scales"))]))
    assert (other.kind, other.gates) == (Kind.OTHER_FAILURE, True)
    assert "before: parity/gradients in wq, from step 1 on" in other.details


@pytest.mark.parametrize(
    ("before", "after", "kind", "gates"),
    [
        (result(), known("a"), Kind.KNOWN_FAULT, True),
        (known("a"), known("a", "b"), Kind.KNOWN_FAULT, True),
        (known("a"), result(), Kind.FAULT_GONE, False),
        (known("a"), result(verdict=Verdict.UNEXPECTED_PASS), Kind.UNEXPECTED_PASS, True),
        (failed(), result(), Kind.FIXED, False),
        (failed(), known("a"), Kind.EXPLAINED, False),
    ],
)
def test_recorded_faults_that_come_and_go(before: CaseResult, after: CaseResult, kind: Kind, gates: bool) -> None:
    reason = only(held([before], [after]))
    assert (reason.kind, reason.gates) == (kind, gates)


def not_run(case_id: str = CASE) -> CaseResult:
    return make_result(case_id, Verdict.NOT_RUN, attempts=())


@pytest.mark.parametrize(
    ("after", "changes", "what"),
    [
        ([], {}, "not selected"),
        ([], {"left_out": (CASE,)}, "left out, beyond the budget"),
        ([not_run()], {}, "not run"),
        ([make_result(CASE, Verdict.INFRA)], {}, "could not be run: infra"),
    ],
)
def test_a_case_that_is_lost_gates(after: list[CaseResult], changes: Mapping[str, Any], what: str) -> None:
    reason = only(held([result(), result(OTHER)], [*after, result(OTHER)], **changes))
    assert (reason.kind, reason.case, reason.what, reason.gates) == (Kind.LOST_COVERAGE, CASE, what, True)


def test_an_interrupted_candidate_gates() -> None:
    decision = held([result()], [result()], interrupted=True)
    assert (only(decision).kind, decision.go) == (Kind.INTERRUPTED, False)


def test_a_check_that_judges_no_more_gates_with_its_reason() -> None:
    lost = NotJudged(check="parity", reason="not verified with torchao 0.19", unverified=True)
    reason = only(held([result()], [result(checks=("finite", "loss_vs_golden"), not_judged=(lost,))]))
    assert (reason.kind, reason.what, reason.gates) == (Kind.LOST_CHECK, "no longer checked: parity", True)
    assert reason.details == ("parity: not verified with torchao 0.19",)
    refused = result(checks=("alignment",), expectation="output_alignment", measured=None)
    assert "must be refused now (output_alignment)" in only(held([result()], [refused])).what


def judged_by(*losses: float, **changes: Any) -> CaseResult:
    return result(golden="stored", golden_losses=losses, **changes)


def test_a_golden_may_change_with_a_reason_alone() -> None:
    before, after = make_results(judged_by(8.0, 7.0)), make_results(judged_by(8.0, 7.5))
    stored = make_golden(losses=(8.0, 7.5))
    assert (reason := only(gate(before, after, TERMS, goldens=lambda name: stored))).kind is Kind.GOLDEN
    assert (reason.gates, reason.size) == (False, 0.5)
    assert reason.details[0].startswith(f"reason: {stored.provenance.reason} (")
    for golden in (None, make_golden(losses=(8.0, 7.7))):
        assert only(gate(before, after, TERMS, goldens=lambda name, golden=golden: golden)).gates  # type: ignore[misc]
    assert "both runs are of commit c0ffee" in only(gate(before, after, TERMS)).details[0]


@pytest.mark.parametrize(
    ("allowed", "gates"), [((0.02, 0.01), True), ((0.005, 0.01), False), ((float("nan"), 0.01), True)]
)
def test_a_wider_tolerance_gates(allowed: tuple[float, ...], gates: bool) -> None:
    reason = only(held([result()], [result(measured=replace(GOOD, allowed_loss=allowed))]))
    assert (reason.kind, reason.gates) == (Kind.TOLERANCE, gates)
    derived = result(measured=replace(GOOD, allowed_loss=allowed), derived=("loss_vs_golden",))
    assert held([result(derived=("loss_vs_golden",))], [derived]).go, "derived in each run"


def test_weaker_references_gate_on_the_same_device() -> None:
    after = result(golden="run here", golden_losses=(8.0,), derived=("parity",))
    decision = held([judged_by(8.0)], [after])
    assert not decision.go and [reason.kind for reason in decision.reasons] == [Kind.REFERENCES] * 2
    elsewhere = held([judged_by(8.0)], [after], environment=Environment(device="NVIDIA H200"))
    assert elsewhere.go, "another device has goldens of its own, or none yet"


REQUIRED = Required(name="TP", select="tp>1", reason="users run it", at_least=2)


def test_required_cells_must_have_been_shown() -> None:
    terms = replace(TERMS, required=(REQUIRED,))
    both = [result(), result(TWIN)]
    assert held(both, both, terms).go
    reason = required_of(held(both, [result(), failed(TWIN)], terms))
    assert (reason.what, reason.baseline, reason.candidate) == ("TP: 1 of at least 2 cases good", "2 good", "1 good")
    assert reason.details == ("required: users run it", "cases: tp>1", f"{TWIN}: numeric")
    unjudged = held([result()], [result(checks=())], replace(terms, required=(replace(REQUIRED, at_least=1),)))
    assert f"{CASE}: checked by no check" in required_of(unjudged).details
    none = held([result(OTHER)], [result(OTHER)], terms)
    assert not none.go and "none of them was selected" in only(none).details


@pytest.mark.parametrize(
    ("started", "what"),
    [
        ("2026-11-20T12:00:00+00:00", ""),
        ("2026-11-10T12:00:00+00:00", "TP: run 12.0 days ago, at most 7 allowed"),
        ("", "TP: it is not known when it was run"),
    ],
)
def test_required_cells_must_not_be_old(started: str, what: str) -> None:
    terms = replace(TERMS, required=(replace(REQUIRED, at_least=1, max_age_days=7),))
    decision = held([result()], [result()], terms, started=started)
    assert [reason.what for reason in decision.reasons] == [what] * bool(what)


def wire(calls: int, payload_bytes: int) -> Mapping[str, Sent]:
    return {"all_gather in uint8 along dp_shard": Sent(calls=calls, payload_bytes=payload_bytes)}


def multiplied(calls: int, flops: int) -> Mapping[str, Multiplied]:
    return {"matmuls in float8": Multiplied(calls=calls, flops=flops)}


def test_of_cases_that_only_differ_from_formulas_on_both_sides_numbers_are_compared() -> None:
    finding = a_finding(check="traffic", message="28 all-reduces", formula="traffic", differs="torch nightly differs")
    before = result(verdict=Verdict.CHANGED, findings=(finding,), failure_signature=SIGNATURE)
    same = held([before], [before])
    assert same.go and only(same).kind is Kind.STILL_FAILING
    more = make_measured(wire={"all_reduce (sum) in float32 along tp": Sent(calls=42, payload_bytes=42)})
    decision = held([before], [replace(before, measured=more)])
    assert not decision.go and Kind.WIRE in {reason.kind for reason in decision.reasons if reason.gates}
    assert not held([result()], [before]).go, "new since the baseline"


def test_flops_that_an_older_version_did_not_count_are_no_change() -> None:
    assert held([result(measured=replace(GOOD, flops={}))], [result()]).reasons == ()


@pytest.mark.parametrize(
    ("changes", "kind", "what"),
    [
        ({"scaled_mm_calls": 43}, Kind.MATMULS, "scaled_mm calls: 42 -> 43"),
        ({"flops": multiplied(43, 8400)}, Kind.MATMULS, "calls of matmuls in float8: 42 -> 43"),
        ({"flops": multiplied(42, 8600)}, Kind.MATMULS, "FLOPs of matmuls in float8: 8,400 -> 8,600"),
        ({"flops": {}}, Kind.MATMULS, "FLOPs of matmuls in float8: 8,400 -> none"),
        ({"saved_bytes": None}, Kind.SAVED_BYTES, "bytes saved for backward: 1,000 -> none"),
        ({"fused": {"fused_ag in forward": 4}}, Kind.FUSED, "fused_ag in forward: none -> 4"),
        ({"wire": wire(4, 4097)}, Kind.WIRE, "bytes of all_gather in uint8 along dp_shard: 4,096 -> 4,097"),
        ({"wire": wire(2, 4096)}, Kind.WIRE, "calls of all_gather in uint8 along dp_shard: 4 -> 2"),
    ],
)
def test_counts_are_exact_on_any_cpu(changes: Mapping[str, Any], kind: Kind, what: str) -> None:
    before, after = make_results(result()), make_results(result(measured=replace(GOOD, **changes)))
    other_cpu = with_facts(after, environment=environment_of(after, cpu="another CPU"))
    for candidate in (after, other_cpu):
        reason = only(gate(before, candidate, TERMS))
        assert (reason.kind, reason.what, reason.gates) == (kind, what, True)
    allowed = replace(TERMS, allowed=(Allowance(kind=kind, reason="reviewed"),))
    decision = gate(before, after, allowed)
    assert decision.go and only(decision).waiver == "allowed: reviewed"
    gpu = with_facts(after, environment=Environment(device="NVIDIA H200"))
    assert gate(before, gpu, TERMS).go, "other devices count other things"


def environment_of(run: RunResult, **changes: Any) -> Environment:
    return replace(run.start.environment or Environment(), **changes)


def moved(case_id: str, by: float = 0.001, **changes: Any) -> CaseResult:
    curve = Curve(losses=(8.0, 7.5 + by), grad_norms=(1.0, 0.91))
    return result(case_id, measured=replace(GOOD, curves={"case": curve}, **changes))


def test_numbers_that_moved_are_named_and_gate_beyond_the_tolerance() -> None:
    casts = (make_cast_range(1), make_cast_range(2, scale_min=200.0))
    digests = {"casts": "c2", "gradients": "g1"}
    decision = held([result()], [moved(CASE, casts=casts, digests=digests)])
    reason = only(decision)
    assert decision.go and reason.kind is Kind.MOVED
    assert reason.what == "loss by up to 0.001 nats, 0.1 of the tolerance, from step 2 on"
    assert reason.details[:3] == (
        "gradient norm, step 2: 0.9 -> 0.91",
        f"1 of 2 casts; first scale_min of {WQ} input, step 2: 224 -> 200",
        "other bits in casts",
    )
    assert [note.command for note in decision.notes] == [f"fp8-harness run {TWIN}"]
    assert not held([result()], [moved(CASE, 0.02)]).go
    assert not held([result()], [moved(CASE, float("nan"))]).go
    cases = (result(), moved(CASE, 5.0), moved(CASE, float("nan")))
    unlimited = [replace(case, measured=replace(case.measured or GOOD, allowed_loss=())) for case in cases]
    assert [held(unlimited[:1], [case]).go for case in unlimited] == [True, True, False]


def test_another_kind_of_cpu_is_compared_by_tolerance_alone() -> None:
    before, after = make_results(result()), make_results(moved(CASE))
    other = Environment(device="cpu", cpu="another CPU", threads=2, platform="Linux x86_64")
    decision = gate(before, with_facts(after, environment=other), TERMS)
    assert decision.reasons == () and decision.inexact == ("cpu a CPU -> another CPU",)
    for name in ("device", "cpu", "threads", "limits", "platform"):
        value = 7 if name == "threads" else "other"
        changed = environment_of(after, **{name: value})
        assert len(gate(before, with_facts(after, environment=changed), TERMS).inexact) == 1, name
    far = gate(before, make_results(moved(CASE, 0.02), environment=other), TERMS)
    assert (far.go, only(far).what) == (False, "loss by up to 0.02 nats, 2 of the tolerance, from step 2 on")
    assert gate(with_facts(before, environment=None), after, TERMS).inexact == ("a run does not say where it was made",)


def test_bf16_tells_the_environment_from_fp8() -> None:
    before = [result(), result(TWIN)]
    fp8 = only(held(before, [moved(CASE), result(TWIN)]))
    assert (fp8.kind, fp8.details[-1]) == (Kind.FP8_MOVED, f"its BF16 counterpart {TWIN} did not move: FP8 changed")
    both = held(before, [moved(CASE), moved(TWIN)])
    assert {reason.kind for reason in both.reasons} == {Kind.BF16_MOVED}
    golden = {"golden": "run here", "golden_losses": (8.0,)}
    alone = only(held([result(**golden)], [replace(moved(CASE), **golden)]))
    assert alone.kind is Kind.FP8_MOVED


def times_of(*cpu_s: float) -> list[CaseResult]:
    attempts = ((seed, (make_attempt(cpu_s=seconds),)) for seed, seconds in enumerate(cpu_s, 1))
    return [result(f"tp2-rowwise-v2048-s2-seed{seed}-b16", attempts=made) for seed, made in attempts]


def test_times_need_an_effect_and_significance() -> None:
    usual = times_of(*[2.0] * 10)
    slower = held(usual, times_of(*[2.5 + at / 100 for at in range(10)]))
    assert slower.go and only(slower).kind is Kind.TIMES and slower.times is not None
    assert not held(usual, times_of(*[2.5] * 10), replace(TERMS, gate_times=True)).go
    assert held(usual, times_of(*[1.5] * 10), replace(TERMS, gate_times=True)).go, "faster is no reason"
    assert held(usual, times_of(*[2.02] * 10)).reasons == (), "significant, but too small"
    assert held(usual, times_of(*[3.0] * 5, *[1.4] * 5)).reasons == (), "large, but by chance"
    assert held(usual[:3], times_of(*[2.5] * 3)).reasons == (), "of three cases nothing can be said"


QUARANTINE = Quarantine(id=CASE, owner="ana", reason="flaky", expires=datetime.date(2026, 11, 22))


def test_quarantine_excuses_up_to_its_day() -> None:
    terms = replace(TERMS, quarantine=(QUARANTINE,))
    decision = held([result(), result(OTHER)], [failed(), result(OTHER)], terms)
    assert decision.go and only(decision).waiver == "quarantined until 2026-11-22 by ana: flaky"
    over = held([result()], [failed()], replace(terms, now=NOW + datetime.timedelta(days=1)))
    assert not over.go and only(over).details[0] == "the quarantine by ana expired on 2026-11-22: flaky"
    assert not held([result(OTHER)], [failed(OTHER)], terms).go
    required = replace(terms, required=(replace(REQUIRED, at_least=1, id=CASE, select=""),))
    assert [reason.kind for reason in held([result()], [failed()], required).gating] == [Kind.REQUIRED]


def test_the_heaviest_reason_is_first() -> None:
    before = [result(), result(OTHER), result(TWIN)]
    after = [moved(OTHER), result(CASE, measured=replace(GOOD, saved_bytes=1)), failed(TWIN)]
    kinds = [reason.kind for reason in held(before, after).reasons]
    assert kinds == [Kind.NEW_FAILURE, Kind.SAVED_BYTES, Kind.MOVED]
    waived = held(before, after, replace(TERMS, quarantine=(replace(QUARANTINE, id=TWIN),)))
    assert [reason.kind for reason in waived.reasons] == [Kind.SAVED_BYTES, Kind.NEW_FAILURE, Kind.MOVED]


def test_what_was_not_compared_is_told() -> None:
    allowed = replace(TERMS, allowed=(Allowance(kind=Kind.WIRE, reason="x"),))
    decision = held([result()], [result(), result(OTHER)], allowed)
    same = held([result()], [result()])
    assert [note.text for note in same.notes] == ["both sides are the same results"]
    expected = ["new in the candidate: 1 case, not compared with anything", "allowed for nothing: wire"]
    assert [note.text for note in decision.notes] == expected
    before = [result(), failed(OTHER), result(TWIN), result(IDS[3])]
    after = [result(), result(OTHER), failed(TWIN), result(IDS[4])]
    decision = held(before, after)
    assert (decision.compared, decision.cases) == (1, 5)
    kinds = ("not good in", "only in")
    assert decision.left_out == tuple(f"1 {kind} the {side}" for kind in kinds for side in ("baseline", "candidate"))
    damaged = replace(make_results(result()), damaged={"x.jsonl:3: not a line of results: why": CASE})
    notes = gate(damaged, make_results(result()), TERMS).notes
    assert "x.jsonl:3: not a line of results: why: run its cases again" in [note.text for note in notes]


def infra(case_id: str = CASE) -> CaseResult:
    return result(case_id, Verdict.INFRA)


UNJUDGED = result(checks=())


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ([], [], "no case was run in both results"),
        ([result()], [result(OTHER)], "no case was run in both results"),
        ([result()], [not_run()], "no case was run in both results"),
        ([infra()], [infra()], "the machine or the harness failed in each of 1 case"),
        ([result(), result(OTHER)], [infra(), infra(OTHER)], "the machine or the harness failed in each of 2 cases"),
        ([infra()], [failed()], "the machine or the harness failed in each of 1 case"),
        ([failed()], [failed()], "no case is good in both results (baseline 0 good, candidate 0 good)"),
        ([failed()], [result()], "no case is good in both results (baseline 0 good, candidate 1 good)"),
        ([failed(), result(OTHER)], [failed(), infra(OTHER)], None),
        ([result()], [failed()], None),
        ([UNJUDGED], [UNJUDGED], "no case that is good in both results was checked in both"),
        ([UNJUDGED], [result()], "no case that is good in both results was checked in both"),
        ([result()], [UNJUDGED], None),
    ],
)
def test_where_nothing_is_compared_the_answer_is_not_go(
    before: list[CaseResult], after: list[CaseResult], why: str | None
) -> None:
    decision = held(before, after)
    assert decision.answer is (Answer.NO_GO if why is None else Answer.NOT_COMPARED)
    assert decision.not_compared.startswith(why or "") and bool(decision.fix) == bool(why)


def _step(cast: CastRange) -> int:
    return cast.step


floats = st.floats() | st.sampled_from([8.0, 7.5])
curves = st.builds(Curve, losses=st.tuples(floats, floats), grad_norms=st.tuples(floats, floats))
measurements = st.builds(
    make_measured,
    curves=st.dictionaries(st.sampled_from(["case", "golden", "solo"]), curves, max_size=3),
    allowed_loss=st.just(()) | st.tuples(floats, floats),
    saved_bytes=st.none() | st.integers(0, 9),
    digests=st.dictionaries(st.sampled_from(["casts", "gradients"]), st.text(max_size=2)),
    casts=st.lists(st.builds(make_cast_range, st.integers(1, 3), amax=floats), max_size=2, unique_by=_step).map(tuple),
)
IDS = (CASE, OTHER, TWIN, "single-bf16-v2048-b16", "hsdp2x2-tensorwise-v2048-f32")
case_lists = st.lists(
    st.builds(
        result,
        st.sampled_from(IDS),
        st.sampled_from([Verdict.PASSED, Verdict.KNOWN]),
        measured=st.none() | measurements,
        golden=st.sampled_from(["stored", "run here", ""]),
        golden_losses=st.just(()) | st.tuples(floats),
        expectation=st.none() | st.sampled_from(["a", "a, b"]),
    ),
    min_size=1,
    unique_by=lambda case: case.case_id,
)


@given(case_lists, st.none() | st.just("cpu") | st.just("NVIDIA H200"))
def test_what_is_equal_is_go_without_a_reason(cases: list[CaseResult], device: str | None) -> None:
    environment = None if device is None else Environment(device=device)
    document = make_results(*cases, environment=environment)
    decision = gate(document, document, TERMS)
    assert decision.go and decision.reasons == ()


ANY = st.builds(
    result,
    st.sampled_from(IDS),
    st.sampled_from(Verdict),
    measured=st.none() | measurements,
    checks=st.sampled_from([(), ("finite",), ("finite", "parity")]),
)
ANY_LISTS = st.lists(ANY, min_size=1, unique_by=lambda case: case.case_id)


@given(ANY_LISTS, ANY_LISTS, st.randoms(use_true_random=False))
def test_of_any_two_results(before: list[CaseResult], after: list[CaseResult], random: Any) -> None:
    """Go needs a case that is good and judged in both; neither the order nor the names of cases change the answer.

    Seeds are other names that keep which cases are FP8 and which are twins.
    """
    decision = held(before, after)
    judged = [{case.case_id for case in cases if case.good and case.checks} for cases in (before, after)]
    assert not decision.go or judged[0] & judged[1]
    assert decision.go or decision.gating or decision.not_compared
    mixed = (random.sample(cases, len(cases)) for cases in (before, after))
    assert repr(held(*mixed)) == repr(decision), "as text, because a size may be nan"
    named = ([replace(case, case_id=_other_seed(case.case_id)) for case in cases] for cases in (before, after))
    assert _kinds(held(*named)) == _kinds(decision)


def _other_seed(case_id: str) -> str:
    *head, dtype = case_id.split("-")
    return "-".join([*head, "seed9", dtype])


def _kinds(decision: Gate) -> Counter[tuple[Kind, bool]]:
    return Counter((reason.kind, reason.gates) for reason in decision.reasons)


small = st.lists(st.integers(-4, 4).map(float), max_size=7)


def counted(differences: list[float]) -> float:
    """The same p by trying all signs."""
    sizes = sorted(abs(value) for value in differences if value)
    ranks = [sum(other < size for other in sizes) + (sizes.count(size) + 1) / 2 for size in sizes]
    above = sum(ranks[sizes.index(abs(value))] for value in differences if value > 0)
    extreme = max(above, sum(ranks) - above)
    sums = [sum(taken) for taken in itertools.product(*((0.0, rank) for rank in ranks))]
    return min(1.0, 2 * sum(total >= extreme for total in sums) / len(sums))


@given(small)
def test_few_cases_are_counted(differences: list[float]) -> None:
    assert signed_rank_p(differences) == pytest.approx(counted(differences))


@given(st.lists(st.floats(-1, 1, allow_subnormal=False), max_size=60))
def test_slower_and_faster_are_the_same_question(differences: list[float]) -> None:
    p = signed_rank_p(differences)
    assert 0 <= p <= 1
    assert p == pytest.approx(signed_rank_p([-value for value in differences]))


def test_p_of_ten_and_of_many_cases() -> None:
    assert signed_rank_p([0.1 * at for at in range(1, 11)]) == pytest.approx(2 / 1024)
    assert signed_rank_p([]) == signed_rank_p([0.0]) == 1.0
    mixed = [(-1) ** (at % 3 == 0) * (1 + at / 100) for at in range(40)]
    assert signed_rank_p(mixed) == pytest.approx(signed_rank_p([*mixed, 1e-9]), abs=0.02)
