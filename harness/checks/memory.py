"""Does every rank save the expected bytes for its backward pass? Saved memory against `expect/saved_memory.py`.

In compiled runs against `expect/compiled_memory.py`, and against the marks of checkpointing in the graphs: what is to
be computed again must not be saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec

from harness.checks.ranks import merge_ranks, missing_records
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import SAVED_MEMORY, Expectations
from harness.expect.records import has_memory_formula
from harness.matrix.case import Case, Checkpointing, CheckpointMode
from harness.plural import counted
from harness.trace import RankTrace, Run
from harness.verdict import Finding

NAME = "memory"
MODES: tuple[CheckpointMode, ...] = ("none", "full", "selective_op", "selective_layer")


_COMPUTED_AGAIN = (
    "result that checkpointing computes again is",
    "results that checkpointing computes again are",
)

_finding = partial(Finding, check=NAME)


def check_memory(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """A finding for every dtype with a wrong number of saved bytes, and for ranks that recorded none.

    Of compiled blocks also one for results that are saved against the marks of checkpointing, and for lost marks.
    """
    if case.compile != "none" and run.traces:
        absent = missing_records(run, NAME, "graphs")
        if absent:
            return absent
    return missing_records(run, NAME, "saved_memory") or merge_ranks(
        run, lambda trace: list(_findings(witnesses.expect, trace))
    )


def _findings(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    if expect.case.compile != "none":
        yield from _against_marks(expect.case, trace)
    if not has_memory_formula(trace.device):
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
        yield _finding(
            message="the graphs of the blocks do not have the marks of checkpointing",
            expected=_marks(expected),
            found=_marks(found),
        )
    kept = [tensor for partition in partitions for tensor in partition.kept]
    if kept:
        most = max(kept, key=lambda tensor: tensor.nbytes)
        yield _finding(
            message=f"{counted(len(kept), *_COMPUTED_AGAIN)} saved for backward",
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
            much = "too few" if found < limits.least else "too many"
            yield _finding(
                message=f"compiled blocks save {much} bytes for backward",
                step=step,
                expected=f"{limits.least} to {limits.most} bytes",
                found=f"{found} bytes",
                formula=SAVED_MEMORY,
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
                first[dtype] = Finding(
                    check=NAME,
                    message=_headline(expect, step, trace.rank, dtype, found),
                    step=step,
                    expected=f"{expected.get(dtype, 0)} bytes",
                    found=f"{found.get(dtype, 0)} bytes",
                    formula=SAVED_MEMORY,
                )
    return list(first.values())


def _headline(expect: Expectations, step: int, rank: int, dtype: str, found: dict[str, int]) -> str:
    """What is wrong, with the likely cause when the bytes show one."""
    mode_of_case = expect.case.checkpointing.mode
    for mode in MODES:
        other = Expectations(msgspec.structs.replace(expect.case, checkpointing=Checkpointing(mode=mode)))
        if mode != mode_of_case and other.saves_exactly and other.saved_bytes(step=step, rank=rank) == found:
            return f"saved memory is that of checkpointing {mode}, not {mode_of_case}: wrong number of {dtype} bytes"
    if dtype.startswith("float8") and found.get(dtype, 0) > expect.saved_bytes(step=step, rank=rank).get(dtype, 0):
        return f"float8 tensors outlive the forward pass: too many {dtype} bytes saved for backward"
    return f"wrong number of {dtype} bytes saved for backward"
