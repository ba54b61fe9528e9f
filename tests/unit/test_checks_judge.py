"""The judge: every way a run can end gets the right verdict, and nothing slips through as passed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks import fp8_on, memory
from harness.checks.catalogue import CHECKS, NO_CHECK
from harness.checks.check import Witnesses, noun
from harness.checks.failures import LOST, RAISED
from harness.checks.judge import Judgement, judge, run_from_outcome
from harness.checks.loss_vs_golden import NO_GOLDEN
from harness.engine.messages import JobOutcome, JobStatus, RankOutcome, RankStatus
from harness.expect import relations
from harness.expect.expectations import FORMULAS, Expectations, not_recorded
from harness.expect.memory import NOT_OF_THIS_DEVICE
from harness.matrix.caseid import parse_case_id
from harness.matrix.rules import Refusal
from harness.trace import RankTrace, Run
from harness.trace.counts import LiveMemory, SavedMemory
from harness.trace.graphs import GraphTrace
from harness.trace.operands import OperandTrace
from harness.verdict import Verdict
from tests.builders import (
    SOFTWARE,
    make_case,
    make_failure,
    make_golden,
    make_refusal,
    make_run,
    make_tolerance,
    make_trace,
    make_witnesses,
    not_judged,
    rules,
    run_of,
)

CASE = make_case(tp=2, recipe="rowwise", steps=2)
ALL = tuple(check.name for check in CHECKS)
UNPROBED = tuple(
    check.name for check in CHECKS if not (check.records or check.unasked) and check.name not in not_judged(CASE)
)
ALIGNED = "RuntimeError: Expected both dimensions of mat2 to be divisible by 16 but got [128, 1128]"


def witnesses(*, refused: Refusal | None = None, golden: bool = True) -> Witnesses:
    return make_witnesses(
        CASE,
        golden=make_golden(CASE) if golden else None,
        tolerance=make_tolerance(0.125, 0.125),
        refusal=refused,
    )


def trace(rank: int, **changes: object) -> RankTrace:
    return make_trace(CASE, rank, **changes)


GOOD = make_run(CASE)
OFF = make_run(CASE, losses=(8.0, 9.0))
OFF_AND_PLAIN = make_run(CASE, losses=(8.0, 9.0), converted_fqns=())
REFUSED = run_of(make_failure(0, ALIGNED), make_failure(1, ALIGNED))


def left_out(judgement: Judgement) -> dict[str, str]:
    return {skipped.check: skipped.reason for skipped in judgement.not_judged}


def test_a_good_run_passes_after_every_check_that_a_rank_recorded_for() -> None:
    judgement = judge(CASE, GOOD, "ok", witnesses())
    assert (judgement.verdict, judgement.findings, judgement.checks) == (Verdict.PASSED, (), UNPROBED)
    judgement = judge(CASE, make_run(CASE, sketches=()), "ok", witnesses())
    assert "parity" in judgement.checks
    assert judgement.verdict is Verdict.INVARIANT  # recorded, but nothing to compare
    assert "traffic" in judge(CASE, run_of(trace(0, traffic=()), trace(1)), "ok", witnesses()).checks


def test_what_was_not_judged_is_named_with_its_reason() -> None:
    judgement = judge(CASE, GOOD, "ok", witnesses())
    assert [skipped.check for skipped in judgement.not_judged] == [name for name in ALL if name not in UNPROBED]
    reasons = left_out(judgement)
    assert reasons["memory"] == "the ranks were not asked to record saved memory"
    assert reasons["metamorphic"] == "the ranks were not asked to record sketches"
    sketched = left_out(judge(CASE, make_run(CASE, sketches=()), "ok", witnesses()))
    assert "parity" not in sketched
    assert "no option of this case must be neutral" in sketched["metamorphic"]


RECORDS = tuple(sorted({record for check in CHECKS for record in check.records}))


@pytest.mark.parametrize(
    "text",
    [
        "single-bf16-v2048-f32",
        "tp2-tensorwise-v2048-b16",
        "fsdp2-rowwise-v2048-b16",
        "tp2-tensorwise-graph-v2048-b16",
        "atp2-tensorwise-inductor-v2048-b16",
    ],
)
def test_a_record_that_was_asked_for_and_is_nowhere_is_a_finding_of_every_check_that_reads_it(text: str) -> None:
    case = parse_case_id(text)
    asked = make_witnesses(case, golden=make_golden(case), tolerance=make_tolerance(9.0), records=RECORDS)
    judgement = judge(case, make_run(case), "ok", asked)
    silent = {finding.check for finding in judgement.findings if finding.rule == f"{finding.check}/no-record"}
    reads = {check.name: check.records_of(Expectations(case)) for check in CHECKS if not check.unasked}
    expected = {name for name, records in reads.items() if records and not set(records) & set(not_recorded(case))}
    without_partner = set() if relations.partner(case) is not None else {"metamorphic"}
    assert silent == expected - without_partner - set(not_judged(case))
    assert judgement.verdict is Verdict.INVARIANT
    for name, reason in left_out(judgement).items():
        assert reason.strip() and "asked" not in reason, name


@pytest.mark.parametrize("text", ["tp2-tensorwise-v2048-b16", "tp2-tensorwise-graph-v2048-b16"])
def test_every_check_names_the_ranks_that_lack_a_record_which_it_reads(text: str) -> None:
    case = parse_case_id(text)
    asked = make_witnesses(case)
    one_lacks = run_of(make_trace(case, 0, **dict.fromkeys(RECORDS, ())), make_trace(case, 1))
    for check in CHECKS:
        for run, ranks in ((one_lacks, (1,)), (run_of(), ())):
            read = [noun(record) for record in check.records_of(asked.expect)]
            findings = check(case, run, asked) if read else []
            assert rules(findings) == ({check.no_record.name} if read else set())
            assert [(finding.values["record"], finding.ranks, finding.judged) for finding in findings] == [
                (record, ranks, False) for record in read
            ]


# Each of these records is wrong by the formula of its check; nothing changes from step to step, as leaks do.
EMPTY = (LiveMemory(moment="forward", scalars=0, tensors=()), LiveMemory(moment="step", scalars=0, tensors=()))
UNSAVED = tuple(SavedMemory(step=step, saved_bytes=0, by_dtype={}, live=EMPTY) for step in (1, 2))
RECORDED = {"calls": 1, "operands": OperandTrace(casts=(), matmuls=()), "traffic": (), "saved_memory": UNSAVED}
BY_FORMULA = {
    "matmuls": "matmuls",
    "scales": "casts",
    "traffic": "traffic",
    "memory": "saved memory",
    "live_memory": "live memory",
}


@pytest.mark.parametrize(
    ("text", "record", "lost"),
    [
        ("fsdp2-tensorwise-v2048-b16", "operands", {"lifetime", "scales", "underflow", "recompute"}),
        ("fsdp2-tensorwise-v2048-b16", "saved_memory", {"memory", "live_memory", "leaks"}),
        ("fsdp2-tensorwise-v2048-b16", "graphs", set()),  # it compiles nothing
        ("tp2-tensorwise-tpstyle.fp8-graph-v2048-f64", "graphs", {"graph_scales", "recompute", "graphs"}),
    ],
)
def test_what_the_versions_do_not_let_ranks_record_is_not_judged_and_says_why(
    text: str, record: str, lost: set[str]
) -> None:
    case, gone = parse_case_id(text), "torch 2.15.0: a.b._c is gone: this and that is not checked"
    run = make_run(case, not_recorded={record: gone})
    judgement = judge(case, run, "ok", Witnesses(expect=Expectations(case), records=(record,)))
    assert {skipped.check for skipped in judgement.not_judged if skipped.reason == gone and skipped.unverified} == lost
    assert not rules(judgement.findings) & {f"{name}/no-record" for name in ALL}


@pytest.mark.parametrize("software", [SOFTWARE, {"torch": "2.99.0"}, {"python": "3.12"}, {}])
def test_a_formula_judges_with_every_version_and_its_findings_name_it(software: dict[str, str]) -> None:
    judgement = judge(CASE, make_run(CASE, **RECORDED, software=software), "ok", witnesses())
    assert judgement.verdict is Verdict.INVARIANT
    judged = [finding for finding in judgement.findings if finding.judged]
    assert {finding.check for finding in judged} == set(BY_FORMULA)
    assert not left_out(judgement).keys() & {*BY_FORMULA, "recompute"}
    assert {finding.check: finding.formula for finding in judged} == BY_FORMULA


def test_what_needs_no_formula_is_judged_whatever_is_installed() -> None:
    unknown = {"torch": "2.99.0"}
    for wrong, verdict in (({"losses": (8.0, 9.0)}, Verdict.NUMERIC), ({"calls": 0}, Verdict.INVARIANT)):
        assert judge(CASE, make_run(CASE, software=unknown, **wrong), "ok", witnesses()).verdict is verdict


@pytest.mark.parametrize("text", ["tp2-tensorwise-v2048-b16", "tp2-tensorwise-graph-v2048-b16"])
def test_a_gpu_loses_no_check_but_those_that_are_named_with_a_reason(text: str) -> None:
    case = parse_case_id(text)
    recorded = make_run(
        case,
        **RECORDED,
        sketches=(),
        graphs=GraphTrace(graphs=(), calls=(), casts=(), workarounds=()),
        module_tensors=(),
    )
    on_gpu = run_of(*(replace(rank_trace, device="NVIDIA H200", virtual=()) for rank_trace in recorded.traces))
    here, there = (judge(case, run, "ok", make_witnesses(case, golden=make_golden(case))) for run in (recorded, on_gpu))
    lost = set(here.checks) - set(there.checks)
    assert lost == ({"live_memory"} if case.compile != "none" else {"memory", "live_memory"})
    assert all(NOT_OF_THIS_DEVICE in left_out(there)[name] for name in {*lost, "memory"})
    assert not {memory.LIMITS.name, memory.OTHER_MODE.name, memory.OUTLIVES.name, memory.BYTES.name} & rules(
        there.findings
    )


def test_checks_have_names_of_their_own_and_evaluate_every_formula() -> None:
    assert len(set(ALL)) == len(ALL)
    assert {check.formula for check in CHECKS} - {None} == set(FORMULAS)


def test_a_wrong_number_is_numeric_and_a_broken_rule_outranks_it() -> None:
    assert judge(CASE, OFF, "ok", witnesses()).verdict is Verdict.NUMERIC
    assert judge(CASE, make_run(CASE, converted_fqns=()), "ok", witnesses()).verdict is Verdict.INVARIANT
    judgement = judge(CASE, OFF_AND_PLAIN, "ok", witnesses())
    assert judgement.verdict is Verdict.INVARIANT
    assert {finding.verdict for finding in judgement.findings} == {Verdict.INVARIANT, Verdict.NUMERIC}


def test_a_missing_golden_is_a_failure() -> None:
    judgement = judge(CASE, GOOD, "ok", witnesses(golden=False))
    assert judgement.verdict is Verdict.INVARIANT and rules(judgement.findings) == {NO_GOLDEN.name}
    assert "fp8-harness baseline update" in str(judgement.findings[0].values["command"])


@given(st.sampled_from(["ok", "crash", "hang", "infra"]), st.booleans())
def test_an_empty_run_never_passes(status: JobStatus, refused: bool) -> None:
    judgement = judge(CASE, run_of(), status, witnesses(refused=make_refusal() if refused else None))
    assert judgement.verdict not in (Verdict.PASSED, Verdict.KNOWN) and judgement.findings


@pytest.mark.parametrize("status", ["infra", "hang"])
@pytest.mark.parametrize("run", [GOOD, REFUSED, run_of(make_failure(0))])
@pytest.mark.parametrize("refused", [None, make_refusal()])
def test_infra_and_hang_stand_whatever_came_back(status: JobStatus, run: Run, refused: Refusal | None) -> None:
    judgement = judge(CASE, run, status, witnesses(refused=refused))
    assert judgement.verdict is Verdict(status) and judgement.checks == () and judgement.findings


def test_a_crash_names_who_began_and_ranks_that_failed_alike() -> None:
    for other, ranks in ((make_failure(1, "peer gone", consequence=True), (0,)), (make_failure(1), (0, 1))):
        judgement = judge(CASE, run_of(other, make_failure(0)), "crash", witnesses())
        assert judgement.verdict is Verdict.CRASH
        (finding,) = judgement.findings
        assert (finding.rule, finding.ranks, finding.values["error"]) == (RAISED.name, ranks, "ValueError: x")
        assert finding.values["end"] == "raised in step 1: ValueError: x"


def test_a_crash_that_the_engine_or_a_rank_alone_tells_is_one() -> None:
    ends: tuple[tuple[Run, JobStatus], ...] = ((GOOD, "crash"), (run_of(trace(0), make_failure(1)), "ok"))
    for run, status in ends:
        judgement = judge(CASE, run, status, witnesses())
        assert (judgement.verdict, judgement.checks) == (Verdict.CRASH, ("alignment",))


def test_what_is_not_the_expected_refusal_is_explained() -> None:
    judgement = judge(CASE, REFUSED, "crash", witnesses())
    assert judgement.verdict is Verdict.CRASH and fp8_on.REFUSED_ALIGNED.name in rules(judgement.findings)
    judgement = judge(CASE, GOOD, "ok", witnesses(refused=make_refusal()))
    assert judgement.verdict is Verdict.INVARIANT and rules(judgement.findings) == {fp8_on.TRAINED.name}
    judgement = judge(
        CASE, run_of(make_failure(0), make_failure(1, ALIGNED)), "crash", witnesses(refused=make_refusal())
    )
    assert judgement.verdict is Verdict.CRASH
    assert {fp8_on.OTHER_ERROR.name, RAISED.name} <= rules(judgement.findings)
    assert "ValueError: x" in {finding.values.get("error") for finding in judgement.findings}


def test_the_expected_refusal_passes_and_needs_no_golden() -> None:
    judgement = judge(CASE, REFUSED, "crash", witnesses(refused=make_refusal()))
    assert judgement == Judgement(verdict=Verdict.PASSED, findings=(), checks=("alignment",))
    assert judge(CASE, REFUSED, "crash", witnesses(refused=make_refusal(), golden=False)).verdict is Verdict.PASSED


def test_no_executed_check_is_a_failure() -> None:
    judgement = judge(CASE, GOOD, "ok", witnesses(refused=make_refusal(check="nobody")))
    assert (judgement.verdict, judgement.checks) == (Verdict.INVARIANT, ())
    assert rules(judgement.findings) == {NO_CHECK.name}
    assert judge(CASE, REFUSED, "crash", witnesses(refused=make_refusal(check="nobody"))).verdict is Verdict.CRASH


@given(st.permutations(range(2)), st.sampled_from([GOOD, OFF, REFUSED, run_of(make_failure(0), make_failure(1, "y"))]))
def test_the_order_of_ranks_does_not_matter(order: list[int], run: Run) -> None:
    ends = run.traces or run.failures
    shuffled = run_of(*(ends[index] for index in order))
    status: JobStatus = "crash" if run.failures else "ok"
    assert judge(CASE, shuffled, status, witnesses()) == judge(CASE, run, status, witnesses())


def outcome(*ranks: RankOutcome) -> JobOutcome:
    return JobOutcome(job_id="j", status="ok", ranks=ranks)


def returned(rank: int, payload: bytes | None) -> RankOutcome:
    return RankOutcome(rank=rank, status="returned", payload=payload, traceback="tb", log_tail="said\n")


def test_traces_come_back_as_they_were_recorded_and_nan_as_nan() -> None:
    sent = [trace(1), trace(0)]
    run = run_from_outcome(
        outcome(*(returned(sent_trace.rank, msgspec.msgpack.encode(sent_trace)) for sent_trace in sent))
    )
    assert run == GOOD
    run = run_from_outcome(outcome(returned(0, msgspec.msgpack.encode(trace(0, losses=(float("nan"), 1.0))))))
    assert repr(run.traces[0].steps[0].loss) == "nan"


@pytest.mark.parametrize("status", ["raised", "exited", "signaled", "stuck", "stopped"])
def test_other_ends_are_failures_with_their_last_output(status: RankStatus) -> None:
    rank = RankOutcome(
        rank=3, status=status, message="m", traceback="tb\n", phase="build", consequence=True, log_tail="last words\n"
    )
    (end,) = run_from_outcome(outcome(rank)).failures
    assert (end.rank, end.kind, end.message, end.phase, end.consequence) == (3, status, "m", "build", True)
    assert end.traceback == "tb\nlast output:\nlast words\n"


@pytest.mark.parametrize(
    "payload", [None, b"", b"\xc1", b"\x80", msgspec.msgpack.encode(trace(0))[:-3], msgspec.msgpack.encode(trace(1))]
)
def test_a_result_that_cannot_be_read_is_a_crash(payload: bytes | None) -> None:
    run = run_from_outcome(outcome(returned(0, payload), returned(1, msgspec.msgpack.encode(trace(1)))))
    assert [(failure.rank, failure.kind) for failure in run.failures] == [(0, "garbled")]
    judgement = judge(CASE, run, "ok", witnesses())
    (finding,) = judgement.findings
    assert judgement.verdict is Verdict.CRASH and (finding.rule, finding.ranks) == (LOST.name, (0,))
    assert str(finding.values["end"]).startswith("garbled: its result")


@given(st.binary(max_size=60))
def test_any_bytes_from_a_rank_are_judged(payload: bytes) -> None:
    run = run_from_outcome(outcome(returned(0, payload)))
    assert judge(CASE, run, "ok", witnesses()).verdict is Verdict.CRASH
