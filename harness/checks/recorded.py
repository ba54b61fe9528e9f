"""What records of known faults explain of a failure. See `harness/matrix/known.py`.

A failure is `known` when every record that affects the case shows itself (each finding that it requires is there, where
its check was executed), and every finding is explained by one of them: the right check, words, module, and not larger
than recorded. A case that passes although a fault is recorded for it is `unexpected_pass`. Everything else keeps its
verdict: the findings that no record explains come first, and what the records miss is added at the end.
"""

from __future__ import annotations

import datetime
import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from harness.checks.catalogue import RULES
from harness.checks.judge import Judgement
from harness.checks.rule import Rules, Stage
from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.known import KnownFault
from harness.verdict import Finding, Verdict

_rule = Rules("judge")
KNOWN = _rule("known", Stage.RUN, "known fault {fault}: {reason} ({link})")
GONE = _rule("gone", Stage.RUN, "passed although the fault {fault} ({link}) is recorded for it: close the record")
UNEXPLAINED = _rule(
    "unexplained", Stage.RUN, "{first} not explained by the record of {faults}: another fault, or a larger effect"
)
MISSING = _rule("missing", Stage.RUN, "the recorded fault {fault} does not show as recorded: a finding is missing")
OUTDATED = _rule(
    "outdated", Stage.RUN, "the record of {fault} was to be reviewed by {day}: it explains nothing any more"
)
OTHER_END = _rule("other-end", Stage.RUN, "the case ended otherwise than recorded")


def require_rules(faults: Iterable[KnownFault]) -> None:
    """Raise HarnessError for a record that names a rule no check has: it would explain nothing, and say nothing."""
    for fault in faults:
        for symptom in (*fault.requires, *fault.may_cause):
            if not fnmatch.filter(RULES, symptom.rule):
                near = difflib.get_close_matches(symptom.rule, RULES, n=2)
                what, where = f"no check has the rule '{symptom.rule}'.", f"cases/known.toml, fault {fault.name}"
                fix = f"did you mean {' or '.join(near)}?" if near else "see `fp8-harness explain --checks`."
                raise HarnessError(what, where=where, fix=fix)


def showing(faults: Iterable[KnownFault], case: Case, findings: Sequence[Finding]) -> Iterator[KnownFault]:
    """The records that must show in a case, and of the others those that do."""
    return (fault for fault in faults if fault.must_show(case) or fault.shows(findings))


def with_known_faults(found: Judgement, faults: Sequence[KnownFault], today: datetime.date) -> Judgement:
    """The judgement in the light of the records that affect the case; an infrastructure failure stays what it is."""
    if not faults or found.verdict is Verdict.INFRA:
        return found
    if found.verdict is Verdict.PASSED:
        return msgspec.structs.replace(found, verdict=Verdict.UNEXPECTED_PASS, findings=tuple(map(_gone, faults)))
    unexplained = [each for each in found.findings if not any(fault.explains(each) for fault in faults)]
    notes = (*_notes(found, faults, today), *_beyond(len(unexplained), faults))
    if found.findings and not notes:
        told = tuple(map(_known_everywhere, (fault for fault in faults if fault.everywhere)))
        return msgspec.structs.replace(found, verdict=Verdict.KNOWN, findings=(*told, *found.findings))
    explained = [each for each in found.findings if each not in unexplained]
    return msgspec.structs.replace(found, findings=(*unexplained, *explained, *notes))


def _known_everywhere(fault: KnownFault) -> Finding:
    """The finding that names a fault recorded by the package: users of the project did not write the record."""
    told = KNOWN.finding(fault=fault.name, reason=fault.reason, link=fault.link)
    return msgspec.structs.replace(told, verdict=fault.verdict)


def _gone(fault: KnownFault) -> Finding:
    return GONE.finding(fault=fault.name, link=fault.link, expected=fault.verdict.value, found="passed")


def _beyond(unexplained: int, faults: Sequence[KnownFault]) -> Iterator[Finding]:
    """Which findings the records do not explain: the first, of which there are so many."""
    if unexplained:
        names = " and ".join(fault.name for fault in faults)
        first = "the first finding is" if unexplained == 1 else f"the first {unexplained} findings are"
        yield UNEXPLAINED.finding(first=first, faults=names)


def _notes(found: Judgement, faults: Sequence[KnownFault], today: datetime.date) -> Iterator[Finding]:
    """Why the failure is not the recorded one, apart from findings that no record explains."""
    skipped = {each.check for each in found.not_judged} - set(found.checks)
    for fault in faults:
        for symptom in fault.requires:
            if symptom.check not in skipped and not any(symptom.explains(finding) for finding in found.findings):
                yield MISSING.finding(fault=fault.name, expected=str(symptom), found="none")
        if fault.review_by < today:
            day = str(fault.review_by)
            yield OUTDATED.finding(fault=fault.name, day=day, expected="a later review_by, or no record", found=day)
    recorded = sorted({fault.verdict.value for fault in faults})
    if found.verdict.value not in recorded:
        yield OTHER_END.finding(expected=" or ".join(recorded), found=found.verdict.value)
