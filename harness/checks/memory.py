"""Does every rank save the expected bytes for its backward pass? Saved memory against `expect/saved_memory.py`.

In compiled runs against `expect/compiled_memory.py`, and against the marks of checkpointing in the graphs: what is to
be computed again must not be saved.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.checks.check import Check
from harness.checks.ranks import merge_ranks, missing_records
from harness.checks.rule import Rules, Stage
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import SAVED_MEMORY, Expectations
from harness.expect.saved_memory import NOT_OF_THIS_DEVICE, describes
from harness.matrix.case import Case, Checkpointing, CheckpointMode
from harness.matrix.targets import OF_DTENSOR, computes_on_plain_shards
from harness.trace import RankTrace, Run
from harness.trace.counts import SAVED_BYTES
from harness.verdict import Finding

NAME = "memory"
MODES: tuple[CheckpointMode, ...] = ("none", "full", "selective_op", "selective_layer")


_rule = Rules("memory")
NO_RECORD = _rule.no_record()
NO_MARKS = _rule("no-marks", Stage.MODEL, "the graphs of the blocks do not have the marks of checkpointing")
KEPT = _rule(
    "kept",
    Stage.MEMORY,
    "{count:n result that checkpointing computes again is|results that checkpointing computes again are} saved "
    "for backward",
)
LIMITS = _rule(
    "limits", Stage.MEMORY, "compiled blocks save {much} bytes for backward", key=("much",), formula=SAVED_MEMORY
)
OTHER_MODE = _rule(
    "other-checkpointing",
    Stage.MODEL,
    "saved memory is that of checkpointing {mode}, not {asked}: wrong number of {dtype} bytes",
    key=("mode", "asked"),
    formula=SAVED_MEMORY,
)
OUTLIVES = _rule(
    "float8-outlives-forward",
    Stage.MEMORY,
    "float8 tensors outlive the forward pass: too many {dtype} bytes saved for backward",
    key=("dtype",),
    formula=SAVED_MEMORY,
)
BYTES = _rule(
    "bytes", Stage.MEMORY, "wrong number of {dtype} bytes saved for backward", key=("dtype",), formula=SAVED_MEMORY
)


def check_memory(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """A finding for every dtype with a wrong number of saved bytes, and for ranks that recorded none.

    Of compiled blocks also one for results that are saved against the marks of checkpointing, and for lost marks.
    """
    if case.compile != "none" and run.traces:
        absent = missing_records(run, NO_RECORD, "graphs")
        if absent:
            return absent
    return missing_records(run, NO_RECORD, "saved_memory") or merge_ranks(
        run, lambda trace: list(_findings(witnesses.expect, trace))
    )


def _findings(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    if expect.case.compile != "none":
        yield from _against_marks(expect.case, trace)
    if not describes(trace.device):
        return
    if expect.saves_exactly:
        yield from _first_mismatches(expect, trace)
    else:
        yield from _beyond_limits(expect, trace)


def _against_marks(case: Case, trace: RankTrace) -> Iterator[Finding]:
    """What the partitioner made of the marks of checkpointing."""
    partitions = trace.graphs.partitions if trace.graphs is not None else ()
    expected = {case.checkpointing.wraps(layer) for layer in range(case.model.shape.layers)}
    found = {partition.marked > 0 for partition in partitions}
    if found != expected:
        yield NO_MARKS.finding(expected=_marks(expected), found=_marks(found))
    kept = [tensor for partition in partitions for tensor in partition.kept]
    if kept:
        most = max(kept, key=lambda tensor: tensor.nbytes)
        yield KEPT.finding(
            count=len(kept),
            expected="none of them is saved",
            found=f"{most.operator} {most.node}, {most.dtype}{list(most.shape)}, is the largest",
        )


def _marks(found: set[bool]) -> str:
    words = {True: "graphs with operators to compute again", False: "graphs without"}
    return " and ".join(words[each] for each in sorted(found, reverse=True)) or "no graphs"


def _beyond_limits(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    """The first step in which more or less is saved than any choice of the partitioner explains."""
    recorded = {record.step: record.saved_bytes for record in trace.saved_memory or ()}
    for step in sorted({*range(1, expect.case.train.steps + 1), *recorded}):
        limits, found = expect.saved_limits(step=step, rank=trace.rank), recorded.get(step, 0)
        if not limits.least <= found <= limits.most:
            yield LIMITS.finding(
                much="too few" if found < limits.least else "too many",
                step=step,
                expected=f"{limits.least} to {limits.most} bytes",
                found=f"{found} bytes",
            )
            return


def _first_mismatches(expect: Expectations, trace: RankTrace) -> list[Finding]:
    """For every dtype the first step with wrong bytes."""
    first: dict[str, Finding] = {}
    recorded = {record.step: record.by_dtype for record in trace.saved_memory or ()}
    for step in sorted({*range(1, expect.case.train.steps + 1), *recorded}):
        expected, found = expect.saved_bytes(step=step, rank=trace.rank), recorded.get(step, {})
        for dtype in sorted(expected.keys() | found.keys()):
            if expected.get(dtype, 0) != found.get(dtype, 0) and dtype not in first:
                first[dtype] = _of_dtype(expect, step, trace.rank, dtype, found)
    return list(first.values())


def _of_dtype(expect: Expectations, step: int, rank: int, dtype: str, found: dict[str, int]) -> Finding:
    """What is wrong, by the likely cause when the bytes show one."""
    mode_of_case = expect.case.checkpointing.mode
    wanted, got = expect.saved_bytes(step=step, rank=rank).get(dtype, 0), found.get(dtype, 0)
    expected, got_text = f"{wanted} bytes", f"{got} bytes"
    for mode in MODES:
        other = Expectations(msgspec.structs.replace(expect.case, checkpointing=Checkpointing(mode=mode)))
        if mode != mode_of_case and other.saves_exactly and other.saved_bytes(step=step, rank=rank) == found:
            return OTHER_MODE.finding(
                step=step, expected=expected, found=got_text, mode=mode, asked=mode_of_case, dtype=dtype
            )
    rule = OUTLIVES if dtype.startswith("float8") and got > wanted else BYTES
    return rule.finding(step=step, expected=expected, found=got_text, dtype=dtype)


def _not_judged(expect: Expectations, device: str) -> str:
    if not expect.has_formulas:
        return f"no formula for the model of {expect.case.target}; {expect.judged_instead(SAVED_BYTES)}"
    if computes_on_plain_shards(expect.case.target):
        return f"{OF_DTENSOR}: {expect.case.target} saves and keeps other tensors"
    return "" if describes(device) or expect.case.compile != "none" else NOT_OF_THIS_DEVICE


def _partly(expect: Expectations, device: str) -> str:
    compiled = expect.case.compile != "none"
    return f"the number of bytes: {NOT_OF_THIS_DEVICE}" if compiled and not describes(device) else ""


CHECK = Check(
    name=NAME,
    question="Does every rank save the expected bytes for its backward pass?",
    blind="Tensors of the right size with other values; what is kept outside of autograd, which `live_memory` counts.",
    function=check_memory,
    rules=_rule.declared,
    not_judged=_not_judged,
    partly=_partly,
    record="saved_memory",
    formula=SAVED_MEMORY,
)
