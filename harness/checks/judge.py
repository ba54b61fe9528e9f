"""The judge: one run of one case and its witnesses in, one verdict with its findings out.

The rules, in order:

1. The engine's `infra` and `hang` stand: such a run proves nothing about the numbers, and no refusal explains a hang.
2. Every check that applies is executed. A case with an expected refusal is judged by the check that the refusal
   names and by nothing else; a case that failed otherwise, by `alignment` alone, which may explain the failure.
3. A crash is a crash, unless it is the expected refusal, whole and exact.
4. Otherwise the worst finding decides. `invariant` outranks `numeric`: a broken rule usually is why a number is off.
   A case for which no check was executed has broken the rule that something must be checked.
5. A recorded fault turns a failure into `known` when the verdict is the recorded one and its pattern matches every
   finding: a second, new fault must not hide behind a known one. If the case passes, that is `unexpected_pass`.

It does not know how runs are made, retried or reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from harness.checks.alignment import NAME as ALIGNMENT
from harness.checks.alignment import check_alignment
from harness.checks.divergence import first_divergence
from harness.checks.finite import NAME as FINITE
from harness.checks.finite import check_finite
from harness.checks.fp8_on import NAME as FP8_ON
from harness.checks.fp8_on import check_fp8_on
from harness.checks.graphcasts import NAME as GRAPH_SCALES
from harness.checks.graphcasts import check_graph_casts
from harness.checks.graphs import NAME as GRAPHS
from harness.checks.graphs import check_graphs
from harness.checks.loss_vs_golden import NAME as LOSS_VS_GOLDEN
from harness.checks.loss_vs_golden import check_loss_vs_golden
from harness.checks.memory import NAME as MEMORY
from harness.checks.memory import check_memory
from harness.checks.metamorphic import NAME as METAMORPHIC
from harness.checks.metamorphic import check_metamorphic
from harness.checks.parity import NAME as PARITY
from harness.checks.parity import check_parity
from harness.checks.ranks import rank_names
from harness.checks.recompute import NAME as RECOMPUTE
from harness.checks.recompute import check_recompute
from harness.checks.scales import NAME as SCALES
from harness.checks.scales import check_scales
from harness.checks.wire import NAME as WIRE
from harness.checks.wire import check_wire
from harness.checks.witnesses import Witnesses
from harness.engine.wire import JobOutcome, JobStatus, RankOutcome
from harness.spec.case import Case
from harness.spec.known import KnownFault
from harness.trace import RankFailure, RankTrace, Run
from harness.verdict import Finding, Verdict

ENGINE = "engine"  # what findings about ranks that did not finish are filed under
JUDGE = "judge"

Question = Callable[[Case, Run, Witnesses], list[Finding]]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One question to a run. `ask` is pure. `explains_failures`: it also has something to say when ranks failed."""

    name: str
    ask: Question
    explains_failures: bool = False
    needs: str | None = None  # the part of a trace that it reads: not asked of runs that did not record it
    given: str | None = None  # the field of `Witnesses` that says what it asks for: not asked where that is None


CHECKS: tuple[Check, ...] = (
    Check(name=FINITE, ask=check_finite),
    Check(name=LOSS_VS_GOLDEN, ask=check_loss_vs_golden),
    Check(name=FP8_ON, ask=check_fp8_on),
    Check(name=PARITY, ask=check_parity, needs="sketches"),
    Check(name=SCALES, ask=check_scales, needs="operands"),
    Check(name=GRAPH_SCALES, ask=check_graph_casts, needs="graphs"),
    Check(name=RECOMPUTE, ask=check_recompute, needs="operands"),
    Check(name=WIRE, ask=check_wire, needs="traffic"),
    Check(name=MEMORY, ask=check_memory, needs="saved_memory"),
    Check(name=GRAPHS, ask=check_graphs, needs="graphs"),
    Check(name=METAMORPHIC, ask=check_metamorphic, needs="sketches", given="relation"),
    Check(name=ALIGNMENT, ask=check_alignment, explains_failures=True),
)


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one run, why, and the names of the checks that were executed."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]


def judge(case: Case, run: Run, status: JobStatus, witnesses: Witnesses, known: KnownFault | None = None) -> Judgement:
    """The verdict by the rules above. `status` is the engine's word on how the ranks ended."""
    found = _judge(case, run, status, witnesses)
    return found if known is None else _with_known(found, known)


def run_from_outcome(outcome: JobOutcome) -> Run:
    """What came back, decoded: a trace for every rank that returned a readable one, a failure for every other."""
    answers = [_answer(rank) for rank in sorted(outcome.ranks, key=lambda rank: rank.rank)]
    return Run(
        traces=tuple(answer for answer in answers if isinstance(answer, RankTrace)),
        failures=tuple(answer for answer in answers if isinstance(answer, RankFailure)),
    )


def _judge(case: Case, run: Run, status: JobStatus, witnesses: Witnesses) -> Judgement:
    if status in ("infra", "hang"):
        return Judgement(verdict=Verdict(status), findings=_failures(run, status), checks=())
    asked = _applicable(run, status, witnesses)
    findings = tuple(finding for check in asked for finding in check.ask(case, run, witnesses))
    findings += _located(case, run, witnesses, findings)
    checks = tuple(check.name for check in asked)
    failed = status == "crash" or bool(run.failures)
    refused_as_expected = witnesses.refusal is not None and bool(asked) and bool(run.failures) and not findings
    if failed and not refused_as_expected:
        return Judgement(verdict=Verdict.CRASH, findings=(*findings, *_failures(run, "crash")), checks=checks)
    if not asked:
        findings = (Finding(check=JUDGE, message="no check was executed: nothing was proven", expected="a check"),)
    return Judgement(verdict=_worst(findings), findings=findings, checks=checks)


def _located(case: Case, run: Run, witnesses: Witnesses, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Where a run that failed parity first did something else than its solo witness."""
    off = any(finding.check == PARITY for finding in findings)
    recorded = witnesses.solo is not None and all(
        trace.operands is not None for trace in (*run.traces, *witnesses.solo.traces)
    )
    if not off or not recorded or witnesses.solo is None:
        return ()
    first = first_divergence(case, run, witnesses.solo)
    return () if first is None else (first,)


def _applicable(run: Run, status: JobStatus, witnesses: Witnesses) -> list[Check]:
    if witnesses.refusal is not None:
        return [check for check in CHECKS if check.name == witnesses.refusal.check]
    if status == "crash" or run.failures:
        return [check for check in CHECKS if check.explains_failures]
    return [check for check in CHECKS if _can_answer(check, run, witnesses)]


def _can_answer(check: Check, run: Run, witnesses: Witnesses) -> bool:
    recorded = check.needs is None or any(getattr(trace, check.needs) is not None for trace in run.traces)
    return recorded and (check.given is None or getattr(witnesses, check.given) is not None)


def _worst(findings: tuple[Finding, ...]) -> Verdict:
    verdicts = {finding.verdict for finding in findings}
    for verdict in (Verdict.INVARIANT, Verdict.NUMERIC):
        if verdict in verdicts:
            return verdict
    assert not verdicts, "a finding makes a case numeric or invariant"
    return Verdict.PASSED


def _with_known(found: Judgement, known: KnownFault) -> Judgement:
    record = f"the recorded fault {known.name} ({known.link})"
    if found.verdict is Verdict.PASSED:
        message = f"{record} did not show: close the record"
        finding = Finding(check=JUDGE, message=message, expected=known.verdict.value, found="passed")
        return Judgement(verdict=Verdict.UNEXPECTED_PASS, findings=(finding,), checks=found.checks)
    explained = all(_mentions(finding, known.pattern) for finding in found.findings)
    if found.verdict is known.verdict and found.verdict is not Verdict.INFRA and found.findings and explained:
        return msgspec.structs.replace(found, verdict=Verdict.KNOWN)
    return found


def _mentions(finding: Finding, pattern: str) -> bool:
    return any(re.search(pattern, text) for text in (finding.message, finding.found or ""))


def _failures(run: Run, status: str) -> tuple[Finding, ...]:
    """What the engine saw, one finding for ranks that ended alike. Ranks brought down by others only if none else."""
    failures = sorted(run.failures, key=lambda failure: failure.rank)
    causes = [failure for failure in failures if not failure.consequence] or failures
    groups: dict[tuple[str, str, str], list[int]] = {}
    for failure in causes:
        groups.setdefault((failure.kind, failure.phase, failure.message), []).append(failure.rank)
    if not groups:
        return (Finding(check=ENGINE, message=f"the engine reports {status}, but no rank says why"),)
    return tuple(
        Finding(
            check=ENGINE,
            message=f"{rank_names(ranks)} {kind}{f' in {phase}' if phase else ''}: {message}",
            rank=ranks[0],
            expected="every rank returns",
            found=kind,
        )
        for (kind, phase, message), ranks in groups.items()
    )


def _answer(outcome: RankOutcome) -> RankTrace | RankFailure:
    if outcome.status == "returned":
        try:
            trace = msgspec.msgpack.decode(outcome.payload or b"", type=RankTrace)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _failure(outcome, "garbled", f"its result cannot be read: {error}")
        if trace.rank != outcome.rank:
            return _failure(outcome, "garbled", f"its result says that it is rank {trace.rank}")
        return trace
    return _failure(outcome, outcome.status, outcome.message)


def _failure(outcome: RankOutcome, kind: str, message: str) -> RankFailure:
    """The failure with what the rank last wrote: the only place where its output survives."""
    output = f"last output:\n{outcome.log_tail}" if outcome.log_tail.strip() else ""
    return RankFailure(
        rank=outcome.rank,
        kind=kind,
        message=message,
        traceback="\n".join(part for part in (outcome.traceback.rstrip(), output) if part),
        phase=outcome.phase,
        consequence=outcome.consequence,
    )
