"""The judge: every way a run can end gets the right verdict, and nothing slips through as passed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.judge import CHECKS, Judgement, judge, run_from_outcome
from harness.checks.witnesses import Witnesses
from harness.engine.wire import JobOutcome, JobStatus, RankOutcome, RankStatus
from harness.measured.golden import Golden, Provenance
from harness.measured.tolerance import Tolerance
from harness.spec.case import Case, Float8, Layout, Train
from harness.spec.caseid import family_id
from harness.spec.known import KnownFault
from harness.spec.rules import Refusal
from harness.trace import RankFailure, RankTrace, Run, StepTrace
from harness.verdict import Verdict

CASE = Case(layout=Layout(tp=2), float8=Float8(recipe="rowwise"), train=Train(steps=2))
FQNS = ("layers.0.wq",)
LOSSES = (8.0, 7.5)
ALL = tuple(check.name for check in CHECKS)
UNPROBED = tuple(check.name for check in CHECKS if check.needs is None)
ALIGNED = "RuntimeError: Expected both dimensions of mat2 to be divisible by 16 but got [128, 1128]"


def refusal(check: str = "alignment") -> Refusal:
    return Refusal(
        name="output_alignment",
        reason="r",
        source="s",
        axes=(),
        applies=lambda case: True,
        check=check,
        pattern="divisible by 16",
    )


def known(verdict: Verdict = Verdict.NUMERIC, pattern: str = "from the golden at step") -> KnownFault:
    return KnownFault(
        name="f1",
        where="tp=2",
        verdict=verdict,
        pattern=pattern,
        link="https://example.org/1",
        torch=">=2.11",
        reason="r",
    )


def witnesses(*, refused: Refusal | None = None, golden: bool = True) -> Witnesses:
    provenance = Provenance(software={}, device="cpu", commit="", command="", reason="x", created="")
    stored = Golden(
        schema=1,
        family=family_id(CASE),
        hardware="cpu",
        case_id="g",
        losses=LOSSES,
        grad_norms=(1.0, 1.0),
        data_digest="d",
        provenance=provenance,
    )
    return Witnesses(
        golden=stored if golden else None,
        tolerance=Tolerance(name="loss_vs_golden", key="k", per_step=(0.125, 0.125), margin=2.0, evidence="e"),
        refusal=refused,
        expected_fqns=FQNS,
        expected_scaled_mm=3,
    )


def trace(rank: int, *, losses: tuple[float, ...] = LOSSES, fqns: tuple[str, ...] = FQNS) -> RankTrace:
    steps = tuple(
        StepTrace(step=number, loss=loss, grad_norm=1.0, scaled_mm_calls=3, seconds=0.1)
        for number, loss in enumerate(losses, 1)
    )
    return RankTrace(
        rank=rank,
        steps=steps,
        converted_fqns=fqns,
        unmatched_filters=(),
        peak_memory_bytes=0,
        data_digest="d",
        software={},
        device="cpu",
        virtual=("collectives", "scaled_mm"),
    )


def failure(rank: int, message: str = "ValueError: x", *, consequence: bool = False) -> RankFailure:
    return RankFailure(rank=rank, kind="raised", message=message, traceback="", phase="step 1", consequence=consequence)


def trained(*, losses: tuple[float, ...] = LOSSES, fqns: tuple[str, ...] = FQNS) -> Run:
    return Run(traces=tuple(trace(rank, losses=losses, fqns=fqns) for rank in range(2)), failures=())


def failed(*failures: RankFailure) -> Run:
    return Run(traces=(), failures=failures)


GOOD = trained()
OFF = trained(losses=(8.0, 9.0))
REFUSED = failed(failure(0, ALIGNED), failure(1, ALIGNED))


def messages(found: Judgement) -> str:
    return "\n".join(finding.message for finding in found.findings)


def test_a_good_run_passes_after_every_check() -> None:
    assert judge(CASE, GOOD, "ok", witnesses()) == Judgement(verdict=Verdict.PASSED, findings=(), checks=UNPROBED)


def test_a_check_is_not_executed_on_runs_that_recorded_nothing_for_it() -> None:
    probed = msgspec.structs.replace(GOOD, traces=tuple(msgspec.structs.replace(t, sketches=()) for t in GOOD.traces))
    assert "parity" not in judge(CASE, GOOD, "ok", witnesses()).checks
    found = judge(CASE, probed, "ok", witnesses())
    assert "parity" in found.checks
    assert found.verdict is Verdict.INVARIANT  # recorded, but nothing to compare


def test_names_of_checks_are_unique() -> None:
    assert len(set(ALL)) == len(ALL)


def test_a_wrong_number_is_numeric_and_a_broken_rule_outranks_it() -> None:
    assert judge(CASE, OFF, "ok", witnesses()).verdict is Verdict.NUMERIC
    assert judge(CASE, trained(fqns=()), "ok", witnesses()).verdict is Verdict.INVARIANT
    found = judge(CASE, trained(losses=(8.0, 9.0), fqns=()), "ok", witnesses())
    assert found.verdict is Verdict.INVARIANT
    assert {finding.verdict for finding in found.findings} == {Verdict.INVARIANT, Verdict.NUMERIC}


def test_a_missing_golden_is_a_failure() -> None:
    found = judge(CASE, GOOD, "ok", witnesses(golden=False))
    assert found.verdict is Verdict.INVARIANT and "fp8-harness golden update" in messages(found)


@given(st.sampled_from(["ok", "crash", "hang", "infra"]), st.booleans())
def test_an_empty_run_never_passes(status: JobStatus, refused: bool) -> None:
    found = judge(CASE, Run(traces=(), failures=()), status, witnesses(refused=refusal() if refused else None))
    assert found.verdict not in (Verdict.PASSED, Verdict.KNOWN) and found.findings


@pytest.mark.parametrize("status", ["infra", "hang"])
@pytest.mark.parametrize("run", [GOOD, REFUSED, failed(failure(0))])
@pytest.mark.parametrize("refused", [None, refusal()])
def test_infra_and_hang_stand_whatever_came_back(status: JobStatus, run: Run, refused: Refusal | None) -> None:
    found = judge(CASE, run, status, witnesses(refused=refused))
    assert found.verdict is Verdict(status) and found.checks == () and found.findings


def test_a_crash_is_a_crash_and_names_who_began() -> None:
    run = failed(failure(1, "peer gone", consequence=True), failure(0))
    found = judge(CASE, run, "crash", witnesses())
    assert found.verdict is Verdict.CRASH
    assert messages(found) == "rank 0 raised in step 1: ValueError: x"


def test_ranks_that_failed_alike_are_one_finding() -> None:
    found = judge(CASE, failed(failure(0), failure(1)), "crash", witnesses())
    assert messages(found) == "ranks 0-1 raised in step 1: ValueError: x"


def test_a_crash_status_stands_even_with_whole_traces() -> None:
    found = judge(CASE, GOOD, "crash", witnesses())
    assert (found.verdict, found.checks) == (Verdict.CRASH, ("alignment",))


def test_a_failed_rank_is_a_crash_even_when_the_engine_says_ok() -> None:
    run = Run(traces=(trace(0),), failures=(failure(1),))
    found = judge(CASE, run, "ok", witnesses())
    assert (found.verdict, found.checks) == (Verdict.CRASH, ("alignment",))


def test_an_uncalled_for_refusal_is_explained() -> None:
    found = judge(CASE, REFUSED, "crash", witnesses())
    assert found.verdict is Verdict.CRASH and "although every GEMM is aligned" in messages(found)


def test_the_expected_refusal_passes() -> None:
    found = judge(CASE, REFUSED, "crash", witnesses(refused=refusal()))
    assert found == Judgement(verdict=Verdict.PASSED, findings=(), checks=("alignment",))


def test_the_expected_refusal_needs_no_golden() -> None:
    assert judge(CASE, REFUSED, "crash", witnesses(refused=refusal(), golden=False)).verdict is Verdict.PASSED


def test_training_silently_breaks_a_rule() -> None:
    found = judge(CASE, GOOD, "ok", witnesses(refused=refusal()))
    assert found.verdict is Verdict.INVARIANT and "trained silently" in messages(found)


def test_failing_otherwise_than_refused_is_a_crash_with_both_stories() -> None:
    found = judge(CASE, failed(failure(0), failure(1, ALIGNED)), "crash", witnesses(refused=refusal()))
    assert found.verdict is Verdict.CRASH
    assert "not with the refusal" in messages(found) and "ValueError: x" in messages(found)


def test_no_executed_check_is_a_failure() -> None:
    found = judge(CASE, GOOD, "ok", witnesses(refused=refusal(check="nobody")))
    assert (found.verdict, found.checks) == (Verdict.INVARIANT, ())
    assert "no check was executed" in messages(found)
    assert judge(CASE, REFUSED, "crash", witnesses(refused=refusal(check="nobody"))).verdict is Verdict.CRASH


def test_a_recorded_fault_that_shows_is_known_and_keeps_its_findings() -> None:
    found = judge(CASE, OFF, "ok", witnesses(), known())
    assert found.verdict is Verdict.KNOWN
    assert found.findings == judge(CASE, OFF, "ok", witnesses()).findings


def test_a_recorded_fault_that_is_gone_must_be_closed() -> None:
    found = judge(CASE, GOOD, "ok", witnesses(), known())
    assert found.verdict is Verdict.UNEXPECTED_PASS
    assert "https://example.org/1" in messages(found) and "close the record" in messages(found)


@pytest.mark.parametrize(
    ("run", "status", "record", "verdict"),
    [
        (OFF, "ok", known(pattern="other words"), Verdict.NUMERIC),
        (OFF, "ok", known(Verdict.INVARIANT), Verdict.NUMERIC),
        (trained(losses=(8.0, 9.0), fqns=()), "ok", known(), Verdict.INVARIANT),
        (trained(losses=(8.0, 9.0), fqns=()), "ok", known(Verdict.INVARIANT, "not converted"), Verdict.INVARIANT),
        (failed(failure(0), failure(1, "KeyError")), "crash", known(Verdict.CRASH, "ValueError"), Verdict.CRASH),
        (failed(failure(0)), "hang", known(Verdict.CRASH, "ValueError"), Verdict.HANG),
        (failed(failure(0)), "infra", known(Verdict.INFRA, "ValueError"), Verdict.INFRA),
    ],
)
def test_failing_differently_than_recorded_keeps_its_verdict(
    run: Run, status: JobStatus, record: KnownFault, verdict: Verdict
) -> None:
    assert judge(CASE, run, status, witnesses(), record).verdict is verdict


@pytest.mark.parametrize("status", ["crash", "hang"])
def test_a_recorded_crash_or_hang_is_known(status: JobStatus) -> None:
    run = failed(failure(0), failure(1, "gone", consequence=True))
    found = judge(CASE, run, status, witnesses(), known(Verdict(status), r"raised in step \d+: ValueError"))
    assert found.verdict is Verdict.KNOWN


@given(st.permutations(range(2)), st.sampled_from([GOOD, OFF, REFUSED, failed(failure(0), failure(1, "y"))]))
def test_the_order_of_ranks_does_not_matter(order: list[int], run: Run) -> None:
    shuffled = Run(
        traces=tuple(run.traces[index] for index in order if run.traces),
        failures=tuple(run.failures[index] for index in order if run.failures),
    )
    status: JobStatus = "crash" if run.failures else "ok"
    assert judge(CASE, shuffled, status, witnesses()) == judge(CASE, run, status, witnesses())


def outcome(*ranks: RankOutcome) -> JobOutcome:
    return JobOutcome(job_id="j", status="ok", ranks=ranks)


def returned(rank: int, payload: bytes | None) -> RankOutcome:
    return RankOutcome(rank=rank, status="returned", payload=payload, traceback="tb", log_tail="said\n")


def test_traces_come_back_as_they_were_recorded() -> None:
    sent = [trace(1), trace(0)]
    run = run_from_outcome(outcome(*(returned(each.rank, msgspec.msgpack.encode(each)) for each in sent)))
    assert run == GOOD


def test_nan_comes_back_as_nan() -> None:
    run = run_from_outcome(outcome(returned(0, msgspec.msgpack.encode(trace(0, losses=(float("nan"), 1.0))))))
    assert repr(run.traces[0].steps[0].loss) == "nan"


@pytest.mark.parametrize("status", ["raised", "exited", "signalled", "stuck", "stopped"])
def test_other_ends_are_failures_with_their_last_output(status: RankStatus) -> None:
    rank = RankOutcome(
        rank=3, status=status, message="m", traceback="tb\n", phase="build", consequence=True, log_tail="last words\n"
    )
    (found,) = run_from_outcome(outcome(rank)).failures
    assert (found.rank, found.kind, found.message, found.phase, found.consequence) == (3, status, "m", "build", True)
    assert found.traceback == "tb\nlast output:\nlast words\n"


@pytest.mark.parametrize(
    "payload", [None, b"", b"\xc1", b"\x80", msgspec.msgpack.encode(trace(0))[:-3], msgspec.msgpack.encode(trace(1))]
)
def test_a_result_that_cannot_be_read_is_a_crash(payload: bytes | None) -> None:
    run = run_from_outcome(outcome(returned(0, payload), returned(1, msgspec.msgpack.encode(trace(1)))))
    assert [(each.rank, each.kind) for each in run.failures] == [(0, "garbled")]
    found = judge(CASE, run, "ok", witnesses())
    assert found.verdict is Verdict.CRASH and "rank 0 garbled: its result" in messages(found)


@given(st.binary(max_size=60))
def test_any_bytes_from_a_rank_are_judged(payload: bytes) -> None:
    run = run_from_outcome(outcome(returned(0, payload)))
    assert judge(CASE, run, "ok", witnesses()).verdict is Verdict.CRASH
