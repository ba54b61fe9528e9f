"""Does every rank do what the target itself states of the case? Recorded numbers against `expect` of its module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from harness.checks.check import Check
from harness.checks.ranks import first_of_each, merge_ranks, missing_records
from harness.checks.rule import Rule, Rules, Stage
from harness.checks.witnesses import Witnesses
from harness.matrix.case import Case
from harness.trace import RankTrace, Run
from harness.trace.counts import Sent, Stated
from harness.verdict import Finding

NAME = "stated"

_rule = Rules("stated")
NO_RECORD = _rule.no_record()
_SAYS = "not the {what} that expect() of {target} states"
_FIX = "if what was found is right, return it from expect(); otherwise the run is wrong."
MATMULS = _rule("matmuls", Stage.COLLECTIVES, _SAYS, key=("what",), fix=_FIX)
SAVED = _rule("saved-bytes", Stage.MEMORY, _SAYS, key=("what",), fix=_FIX)
TRAFFIC = _rule("traffic", Stage.COLLECTIVES, _SAYS, key=("what",), fix=_FIX)

_NOTHING = Sent(calls=0, payload_bytes=0)


def check_stated(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """For every number that is stated the first step in which it is another. What is not stated is free."""
    absent = [finding for record in ("traffic", "saved_memory") for finding in missing_records(run, NO_RECORD, record)]
    return absent or merge_ranks(run, lambda trace: first_of_each(_differences(case, trace)))


def _differences(case: Case, trace: RankTrace) -> Iterator[Finding]:
    for stated in trace.stated or ():
        for rule, what, expected, found in _compared(stated, trace):
            if expected != found:
                yield rule.finding(what=what, target=case.target, step=stated.step, expected=expected, found=found)


def _compared(stated: Stated, trace: RankTrace) -> Iterator[tuple[Rule, str, str, str]]:
    """The rule for what is stated of a step, what it is, the number that is stated, and the one that was recorded."""
    if stated.matmuls is not None:
        calls = sum(step.scaled_mm_calls for step in trace.steps if step.step == stated.step)
        yield MATMULS, "number of scaled matmuls", str(stated.matmuls), str(calls)
    saved = Counter[str]()
    for record in trace.saved_memory or ():
        if record.step == stated.step:
            saved.update(record.by_dtype)
    for dtype, count in stated.saved_bytes.items():
        yield SAVED, f"number of {dtype} bytes saved for backward", str(count), str(saved[dtype])
    sent = _sent(trace, stated.step)
    for words, each in stated.traffic.items():
        found = _text(sent.get(words, _NOTHING)) + _instead(words, sent)
        yield TRAFFIC, f"number or size of {words}", _text(each), found


def _sent(trace: RankTrace, step: int) -> Mapping[str, Sent]:
    """What one rank sent in one step, by the words of every kind."""
    total: defaultdict[str, Sent] = defaultdict(lambda: _NOTHING)
    for record in trace.traffic or ():
        if record.step == step:
            before = total[record.words]
            total[record.words] = Sent(
                calls=before.calls + sum(record.sizes.values()),
                payload_bytes=before.payload_bytes + record.payload_bytes,
            )
    return total


def _text(sent: Sent) -> str:
    return f"{sent.calls} with {sent.payload_bytes} bytes"


def _instead(words: str, sent: Mapping[str, Sent]) -> str:
    """What else was sent of this kind, where there is nothing in these words: they may be misspelled."""
    kind = words.partition(" ")[0]
    others = [other for other in sent if other.partition(" ")[0] == kind]
    return "" if words in sent or not others else f", but {_text(sent[others[0]])} of {others[0]}"


CHECK = Check(
    name=NAME,
    question="Does every rank do what the target itself states of the case?",
    blind="Whatever `expect` of the target does not state.",
    function=check_stated,
    rules=_rule.declared,
    record="stated",
    also_reads=("saved_memory", "traffic"),
    absent="the target states nothing of the case: its module has no `expect`, or that returns nothing",
)
