"""Numbers that were stated before: by the target itself (`expect` of its module), or by a recorded signature.

A signature is for models that no formula describes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial

from msgspec.structs import replace

from harness.checks.check import Check, Witnesses
from harness.checks.findings import first_of_each, merge_ranks
from harness.checks.rule import Rule, Rules, Stage
from harness.evidence.signature import Signature, is_memory, seen_in
from harness.expect.expectations import Expectations
from harness.expect.saved_memory import describes
from harness.matrix.case import Case
from harness.trace import RankTrace, Run
from harness.trace.counts import Sent, Stated
from harness.verdict import Finding

_rule = Rules("stated", Stage.COLLECTIVES)
_SAYS = "not the {what} that expect() of {target} states"
_FIX = "if what was found is right, return it from expect(); otherwise the run is wrong."
MATMULS = _rule("matmuls", _SAYS, key=("what",), fix=_FIX)
SAVED = _rule("saved-bytes", _SAYS, stage=Stage.MEMORY, key=("what",), fix=_FIX)
TRAFFIC = _rule("traffic", _SAYS, key=("what",), fix=_FIX)

_NOTHING = Sent(calls=0, payload_bytes=0)


@partial(
    Check,
    declares=_rule,
    blind="Whatever `expect` of the target does not state.",
    records=("saved_memory", "traffic"),
    unasked="stated",
    absent="the target states nothing of the case: its module has no `expect`, or that returns nothing",
)
def check_stated(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does every rank do what the target itself states of the case?

    For every number that is stated the first step in which it is another. What is not stated is free.
    """
    return merge_ranks(run, lambda trace: first_of_each(_other_than_stated(case, trace)))


def _other_than_stated(case: Case, trace: RankTrace) -> Iterator[Finding]:
    for stated in trace.stated or ():
        for rule, quantity, expected, found in _compared(stated, trace):
            if expected != found:
                yield rule.finding(what=quantity, target=case.target, step=stated.step, expected=expected, found=found)


def _compared(stated: Stated, trace: RankTrace) -> Iterator[tuple[Rule, str, str, str]]:
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
    for words, wanted in stated.traffic.items():
        found = _text(sent.get(words, _NOTHING)) + _instead(words, sent)
        yield TRAFFIC, f"number or size of {words}", _text(wanted), found


def _sent(trace: RankTrace, step: int) -> Mapping[str, Sent]:
    total: defaultdict[str, Sent] = defaultdict(lambda: _NOTHING)
    for record in trace.traffic or ():
        if record.step == step:
            calls = total[record.words].calls + sum(record.sizes.values())
            payload_bytes = total[record.words].payload_bytes + record.payload_bytes
            total[record.words] = Sent(calls=calls, payload_bytes=payload_bytes)
    return total


def _text(sent: Sent) -> str:
    return f"{sent.calls} with {sent.payload_bytes} bytes"


def _instead(words: str, sent: Mapping[str, Sent]) -> str:
    """What else was sent of this kind, where there is nothing in these words: they may be misspelled."""
    kind = words.partition(" ")[0]
    others = [other for other in sent if other.partition(" ")[0] == kind]
    return "" if words in sent or not others else f", but {_text(sent[others[0]])} of {others[0]}"


# Signatures

_signature = Rules("signature", Stage.COLLECTIVES)
UNRECORDABLE = _signature("unrecordable", "{problem}", stage=Stage.RUN)
_NOT_RECORDED = "not the recorded number or size of {what}"
EXECUTED = _signature("executed", _NOT_RECORDED, key=("what",))
MEMORY = _signature("memory", _NOT_RECORDED, stage=Stage.MEMORY, key=("what",))


def _no_signature(expect: Expectations, device: str) -> str:
    if expect.has_formulas:
        return "formulas say what the model sends, multiplies and keeps"
    return "" if describes(device) else "signatures are recorded on the virtual device"


@partial(
    Check,
    declares=_signature,
    blind="What was wrong already when it was recorded.",
    not_judged=_no_signature,
    records=("traffic", "saved_memory"),
    also_reads=("operands", "graphs"),
    needs_signature=True,
)
def check_signature(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does every rank do what it did when the signature of the case was recorded?

    The first finding names the command by which a change that is intended is recorded.
    """
    signature = witnesses.signature
    assert signature is not None, "without a signature the check is not executed"
    findings = merge_ranks(run, lambda trace: first_of_each(_other_than_recorded(case, signature, trace)))
    note = f"if it is intended, `{witnesses.update_signature}` records it"
    return [*(replace(first, notes=(note,)) for first in findings[:1]), *findings[1:]]


def _other_than_recorded(case: Case, signature: Signature, trace: RankTrace) -> Iterator[Finding]:
    recorded = {record.step for records in (trace.traffic, trace.saved_memory) for record in records or ()}
    for step in sorted({*range(1, case.train.steps + 1), *recorded}):
        expected, found = signature.seen(step=step, rank=trace.rank), seen_in(trace, step)
        for kind in dict.fromkeys((*expected, *found)):
            wanted, got = expected.get(kind, "none"), found.get(kind, "none")
            if wanted != got:
                rule = MEMORY if is_memory(kind) else EXECUTED
                yield rule.finding(what=kind, step=step, expected=f"{wanted}, as recorded", found=got)
