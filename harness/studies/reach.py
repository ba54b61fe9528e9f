"""Whether a planted fault reached a target: whether anything that a run records is another than without it.

A fault that reached nothing proves nothing about the checks, and one that raised while it was planted even less.
"""

from __future__ import annotations

import hashlib

import msgspec

from harness.trace import RankFailure, RankTrace, Run

_FAULTS = "harness/worker/faults/"
NO_EFFECT = "every loss, gradient, operand, transfer and saved byte is that of the clean run"


class FaultEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What distinguishes a run with a planted fault from the clean run."""

    digest: str  # of everything that the ranks recorded, but for time and memory of the process
    broken: str = ""  # what the code of the fault itself raised


def fault_effect(run: Run) -> FaultEffect:
    """The digest of all records of a run, and the error of the planted fault's own code, if any."""
    first = run.causes
    state = hashlib.sha256()
    for trace in run.traces if run.complete else ():
        state.update(msgspec.msgpack.encode(_comparable(trace)))
    for message in sorted({failure.message for failure in first}):
        state.update(message.encode())
    return FaultEffect(digest=state.hexdigest(), broken=next(filter(None, map(_raised_by_fault, first)), ""))


def _comparable(trace: RankTrace) -> RankTrace:
    steps = tuple(msgspec.structs.replace(step, seconds=0.0) for step in trace.steps)
    return msgspec.structs.replace(trace, steps=steps, peak_memory_bytes=0)


def _raised_by_fault(failure: RankFailure) -> str:
    """The error, if an exception of the traceback comes from the code of a fault; what that calls is not its code."""
    if failure.phase.startswith("injection "):
        return failure.message
    for exception in failure.traceback.split("Traceback (most recent call last):")[1:]:
        frames = [line for line in exception.splitlines() if line.startswith('  File "')]
        if frames and _FAULTS in frames[-1]:
            return next(line for line in exception.splitlines() if line and not line.startswith(" "))
    return ""
