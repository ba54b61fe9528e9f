"""The signature of a failure: what stays the same on every rank and machine, and in every run of the case.

Of a crash that is the exception and the innermost calls of torch and torchao; of findings, the first one: its rule, the
values that tell failures of the rule apart, the kind of module, the operand and the direction. So two runs can be
compared, and so can a case and a smaller one.
"""

import re
from collections import Counter
from collections.abc import Sequence

from harness.checks.catalogue import RULES
from harness.checks.stacks import main_stack, place_of, raised_frames
from harness.trace import RankFailure, Run
from harness.verdict import FailureSignature, Finding, Verdict

_FRAMES = 3  # innermost calls that are kept
_LENGTH = 300  # characters of an exception that are kept
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a layer in a module's name
_STEP = re.compile(r"step (\d+)")
_RANKS = re.compile(r"\b(?:on )?ranks? \d+(?:(?:-|, | and )\d+)*\b")
_NUMBER = re.compile(r"(?<![A-Za-z_\d])[-+]?\d[\d.,]*(?:e[-+]?\d+)?(?:\*\*-?\d+)?(?![A-Za-z_\d])")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+|(?<!\w)/[\w./+-]+")
_PLURAL = re.compile(r"\b(N (?:\w+ )?\w+?)s? (?:is|are)\b")


def signature_of(verdict: Verdict, findings: Sequence[Finding], run: Run | None) -> FailureSignature | None:
    """The signature of a failure, of a recorded or expected one too; None where nothing failed or is found out."""
    if verdict in (Verdict.INFRA, Verdict.NOT_RUN):
        return None
    if run is not None and run.causes:
        return Counter(map(_of_rank, run.causes)).most_common(1)[0][0]  # of equally many, the lowest rank's
    judged = [finding for finding in findings if finding.judged]
    return _of_finding(judged[0]) if judged else None


def normalized(message: str) -> str:
    """The message of an exception without what differs from run to run: numbers, addresses, paths, plurals."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    text = _NUMBER.sub("N", _ADDRESS.sub("…", _RANKS.sub("RANKS", line)))
    return _PLURAL.sub(r"\1s are", text)[:_LENGTH].strip()


def _of_rank(failure: RankFailure) -> FailureSignature:
    match = _STEP.search(failure.phase)
    step = int(match[1]) if match else None
    if failure.kind == "stuck":
        place = place_of(main_stack(failure.traceback))
        return FailureSignature(
            kind="hang",
            what=place.collective if place is not None else "",
            where=() if place is None else tuple(f"{call.module}:{call.function}" for call in place.calls),
            first_step=step,
        )
    if failure.kind != "raised":
        return FailureSignature(kind="crash", what=f"{failure.kind}: {normalized(failure.message)}", first_step=step)
    frames = raised_frames(failure.traceback)[-_FRAMES:]
    calls = tuple(f"{call.module}:{call.function}" for call in frames)
    return FailureSignature(kind="crash", what=_unordered(normalized(failure.message)), where=calls, first_step=step)


def _unordered(message: str) -> str:
    """Which of the ranks that disagree about a collective reports first is chance."""
    head, separator, reports = message.partition("CollectiveMismatch: ranks of one process group disagree: ")
    return f"{head}{separator}{', '.join(sorted(reports.split(', ')))}" if separator else message


def _of_finding(finding: Finding) -> FailureSignature:
    rule = RULES.get(finding.rule)
    values = (str(finding.values.get(name, "")) for name in (rule.key if rule is not None else ()))
    located = rule is not None and rule.located and finding.module is not None
    where = (_INDEX.sub("*", finding.module or ""),) if located else ()
    return FailureSignature(
        kind=finding.rule,
        what=", ".join(value for value in values if value),
        where=(*where, *((_kind_of(finding.operand),) if finding.operand else ())),
        first_step=finding.step,
    )


def _kind_of(operand: str) -> str:
    """The operand without what differs from case to case, such as the shape of a cast in a graph."""
    return _NUMBER.sub("N", operand.partition(", [")[0])
