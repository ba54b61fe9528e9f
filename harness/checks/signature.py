"""Does every rank do what it did when the signature of the case was recorded? For models that no formula describes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.checks.ranks import first_of_each, merge_ranks, missing_records
from harness.checks.witnesses import Witnesses
from harness.evidence.signature import Signature, seen_in
from harness.matrix.case import Case
from harness.trace import RankTrace, Run
from harness.verdict import Finding

NAME = "signature"


def check_signature(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """For every kind of collective, matmul, memory and fusion the first step in which ranks do otherwise than recorded.

    The first finding names the command by which a change that is intended is recorded.
    """
    signature = witnesses.signature
    assert signature is not None, "without a signature the check is not executed"
    absent = [finding for record in ("traffic", "saved_memory") for finding in missing_records(run, NAME, record)]
    found = absent or merge_ranks(run, lambda trace: first_of_each(_differences(case, signature, trace)))
    if not found or absent:
        return found
    first = f"{found[0].message}; if it is intended, `{witnesses.update_signature}` records it"
    return [msgspec.structs.replace(found[0], message=first), *found[1:]]


def _differences(case: Case, signature: Signature, trace: RankTrace) -> Iterator[Finding]:
    recorded = {record.step for records in (trace.traffic, trace.saved_memory) for record in records or ()}
    for step in sorted({*range(1, case.train.steps + 1), *recorded}):
        expected, found = signature.seen(step=step, rank=trace.rank), seen_in(trace, step)
        for what in dict.fromkeys((*expected, *found)):
            if expected.get(what) != found.get(what):
                yield Finding(
                    check=NAME,
                    message=f"not the recorded number or size of {what}",
                    step=step,
                    expected=f"{expected.get(what, 'none')}, as recorded",
                    found=found.get(what, "none"),
                )
