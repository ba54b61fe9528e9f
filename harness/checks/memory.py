"""Does every rank keep for its backward pass what its case must keep? Saved memory against `spec/saved.py`."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from harness.checks.ranks import by_value, rank_names
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case, Checkpointing, CheckpointMode
from harness.spec.saved import expected_saved
from harness.trace import RankTrace, Run
from harness.verdict import Finding

NAME = "memory"
MODES: tuple[CheckpointMode, ...] = ("none", "full", "selective_op", "selective_layer")


class _Difference(NamedTuple):
    """The first step in which the bytes of a dtype are off. `words` says what that looks like, if anything."""

    step: int
    dtype: str
    expected: int
    found: int
    words: str


def check_memory(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """A finding for every dtype of which a rank keeps other bytes than it must, and for steps without a record."""
    del witnesses  # the formula needs no other run
    silent = [trace.rank for trace in run.traces if trace.saved_memory is None]
    if silent or not run.traces:
        whom = rank_names(sorted(silent)) if silent else "any rank"
        return [
            Finding(check=NAME, message=f"no saved memory was recorded on {whom}", expected="a record of each step")
        ]
    return [
        Finding(
            check=NAME,
            message=f"{wrong.dtype} kept for backward is not what the case must keep on {rank_names(ranks)}"
            + (f": {wrong.words}" if wrong.words else ""),
            step=wrong.step,
            rank=ranks[0],
            expected=f"{wrong.expected} bytes",
            found=f"{wrong.found} bytes",
        )
        for group, ranks in by_value(run, lambda trace: _first_differences(case, trace)).items()
        for wrong in group
    ]


def _first_differences(case: Case, trace: RankTrace) -> tuple[_Difference, ...]:
    first: dict[str, _Difference] = {}
    recorded = {record.step: record.by_dtype for record in trace.saved_memory or ()}
    for step in sorted({*range(1, case.train.steps + 1), *recorded}):
        expected, found = expected_saved(case, step=step, rank=trace.rank), recorded.get(step, {})
        for dtype in sorted(expected.keys() | found.keys()):
            pair = expected.get(dtype, 0), found.get(dtype, 0)
            if pair[0] != pair[1] and dtype not in first:
                first[dtype] = _Difference(step, dtype, *pair, _in_words(case, step, trace.rank, dtype, found))
    return tuple(first.values())


def _in_words(case: Case, step: int, rank: int, dtype: str, found: dict[str, int]) -> str:
    """What the bytes that were found look like."""
    for mode in MODES:
        other = msgspec.structs.replace(case, checkpointing=Checkpointing(mode=mode))
        if mode != case.checkpointing.mode and expected_saved(other, step=step, rank=rank) == found:
            return f"it is what checkpointing {mode} keeps"
    if dtype.startswith("float8") and found.get(dtype, 0) > expected_saved(case, step=step, rank=rank).get(dtype, 0):
        return "float8 tensors outlive the forward pass, on top of the high-precision ones"
    return ""
