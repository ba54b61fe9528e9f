"""The judge: takes one run of one case and its witnesses, returns one verdict with its findings.

The rules, in order:

1. The engine's `infra` and `hang` are final: such a run proves nothing about the numbers, and no expected refusal
   explains a hang.
2. Every check that applies is executed. A case with an expected refusal is judged only by the check that the refusal
   names; any other case whose ranks failed, only by `alignment`, which may explain the failure.
3. A crash is a crash, unless it is exactly the expected refusal.
4. Otherwise the worst finding decides. `invariant` outranks `numeric`: a broken rule is usually the cause of a wrong
   number. A case for which no check was executed is `invariant`.

What recorded upstream faults explain of a failure is decided afterwards, in `recorded.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from harness.checks import loss_vs_golden
from harness.checks.catalogue import CHECKS, RULES
from harness.checks.causes import by_cause
from harness.checks.check import Check
from harness.checks.failures import failures
from harness.checks.rule import Rules, Stage
from harness.checks.stacks import LAST_OUTPUT
from harness.checks.witnesses import Witnesses
from harness.engine.messages import JobOutcome, JobStatus, RankOutcome
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.measured import Measured
from harness.trace import RankFailure, RankTrace, Run
from harness.verdict import Finding, GoldenSource, NotJudged, Verdict

# Created before any thread decodes: msgspec crashes when two threads first use a type at the same time.
_TRACES = msgspec.msgpack.Decoder(RankTrace)

_rule = Rules("judge")
NO_CHECK = _rule("no-check", Stage.RUN, "no check was executed", judged=False)
BROKEN = _rule("broken", Stage.RUN, "the harness failed while judging: {error}")


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one run with its findings, the checks that were executed, and why others were skipped."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    checks: tuple[str, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()
    golden: GoldenSource = ""
    golden_losses: tuple[float, ...] = ()  # what the losses were compared with
    derived: tuple[str, ...] = ()  # checks whose tolerance was derived
    measured: Measured | None = None


def judge(case: Case, run: Run, status: JobStatus, witnesses: Witnesses, checks: Sequence[Check] = CHECKS) -> Judgement:
    """The verdict by rules 1 to 4. `status` is how the engine says the ranks ended."""
    if status in ("infra", "hang"):
        return Judgement(verdict=Verdict(status), findings=failures(run, status))
    checks, skipped = _applicable(run, status, witnesses, checks)
    findings = tuple(
        finding
        for check in checks
        for finding in (
            (_no_record(check, witnesses),)
            if _is_missing(check, run, witnesses)
            else check.function(case, run, witnesses)
        )
    )
    failed = status == "crash" or bool(run.failures)
    refused_as_expected = witnesses.expect.refusal is not None and bool(checks) and bool(run.failures) and not findings
    if failed and not refused_as_expected:
        verdict, findings = Verdict.CRASH, (*findings, *failures(run, "crash"))
    else:
        if not checks:
            findings = (NO_CHECK.finding(expected="a check"),)
        verdict = _worst(findings)
        findings = by_cause(findings)
    names, golden = tuple(check.name for check in checks), witnesses.golden
    parts = ((check.name, check.partly(witnesses.expect, _device(run))) for check in checks)
    partly = [NotJudged(check=name, reason=reason) for name, reason in parts if reason]
    return Judgement(
        verdict=verdict,
        findings=findings,
        checks=names,
        not_judged=(*skipped, *partly),
        golden_losses=() if golden is None or loss_vs_golden.NAME not in names else golden.losses,
        derived=_derived(witnesses, names),
    )


def _derived(witnesses: Witnesses, checks: Collection[str]) -> tuple[str, ...]:
    """The checks that were executed with a derived tolerance."""
    tolerances = (witnesses.tolerance, witnesses.parity_tolerance)
    return tuple(each.name for each in tolerances if each is not None and each.derived and each.name in checks)


def run_from_outcome(outcome: JobOutcome) -> Run:
    """The decoded outcome: a trace for every rank that returned a readable one, a failure for every other."""
    ends = [_decode(rank) for rank in sorted(outcome.ranks, key=lambda rank: rank.rank)]
    return Run(
        traces=tuple(end for end in ends if isinstance(end, RankTrace)),
        failures=tuple(end for end in ends if isinstance(end, RankFailure)),
    )


def _applicable(
    run: Run, status: JobStatus, witnesses: Witnesses, checks: Sequence[Check]
) -> tuple[list[Check], tuple[NotJudged, ...]]:
    """The checks that apply to this run, and why the others do not."""
    refusal = witnesses.expect.refusal
    if refusal is not None:
        return [check for check in checks if check.name == refusal.check], ()
    if status == "crash" or run.failures:
        return [check for check in checks if check.explains_failures], ()
    skipped = {check.name: _skipped(check, run, witnesses) for check in checks}
    applicable = [check for check in checks if skipped[check.name] is None]
    return applicable, tuple(each for each in skipped.values() if each is not None)


def _skipped(check: Check, run: Run, witnesses: Witnesses) -> NotJudged | None:
    """Why a check is not executed for a run that finished; None when it is."""
    reason = _inapplicable(check, run, witnesses)
    if reason is not None:
        return NotJudged(check=check.name, reason=reason)
    reason = _lost(check, run, witnesses.expect)
    if reason is None and run.traces and check.needs_signature:
        reason = _unrecorded(run.traces[0].software, witnesses)
    return None if reason is None else NotJudged(check=check.name, reason=reason, unverified=True)


def _unrecorded(software: Mapping[str, str], witnesses: Witnesses) -> str | None:
    """Why no signature says anything of runs with this software; None where one does."""
    recorded, command = witnesses.signature, witnesses.update_signature
    gap = "no signature is recorded" if recorded is None else recorded.version_gap(software)
    return None if gap is None else f"{gap}; `{command}` records one"


def _inapplicable(check: Check, run: Run, witnesses: Witnesses) -> str | None:
    record = check.record_of(witnesses.expect)
    if record is not None and _is_missing(check, run, witnesses):
        if record in witnesses.expect.not_recorded:
            return witnesses.expect.not_recorded[record]
        if record not in witnesses.records:
            return check.absent or f"the ranks were not asked to record {_noun(record)}"
    reason = check.says_nothing_of(witnesses.expect, _device(run))
    if reason:
        return reason
    if check.needs_relation and witnesses.expect.relation is None:
        return "no option of this case must be neutral, or parity already leaves no room for rounding"
    of_partner = check.needs_relation or (check.judges_partner and witnesses.expect.stands_for_modules)
    if (of_partner or check.needs_signature) and witnesses.partner_has_fix:
        return "judged in the second run, with the candidate fix"
    return None


def _device(run: Run) -> str:
    """The device of the ranks; a CPU where none left a trace."""
    return run.traces[0].device if run.traces else "cpu"


def _lost(check: Check, run: Run, expect: Expectations) -> str | None:
    """Why the installed versions do not let ranks record what a check reads; None where they do."""
    lost = {record: reason for trace in run.traces for record, reason in trace.not_recorded.items()}
    return next((lost[each] for each in check.reads(expect) if each in lost and each not in expect.not_recorded), None)


def _is_missing(check: Check, run: Run, witnesses: Witnesses) -> bool:
    """True when no rank recorded what the check reads."""
    record = check.record_of(witnesses.expect)
    return record is not None and all(getattr(trace, record) is None for trace in run.traces)


def _no_record(check: Check, witnesses: Witnesses) -> Finding:
    record = check.record_of(witnesses.expect)
    assert record is not None
    where = "any rank, which they were asked for"
    return RULES[f"{check.name}/no-record"].finding(
        record=_noun(record), where=where, expected="a record of every rank", found="none"
    )


def _noun(record: str) -> str:
    return record.replace("_", " ")


def _worst(findings: tuple[Finding, ...]) -> Verdict:
    verdicts = {finding.verdict for finding in findings}
    for verdict in (Verdict.INVARIANT, Verdict.NUMERIC):
        if verdict in verdicts:
            return verdict
    assert not verdicts, "every finding is numeric or invariant"
    return Verdict.PASSED


def _decode(outcome: RankOutcome) -> RankTrace | RankFailure:
    if outcome.status == "returned":
        try:
            trace = _TRACES.decode(outcome.payload or b"")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _failure(outcome, "garbled", f"its result cannot be read: {error}")
        if trace.rank != outcome.rank:
            return _failure(outcome, "garbled", f"its result says that it is rank {trace.rank}")
        return trace
    return _failure(outcome, outcome.status, outcome.message)


def _failure(outcome: RankOutcome, kind: str, message: str) -> RankFailure:
    """The failure with the last output of the rank, which is kept nowhere else."""
    output = f"{LAST_OUTPUT}\n{outcome.log_tail}" if outcome.log_tail.strip() else ""
    return RankFailure(
        rank=outcome.rank,
        kind=kind,
        message=message,
        traceback="\n".join(part for part in (outcome.traceback.rstrip(), output) if part),
        phase=outcome.phase,
        consequence=outcome.consequence,
    )
