"""What the model of a run was really called with: which sequences of the tokens that the harness made.

Recorded by `worker/inputs.py`, where the forward of the whole model is called eagerly. Sequences are numbered in the
global batch of their step.
"""

from __future__ import annotations

from harness.trace.record import Record


class StepInputs(Record, frozen=True, kw_only=True):
    """The integer tensors that the model was called with in one step."""

    step: int
    inputs: tuple[int, ...]  # the sequences whose tokens it got, in the order of calls
    labels: tuple[int, ...]  # the sequences whose tokens it got shifted by one: they are what it must predict
    covered: float  # share of the neighbouring tokens that are meant for this rank, among all that the model got
    shapes: tuple[tuple[int, ...], ...]  # of the integer tensors


class StateChange(Record, frozen=True, kw_only=True):
    """A setting of torch, which belongs to the whole process, that the target left changed."""

    name: str  # "default dtype"
    phase: str  # after which it was found: "import", "build", "step 1"
    before: str
    after: str
