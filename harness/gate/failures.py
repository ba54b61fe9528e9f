"""Reasons of verdicts: new, changed and remaining failures, and known faults that appeared or disappeared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks import divergence
from harness.gate.reason import Kind, Reason, Topic
from harness.gate.sides import Sides
from harness.result import CaseResult
from harness.verdict import Verdict


def failures(sides: Sides, *, strict: bool) -> Iterable[Reason]:
    """A reason for every case that the candidate ran and whose verdict is another matter than in the baseline."""
    for case in sides.candidate.results:
        if case.ran and case.verdict is not Verdict.INFRA:
            yield from _of_case(sides.before.get(case.case_id), case, strict=strict)


def _of_case(before: CaseResult | None, after: CaseResult, *, strict: bool) -> Iterable[Reason]:
    if before is not None and not before.ran:
        before = None
    if after.verdict is Verdict.KNOWN:
        yield from _known(before, after)
    elif after.good:
        yield from _good(before, after)
    elif before is not None and not before.good and before.verdict is not Verdict.INFRA:
        yield _failed_before(before, after, strict=strict)
    else:
        kind = Kind.UNEXPECTED_PASS if after.verdict is Verdict.UNEXPECTED_PASS else Kind.NEW_FAILURE
        yield _reason(kind, before, after, what=_first(after))


def _known(before: CaseResult | None, after: CaseResult) -> Iterable[Reason]:
    """A recorded fault that the case did not show before, or that explains why it failed before."""
    faults, gates = _faults(after), before is not None
    if before is not None and before.verdict is Verdict.KNOWN:
        faults = [name for name in faults if name not in _faults(before)]
    elif before is not None and before.verdict is not Verdict.PASSED:
        yield _reason(Kind.EXPLAINED, before, after, what=f"shows {', '.join(faults)}", gates=False, faults=faults)
        return
    if faults:
        yield _reason(Kind.KNOWN_FAULT, before, after, what=f"shows {', '.join(faults)}", gates=gates, faults=faults)


def _good(before: CaseResult | None, after: CaseResult) -> Iterable[Reason]:
    if before is None or before.verdict is Verdict.PASSED:
        return
    if before.verdict is Verdict.KNOWN:
        what = f"{', '.join(_faults(before))} does not show, and no record expects it"
        yield _reason(Kind.FAULT_GONE, before, after, what=what, gates=False, faults=_faults(before))
    else:
        yield _reason(Kind.FIXED, before, after, what=_first(before), gates=False)


def _failed_before(before: CaseResult, after: CaseResult, *, strict: bool) -> Reason:
    alike = (before.verdict, before.failure_signature) == (after.verdict, after.failure_signature)
    kind = Kind.STILL_FAILING if alike else Kind.OTHER_FAILURE
    return _reason(kind, before, after, what=_first(after), gates=strict or not alike)


def _reason(
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
        topics=(Topic.VERDICT,),
        faults=tuple(faults),
        signature="" if after.failure_signature is None else after.failure_signature.text,
    )


def _details(before: CaseResult | None, after: CaseResult) -> Iterable[str]:
    """The signature, the one before it where it is another, and the first operand that differs."""
    if after.failure_signature is not None:
        yield f"signature: {after.failure_signature.text}"
    was = None if before is None else before.failure_signature
    if was is not None and after.failure_signature is not None and was != after.failure_signature:
        yield f"before: {was.text}"
    diverged = next((each for each in after.findings if each.check == divergence.NAME), None)
    if diverged is not None:
        yield diverged.first_line


def _first(case: CaseResult) -> str:
    """The rule and the first line of the first finding, with its place where the sentence does not name it."""
    if not case.findings:
        return case.verdict.phrase
    finding = case.findings[0]
    where = f" [{finding.place}]" if finding.place else ""
    return f"{finding.rule}{where}: {finding.first_line}"


def _faults(case: CaseResult) -> list[str]:
    """The names of the recorded faults that a known case shows."""
    return (case.expectation or "a recorded fault").split(", ")
