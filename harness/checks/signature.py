"""Does every rank do what it did when the signature of the case was recorded? For models that no formula describes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.checks.check import Check
from harness.checks.ranks import first_of_each, merge_ranks, missing_records
from harness.checks.rule import Rules, Stage
from harness.checks.witnesses import Witnesses
from harness.evidence.signature import Signature, is_memory, seen_in
from harness.expect.expectations import Expectations
from harness.expect.saved_memory import describes
from harness.matrix.case import Case
from harness.trace import RankTrace, Run
from harness.verdict import Finding

NAME = "signature"

_rule = Rules("signature")
NO_RECORD = _rule.no_record()
UNRECORDABLE = _rule("unrecordable", Stage.RUN, "{problem}")
_SAYS = "not the recorded number or size of {what}"
EXECUTED = _rule("executed", Stage.COLLECTIVES, _SAYS, key=("what",))
MEMORY = _rule("memory", Stage.MEMORY, _SAYS, key=("what",))


def check_signature(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """For every kind of collective, matmul, memory and fusion the first step in which ranks do otherwise than recorded.

    The first finding names the command by which a change that is intended is recorded.
    """
    signature = witnesses.signature
    assert signature is not None, "without a signature the check is not executed"
    absent = [finding for record in ("traffic", "saved_memory") for finding in missing_records(run, NO_RECORD, record)]
    found = absent or merge_ranks(run, lambda trace: first_of_each(_differences(case, signature, trace)))
    if not found or absent:
        return found
    note = f"if it is intended, `{witnesses.update_signature}` records it"
    return [msgspec.structs.replace(found[0], notes=(note,)), *found[1:]]


def _differences(case: Case, signature: Signature, trace: RankTrace) -> Iterator[Finding]:
    recorded = {record.step for records in (trace.traffic, trace.saved_memory) for record in records or ()}
    for step in sorted({*range(1, case.train.steps + 1), *recorded}):
        expected, found = signature.seen(step=step, rank=trace.rank), seen_in(trace, step)
        for what in dict.fromkeys((*expected, *found)):
            if expected.get(what) != found.get(what):
                rule = MEMORY if is_memory(what) else EXECUTED
                yield rule.finding(
                    what=what,
                    step=step,
                    expected=f"{expected.get(what, 'none')}, as recorded",
                    found=found.get(what, "none"),
                )


def _not_judged(expect: Expectations, device: str) -> str:
    if expect.has_formulas:
        return "formulas say what the model sends, multiplies and keeps"
    return "" if describes(device) else "signatures are recorded on the virtual device"


CHECK = Check(
    name=NAME,
    question="Does every rank do what it did when the signature of the case was recorded?",
    blind="What was wrong already when it was recorded.",
    function=check_signature,
    rules=_rule.declared,
    not_judged=_not_judged,
    record="traffic",
    also_reads=("saved_memory", "operands", "graphs"),
    needs_signature=True,
)
