"""Gate reasons: how cases ended, what was not run or checked, and what cases were checked by."""

import datetime
import math
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from harness.checks import divergence
from harness.checks.assembly import largest, same_number, same_numbers
from harness.evidence.golden import Golden
from harness.matrix.caseid import parse_case_id
from harness.matrix.records import Required
from harness.plugins.release.sides import Kind, Reason, Sides
from harness.result import CaseResult, RunResult
from harness.text import counted
from harness.verdict import Verdict

Goldens = Callable[[str], Golden | None]  # the golden that the project has now for a case


# Failures


def failures(sides: Sides, *, strict: bool) -> Iterable[Reason]:
    """New, changed and remaining failures, and known faults that appeared or disappeared."""
    for case in sides.candidate.results:
        if case.ran and case.verdict is not Verdict.INFRA:
            yield from _of_case(sides.before.get(case.case_id), case, strict=strict)


def _of_case(before: CaseResult | None, after: CaseResult, *, strict: bool) -> Iterable[Reason]:
    if before is not None and not before.ran:
        before = None
    if after.verdict is Verdict.KNOWN:
        yield from _known(before, after)
    elif after.good:
        if before is not None and before.verdict is Verdict.KNOWN:
            what = f"{', '.join(_faults(before))} does not show, and no record expects it"
            yield _failure(Kind.FAULT_GONE, before, after, what=what, gates=False, faults=_faults(before))
        elif before is not None and before.verdict is not Verdict.PASSED:
            yield _failure(Kind.FIXED, before, after, what=_first(before), gates=False)
    elif before is not None and not before.good and before.verdict is not Verdict.INFRA:
        alike = (before.verdict, before.failure_signature) == (after.verdict, after.failure_signature)
        kind = Kind.STILL_FAILING if alike else Kind.OTHER_FAILURE
        yield _failure(kind, before, after, what=_first(after), gates=strict or not alike)
    else:
        kind = Kind.UNEXPECTED_PASS if after.verdict is Verdict.UNEXPECTED_PASS else Kind.NEW_FAILURE
        yield _failure(kind, before, after, what=_first(after))


def _known(before: CaseResult | None, after: CaseResult) -> Iterable[Reason]:
    """Return a recorded fault that the case did not show before, or that explains why it failed before."""
    faults, gates = _faults(after), before is not None
    if before is not None and before.verdict is Verdict.KNOWN:
        faults = [name for name in faults if name not in _faults(before)]
    elif before is not None and before.verdict is not Verdict.PASSED:
        yield _failure(Kind.EXPLAINED, before, after, what=f"shows {', '.join(faults)}", gates=False, faults=faults)
        return
    if faults:
        yield _failure(Kind.KNOWN_FAULT, before, after, what=f"shows {', '.join(faults)}", gates=gates, faults=faults)


def _failure(
    kind: Kind,
    before: CaseResult | None,
    after: CaseResult,
    *,
    what: str,
    gates: bool = True,
    faults: Sequence[str] = (),
) -> Reason:
    return Reason(
        kind=kind,
        case=after.case_id,
        what=what,
        baseline="not in the baseline" if before is None else before.verdict.value,
        candidate=after.verdict.value,
        gates=gates,
        command=after.command,
        details=tuple(_details(before, after)),
        faults=tuple(faults),
        signature="" if after.failure_signature is None else after.failure_signature.text,
    )


def _details(before: CaseResult | None, after: CaseResult) -> Iterable[str]:
    """Return the signature, the one before it where it is another, and the first operand that differs."""
    if after.failure_signature is not None:
        yield f"signature: {after.failure_signature.text}"
    was = None if before is None else before.failure_signature
    if was is not None and after.failure_signature is not None and was != after.failure_signature:
        yield f"before: {was.text}"
    diverged = next((finding for finding in after.findings if finding.check == divergence.OPERAND.check), None)
    if diverged is not None:
        yield diverged.first_line


def _first(case: CaseResult) -> str:
    """Return the rule and the first line of the first finding, with its place where the sentence does not name it."""
    if not case.findings:
        return case.verdict.phrase
    finding = case.findings[0]
    where = f" [{finding.place}]" if finding.place else ""
    return f"{finding.rule}{where}: {finding.first_line}"


def _faults(case: CaseResult) -> list[str]:
    return (case.expectation or "a known issue").split(", ")


# Coverage


def lost_cases(sides: Sides) -> Iterable[Reason]:
    """Return every case that the baseline ran and the candidate did not, or could not."""
    for name, before in sides.before.items():
        why = _why_not(sides, name)
        if why and before.ran and before.verdict is not Verdict.INFRA:
            yield Reason(
                kind=Kind.LOST_COVERAGE,
                case=name,
                what=why,
                baseline=before.verdict.value,
                candidate=why,
                command=before.command,
            )


def _why_not(sides: Sides, name: str) -> str:
    """Return why the candidate has no result of a case; empty if it has one."""
    after = sides.after.get(name)
    if after is None:
        return "left out, beyond the budget" if name in sides.candidate.start.left_out else "not selected"
    if after.verdict is Verdict.INFRA:
        return f"could not be run: {after.headline or 'infra'}"
    return "" if after.ran else "not run"


def unfinished(sides: Sides) -> Iterable[Reason]:
    if sides.candidate.end.interrupted:
        missing = [case for case in sides.candidate.results if not case.ran]
        yield Reason(
            kind=Kind.INTERRUPTED,
            what=f"the candidate was interrupted: {counted(len(missing), 'case')} without a result",
            baseline="interrupted" if sides.baseline.end.interrupted else "ended",
            candidate="interrupted",
            gates=bool(missing) or not sides.baseline.end.interrupted,
        )


def lost_checks(sides: Sides) -> Iterable[Reason]:
    """Return every case that must be refused now, or of which a check was checked and now is not."""
    for pair in sides.compared:
        before, after = pair.baseline, pair.candidate
        gone = [name for name in before.checks if name not in after.checks]
        reasons = {skipped.check: skipped.reason for skipped in after.not_judged}
        details = tuple(f"{name}: {reasons.get(name, 'not checked, without a reason')}" for name in gone)
        what, size = f"no longer checked: {', '.join(gone)}", len(gone)
        refused = _refused(after)
        if refused and not _refused(before):
            what, details, size = f"must be refused now ({refused}): nothing else is checked", (), len(before.checks)
        elif not gone:
            continue
        yield Reason(
            kind=Kind.LOST_CHECK,
            case=pair.id,
            what=what,
            baseline=counted(len(before.checks), "check"),
            candidate=counted(len(after.checks), "check"),
            size=size,
            command=after.command,
            details=details,
        )


def _refused(case: CaseResult) -> str:
    return (case.expectation or "") if case.verdict is Verdict.PASSED else ""


def required_cells(sides: Sides, entries: Sequence[Required], now: datetime.datetime) -> Iterable[Reason]:
    """Every entry of what a release must show that the candidate does not meet, or not recently. Nothing waives it."""
    for entry in entries:
        covered = _covered(entry, sides.candidate)
        good = [case for case in covered if case.good and case.checks]
        stale = _too_old(entry, sides.candidate.start.started, now)
        if stale or len(good) < entry.at_least:
            before = sum(case.good for case in _covered(entry, sides.baseline))
            too_few = f"{len(good)} of at least {counted(entry.at_least, 'case')} good"
            yield Reason(
                kind=Kind.REQUIRED,
                case=entry.id or None,
                what=f"{entry.name}: {stale or too_few}",
                baseline=f"{before} good",
                candidate=f"{len(good)} good",
                size=entry.at_least - len(good),
                command=next((case.command for case in covered if case not in good), ""),
                details=(f"required: {entry.reason}", f"cases: {entry.which}", *_why_missing(covered, good)),
            )


def _covered(entry: Required, run: RunResult) -> list[CaseResult]:
    return [case for case in run.results if entry.covers(parse_case_id(case.case_id))]


def _too_old(entry: Required, started: str, now: datetime.datetime) -> str:
    """Return how old the run is, where that is older than allowed or not known; else empty."""
    if entry.max_age_days is None:
        return ""
    if not started:
        return "it is not known when it was run"
    days = (now - datetime.datetime.fromisoformat(started)) / datetime.timedelta(days=1)
    return f"run {days:.1f} days ago, at most {entry.max_age_days:g} allowed" if days > entry.max_age_days else ""


def _why_missing(covered: Sequence[CaseResult], good: Sequence[CaseResult]) -> Iterable[str]:
    if not covered:
        yield "none of them was selected"
    for case in (case for case in covered if case not in good):
        yield f"{case.case_id}: {'checked by no check' if case.good else case.verdict.value}"


# References


def changed_goldens(sides: Sides, stored: Goldens) -> Iterable[Reason]:
    """Return every case whose stored golden changed. It gates unless the golden says why it was changed."""
    for pair in sides.pairs.values():
        before, after = pair.baseline.golden_losses, pair.candidate.golden_losses
        are_stored = pair.baseline.golden == pair.candidate.golden == "stored" and before and after
        if are_stored and not same_numbers(before, after):
            golden = stored(pair.id)
            reason = _reason_of(golden, after)
            apart = largest((abs(a - b) for a, b in _changed(before, after)), empty=0.0)
            yield Reason(
                kind=Kind.GOLDEN,
                case=pair.id,
                what=f"its golden changed by up to {apart:.2g} nats",
                baseline=_losses(before),
                candidate=_losses(after),
                gates=not reason,
                size=apart,
                command=pair.candidate.command,
                details=(reason or f"no reason is known: {_unknown(sides, golden)}",),
            )


def changed_tolerances(sides: Sides) -> Iterable[Reason]:
    """Return every case that may be further from its golden. A tolerance that was derived is one of this run."""
    for pair in sides.pairs.values():
        if pair.baseline.measured is None or pair.candidate.measured is None:
            continue
        before, after = pair.baseline.measured.allowed_loss, pair.candidate.measured.allowed_loss
        if before and after and not same_numbers(before, after):
            ratio = largest((new / old if old else math.inf for old, new in _changed(before, after)), empty=1.0)
            derived = "loss_vs_golden" in pair.candidate.derived or "loss_vs_golden" in pair.baseline.derived
            yield Reason(
                kind=Kind.TOLERANCE,
                case=pair.id,
                what="loss tolerance narrowed" if ratio <= 1 else f"loss tolerance widened {ratio:.3g}x",
                baseline=_losses(before),
                candidate=_losses(after),
                gates=not ratio <= 1 and not derived,
                size=ratio,
                command=pair.candidate.command,
                details=("derived in each run" if derived else "golden/tolerances.toml changed",),
            )


def other_references(sides: Sides) -> Iterable[Reason]:
    """Every case that lost its stored golden or its measured tolerance: what a run makes itself shares its faults."""
    for pair in sides.pairs.values():
        before, after = pair.baseline, pair.candidate
        derived = [name for name in after.derived if name not in before.derived and name in before.checks]
        weaker = Reason(kind=Kind.REFERENCES, case=pair.id, what="", gates=sides.same_device, command=after.command)
        if before.golden == "stored" and after.golden == "run here":
            what = "golden is now computed in this run; it used to be stored"
            yield replace(weaker, what=what, baseline=before.golden, candidate=after.golden)
        if derived:
            what = f"tolerance is now derived; it used to be measured: {', '.join(derived)}"
            yield replace(weaker, what=what, baseline="measured", candidate="derived")


def _reason_of(golden: Golden | None, judged_by: tuple[float, ...]) -> str:
    """Return why the golden is what it is, where it is the one that the candidate was checked by; else empty."""
    if golden is None or not same_numbers(golden.losses, judged_by):
        return ""
    made = golden.provenance
    return f"reason: {made.reason} ({made.created[:10]}, commit {made.commit[:12]})" if made.reason else ""


def _unknown(sides: Sides, golden: Golden | None) -> str:
    before, after = sides.environments
    if before.commit and (before.commit, before.changes) == (after.commit, after.changes):
        return f"both runs are of commit {before.commit[:12]}, in which it cannot change"
    return "no golden is stored now" if golden is None else "the golden that is stored now is another one"


def _changed(before: tuple[float, ...], after: tuple[float, ...]) -> Iterable[tuple[float, float]]:
    return (numbers for numbers in zip(before, after, strict=False) if not same_number(*numbers))


def _losses(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.6g}" for value in values)
