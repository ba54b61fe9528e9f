"""The judge: takes one run of one case and its references, returns one verdict with its findings.

The rules, in order:

1. The engine's `infra` and `hang` are final: such a run proves nothing about the numbers, and no expected refusal
   explains a hang.
2. Every check that applies is executed. A case with an expected refusal is checked only by the check that the refusal
   names; any other case whose ranks failed, only by `alignment`, which may explain the failure.
3. A crash is a crash, unless it is exactly the expected refusal.
4. Otherwise the worst finding decides. `invariant` outranks `numeric`: a broken rule is usually the cause of a wrong
   number. A case for which no check was executed is `invariant`.

What explains a failure from outside of the run is decided afterwards. It is `known` when every record of a fault that
affects the case shows itself (each finding that it requires is there, where its check was executed), and every finding
is explained by one of them: the right check, words, module, and not larger than recorded. A case that passes although a
fault is recorded for it is `unexpected_pass`. Everything else keeps its verdict: the findings that no record explains
come first, and what the records miss is added at the end.

A formula is evaluated with every version. With versions that it was verified with, a disagreement is a fault. With
others a case with no other findings is `changed`: not good, and nothing proves that it is wrong.
"""

import datetime
import fnmatch
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from harness.checks import catalogue
from harness.checks.catalogue import CHECKS, KNOWN, OUTDATED, RULES, by_cause
from harness.checks.check import Check, Witnesses, noun
from harness.checks.failures import LAST_OUTPUT, failures
from harness.engine.messages import JobOutcome, JobStatus, RankOutcome
from harness.errors import HarnessError
from harness.hints import LIST_RULES
from harness.matrix.axes import suggestion
from harness.matrix.case import Case
from harness.matrix.records import KnownFault
from harness.result import Measured
from harness.trace import RankFailure, RankTrace, Run
from harness.verdict import Finding, GoldenSource, NotJudged, Verdict

# Created before any thread decodes: msgspec crashes when two threads first use a type at the same time.
_TRACES = msgspec.msgpack.Decoder(RankTrace)


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
    """Return the verdict by rules 1 to 4. `status` is how the engine says the ranks ended."""
    if status in ("infra", "hang"):
        return Judgement(verdict=Verdict(status), findings=failures(run, status))
    checks, skipped = _applicable(run, status, witnesses, checks)
    findings = tuple(finding for check in checks for finding in _findings(check, case, run, witnesses))
    failed = status == "crash" or bool(run.failures)
    refused_as_expected = witnesses.expect.refusal is not None and bool(checks) and bool(run.failures) and not findings
    if failed and not refused_as_expected:
        verdict, findings = Verdict.CRASH, (*findings, *failures(run, "crash"))
    else:
        findings = by_cause(findings) if checks else (catalogue.NO_CHECK.finding(expected="a check"),)
        verdict = _worst(findings)
    names, golden = tuple(check.name for check in checks), witnesses.golden
    parts = ((check.name, check.partly(witnesses.expect, _device(run))) for check in checks)
    partly = [NotJudged(check=name, reason=reason) for name, reason in parts if reason]
    tolerances = [tolerance for tolerance in (witnesses.tolerance, witnesses.parity_tolerance) if tolerance is not None]
    return Judgement(
        verdict=verdict,
        findings=findings,
        checks=names,
        not_judged=(*skipped, *partly),
        golden_losses=() if golden is None or "loss_vs_golden" not in names else golden.losses,
        derived=tuple(tolerance.name for tolerance in tolerances if tolerance.derived and tolerance.name in names),
    )


def _findings(check: Check, case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Return the findings of a check. A check that fails is its only finding; other checks still run."""
    try:
        return check(case, run, witnesses)
    except Exception as error:
        details = "".join(traceback.format_exception(error))
        return [catalogue.BROKEN.finding(error=f"check {check.name}: {error!r}", details=details)]


def run_from_outcome(outcome: JobOutcome) -> Run:
    """Return the decoded outcome: a trace for every rank that returned a readable one, a failure for every other."""
    ends = [_decode(rank) for rank in sorted(outcome.ranks, key=lambda rank: rank.rank)]
    return Run(
        traces=tuple(end for end in ends if isinstance(end, RankTrace)),
        failures=tuple(end for end in ends if isinstance(end, RankFailure)),
    )


def _applicable(
    run: Run, status: JobStatus, witnesses: Witnesses, checks: Sequence[Check]
) -> tuple[list[Check], tuple[NotJudged, ...]]:
    refusal = witnesses.expect.refusal
    if refusal is not None:
        return [check for check in checks if check.name == refusal.check], ()
    if status == "crash" or run.failures:
        return [check for check in checks if check.explains_failures], ()
    skipped = {check.name: _skipped(check, run, witnesses) for check in checks}
    applicable = [check for check in checks if skipped[check.name] is None]
    return applicable, tuple(not_judged for not_judged in skipped.values() if not_judged is not None)


def _skipped(check: Check, run: Run, witnesses: Witnesses) -> NotJudged | None:
    reason = _inapplicable(check, run, witnesses)
    if reason is not None:
        return NotJudged(check=check.name, reason=reason)
    expect = witnesses.expect
    lost = {record: why for trace in run.traces for record, why in trace.not_recorded.items()}
    reason = next(
        (lost[record] for record in check.reads(expect) if record in lost and record not in expect.not_recorded), None
    )
    if reason is None and run.traces and check.needs_profile:
        recorded, command = witnesses.profile, witnesses.update_profile
        gap = "no profile is recorded" if recorded is None else recorded.version_gap(run.traces[0].software)
        reason = None if gap is None else f"{gap}; `{command}` records one"
    return None if reason is None else NotJudged(check=check.name, reason=reason, unverified=True)


def _inapplicable(check: Check, run: Run, witnesses: Witnesses) -> str | None:
    expect = witnesses.expect
    reason = _unrecorded_by_design(check, run, witnesses) or check.says_nothing_of(expect, _device(run))
    if reason:
        return reason
    if check.needs_relation and expect.relation is None:
        return "no option of this case must be neutral, or parity already leaves no room for rounding"
    of_partner = check.needs_relation or (check.checks_counterpart and expect.stands_for_modules)
    if (of_partner or check.needs_profile) and witnesses.partner_has_fix:
        return "checked in the second run, with the candidate fix"
    return None


def _unrecorded_by_design(check: Check, run: Run, witnesses: Witnesses) -> str:
    """Return why no rank has what the check reads, where none had to; empty if it is there or missing."""
    expect = witnesses.expect
    for record in filter(lambda record: _is_nowhere(record, run), check.records_of(expect)):
        if record in expect.not_recorded:
            return expect.not_recorded[record]
        if record not in witnesses.records:
            return f"the ranks were not asked to record {noun(record)}"
    return check.absent if check.unasked and _is_nowhere(check.unasked, run) else ""


def _device(run: Run) -> str:
    return run.traces[0].device if run.traces else "cpu"


def _is_nowhere(record: str, run: Run) -> bool:
    return all(getattr(trace, record) is None for trace in run.traces)


def _worst(findings: tuple[Finding, ...]) -> Verdict:
    """Return the verdict of the findings; a check that broke decides it only where nothing else was found."""
    others = [finding for finding in findings if finding.rule != catalogue.BROKEN.name]
    if findings and not others:
        return Verdict.INFRA
    verdicts = {finding.verdict for finding in others}
    assert verdicts <= {Verdict.INVARIANT, Verdict.NUMERIC}
    return next((worst for worst in (Verdict.INVARIANT, Verdict.NUMERIC) if worst in verdicts), Verdict.PASSED)


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
    """Return the failure with the last output of the rank, which is kept nowhere else."""
    output = f"{LAST_OUTPUT}\n{outcome.log_tail}" if outcome.log_tail.strip() else ""
    return RankFailure(
        rank=outcome.rank,
        kind=kind,
        message=message,
        traceback="\n".join(part for part in (outcome.traceback.rstrip(), output) if part),
        phase=outcome.phase,
        consequence=outcome.consequence,
    )


# Records of known faults, and formulas that are not verified here

_STOPS = (Verdict.CRASH, Verdict.HANG)


def require_rules(faults: Iterable[KnownFault]) -> None:
    """Raise HarnessError for a record that names a rule no check has: it would explain nothing, and say nothing."""
    for fault in faults:
        for symptom in (*fault.requires, *fault.may_cause):
            if not fnmatch.filter(RULES, symptom.rule):
                what, where = f"no check has the rule '{symptom.rule}'.", f"cases/known.toml, fault {fault.name}"
                raise HarnessError(what, where=where, fix=suggestion(symptom.rule, RULES, listed=LIST_RULES))


def showing(faults: Iterable[KnownFault], case: Case, findings: Sequence[Finding]) -> Iterator[KnownFault]:
    """Return the records that must show in a case, and of the others those that do."""
    return (fault for fault in faults if fault.must_show(case) or fault.shows(findings))


def with_known_faults(judgement: Judgement, faults: Sequence[KnownFault], today: datetime.date) -> Judgement:
    """Return the judgement, given the records that affect the case; an infrastructure failure stays what it is."""
    if not faults or judgement.verdict is Verdict.INFRA:
        return judgement
    if judgement.verdict is Verdict.PASSED:
        gone = (
            catalogue.GONE.finding(fault=fault.name, link=fault.link, expected=fault.verdict.value, found="passed")
            for fault in faults
        )
        return replace(judgement, verdict=Verdict.UNEXPECTED_PASS, findings=tuple(gone))
    unexplained = [finding for finding in judgement.findings if not any(fault.explains(finding) for fault in faults)]
    notes = [*_notes(judgement, faults, today)]
    if unexplained:
        names = " and ".join(fault.name for fault in faults)
        broken = ", ".join(dict.fromkeys(finding.rule for finding in unexplained))
        notes.append(catalogue.UNEXPLAINED.finding(count=len(unexplained), faults=names, rules=broken))
    if judgement.findings and not notes:
        named = ((KNOWN.finding(fault=each.name, reason=each.reason, link=each.link), each) for each in faults)
        known = (replace(finding, verdict=fault.verdict) for finding, fault in named)
        return replace(judgement, verdict=Verdict.KNOWN, findings=(*known, *judgement.findings))
    explained = [finding for finding in judgement.findings if finding not in unexplained]
    return replace(judgement, findings=(*unexplained, *explained, *notes))


def _notes(judgement: Judgement, faults: Sequence[KnownFault], today: datetime.date) -> Iterator[Finding]:
    """Yield why the failure is not the recorded one, apart from findings that no record explains."""
    skipped = {not_judged.check for not_judged in judgement.not_judged} - set(judgement.checks)
    stopped = any(fault.verdict in _STOPS and fault.shows(judgement.findings) for fault in faults)
    for fault in faults:
        if stopped and fault.verdict not in _STOPS:
            continue  # a run that was stopped by a recorded fault shows no other
        for symptom in fault.requires:
            if symptom.check not in skipped and not any(symptom.explains(finding) for finding in judgement.findings):
                yield catalogue.MISSING.finding(fault=fault.name, expected=str(symptom), found="none")
        if fault.review_by < today:
            day = str(fault.review_by)
            yield OUTDATED.finding(fault=fault.name, day=day, expected="a later review_by, or no record", found=day)
    recorded = sorted({fault.verdict.value for fault in faults})
    if judgement.verdict.value not in recorded:
        yield catalogue.OTHER_END.finding(expected=" or ".join(recorded), found=judgement.verdict.value)


def with_doubts(judgement: Judgement, doubts: Mapping[str, str]) -> Judgement:
    """The judgement with a note at every finding by a formula in `doubts`: the formulas not verified here, and why."""
    findings = tuple(
        replace(finding, differs=doubts.get(finding.formula, finding.differs)) for finding in judgement.findings
    )
    only_doubted = judgement.verdict is Verdict.INVARIANT and all(finding.differs for finding in findings)
    return replace(judgement, verdict=Verdict.CHANGED if only_doubted else judgement.verdict, findings=findings)
