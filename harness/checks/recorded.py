"""What explains a failure from outside of the run: records of known faults, and formulas that are not verified here.

A failure is `known` when every record that affects the case shows itself (each finding that it requires is there, where
its check was executed), and every finding is explained by one of them: the right check, words, module, and not larger
than recorded. A case that passes although a fault is recorded for it is `unexpected_pass`. Everything else keeps its
verdict: the findings that no record explains come first, and what the records miss is added at the end.

A formula is evaluated with every version. With versions that it was verified with, a disagreement is a fault. With
others a case with no other findings is `changed`: not good, and nothing proves that it is wrong.
"""

import datetime
import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from harness.checks.catalogue import GONE, KNOWN, MISSING, OTHER_END, OUTDATED, RULES, UNEXPLAINED
from harness.checks.judge import Judgement
from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.records import KnownFault
from harness.verdict import Finding, Verdict

_STOPS = (Verdict.CRASH, Verdict.HANG)


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


def with_known_faults(judgement: Judgement, faults: Sequence[KnownFault], today: datetime.date) -> Judgement:
    """The judgement in the light of the records that affect the case; an infrastructure failure stays what it is."""
    if not faults or judgement.verdict is Verdict.INFRA:
        return judgement
    if judgement.verdict is Verdict.PASSED:
        gone = (
            GONE.finding(fault=fault.name, link=fault.link, expected=fault.verdict.value, found="passed")
            for fault in faults
        )
        return replace(judgement, verdict=Verdict.UNEXPECTED_PASS, findings=tuple(gone))
    unexplained = [finding for finding in judgement.findings if not any(fault.explains(finding) for fault in faults)]
    notes = (*_notes(judgement, faults, today), *_beyond(unexplained, faults))
    if judgement.findings and not notes:
        known = tuple(map(_known_everywhere, (fault for fault in faults if fault.everywhere)))
        return replace(judgement, verdict=Verdict.KNOWN, findings=(*known, *judgement.findings))
    explained = [finding for finding in judgement.findings if finding not in unexplained]
    return replace(judgement, findings=(*unexplained, *explained, *notes))


def _known_everywhere(fault: KnownFault) -> Finding:
    """The finding that names a fault recorded by the package: users of the project did not write the record."""
    finding = KNOWN.finding(fault=fault.name, reason=fault.reason, link=fault.link)
    return replace(finding, verdict=fault.verdict)


def _beyond(unexplained: Sequence[Finding], faults: Sequence[KnownFault]) -> Iterator[Finding]:
    if unexplained:
        names = " and ".join(fault.name for fault in faults)
        rules = ", ".join(dict.fromkeys(finding.rule for finding in unexplained))
        yield UNEXPLAINED.finding(count=len(unexplained), faults=names, rules=rules)


def _notes(judgement: Judgement, faults: Sequence[KnownFault], today: datetime.date) -> Iterator[Finding]:
    """Why the failure is not the recorded one, apart from findings that no record explains."""
    skipped = {not_judged.check for not_judged in judgement.not_judged} - set(judgement.checks)
    stopped = any(fault.verdict in _STOPS and fault.shows(judgement.findings) for fault in faults)
    for fault in faults:
        if stopped and fault.verdict not in _STOPS:
            continue  # a run that was stopped by a recorded fault shows no other
        for symptom in fault.requires:
            if symptom.check not in skipped and not any(symptom.explains(finding) for finding in judgement.findings):
                yield MISSING.finding(fault=fault.name, expected=str(symptom), found="none")
        if fault.review_by < today:
            day = str(fault.review_by)
            yield OUTDATED.finding(fault=fault.name, day=day, expected="a later review_by, or no record", found=day)
    recorded = sorted({fault.verdict.value for fault in faults})
    if judgement.verdict.value not in recorded:
        yield OTHER_END.finding(expected=" or ".join(recorded), found=judgement.verdict.value)


def with_doubts(judgement: Judgement, doubts: Mapping[str, str]) -> Judgement:
    """The judgement with a note at every finding by a formula in `doubts`: the formulas not verified here, and why."""
    findings = tuple(
        replace(finding, differs=doubts.get(finding.formula, finding.differs)) for finding in judgement.findings
    )
    only_doubted = judgement.verdict is Verdict.INVARIANT and all(finding.differs for finding in findings)
    return replace(judgement, verdict=Verdict.CHANGED if only_doubted else judgement.verdict, findings=findings)
