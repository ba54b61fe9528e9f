"""Does every rank save the expected bytes for its backward pass? Saved memory against `expect/saved_memory.py`."""

from __future__ import annotations

import msgspec

from harness.checks.ranks import merge_ranks, missing_records
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import Expectations
from harness.matrix.case import Case, Checkpointing, CheckpointMode
from harness.trace import RankTrace, Run
from harness.verdict import Finding

NAME = "memory"
MODES: tuple[CheckpointMode, ...] = ("none", "full", "selective_op", "selective_layer")


def check_memory(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """A finding for every dtype with a wrong number of saved bytes, and for ranks that recorded none."""
    return missing_records(run, NAME, "saved_memory") or merge_ranks(
        run, lambda trace: _first_mismatches(witnesses.expect, trace)
    )


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
                )
    return list(first.values())


def _headline(expect: Expectations, step: int, rank: int, dtype: str, found: dict[str, int]) -> str:
    """What is wrong, with the likely cause when the bytes show one."""
    mode_of_case = expect.case.checkpointing.mode
    for mode in MODES:
        other = Expectations(msgspec.structs.replace(expect.case, checkpointing=Checkpointing(mode=mode)))
        if mode != mode_of_case and other.saved_bytes(step=step, rank=rank) == found:
            return f"saved memory is that of checkpointing {mode}, not {mode_of_case}: wrong number of {dtype} bytes"
    if dtype.startswith("float8") and found.get(dtype, 0) > expect.saved_bytes(step=step, rank=rank).get(dtype, 0):
        return f"float8 tensors outlive the forward pass: too many {dtype} bytes saved for backward"
    return f"wrong number of {dtype} bytes saved for backward"
