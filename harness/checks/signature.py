"""Recorded signatures: what a run of a case sent, multiplied and kept, for models that no formula describes."""

from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace

from harness.checks.check import Check, Witnesses
from harness.checks.findings import first_of_each, merge_ranks
from harness.checks.rule import Rules, Stage
from harness.evidence.signature import Signature, is_memory, seen_in
from harness.expect.expectations import Expectations
from harness.expect.saved_memory import describes
from harness.matrix.case import Case
from harness.trace import RankTrace, Run
from harness.verdict import Finding

_rule = Rules("signature", Stage.COLLECTIVES)
UNRECORDABLE = _rule("unrecordable", "{problem}", stage=Stage.RUN)
_SAYS = "not the recorded number or size of {what}"
EXECUTED = _rule("executed", _SAYS, key=("what",))
MEMORY = _rule("memory", _SAYS, stage=Stage.MEMORY, key=("what",))


def _no_signature(expect: Expectations, device: str) -> str:
    if expect.has_formulas:
        return "formulas say what the model sends, multiplies and keeps"
    return "" if describes(device) else "signatures are recorded on the virtual device"


@partial(
    Check,
    declares=_rule,
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
