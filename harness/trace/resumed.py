"""What became of the state of a run that was saved in its middle and loaded. Recorded by `worker/resuming.py`.

The state has a value for every parameter, for everything that an optimizer keeps of it, and for its options: dtype,
shape and digest of the whole tensor, whatever its layout, or the value itself.
"""

from __future__ import annotations

from harness.trace.record import Record

State = dict[str, str]  # "norm.weight", "norm.weight exp_avg", "norm.weight lr"


class Resumed(Record, frozen=True, kw_only=True):
    """The state that was saved, and the one of every target that loaded it; the last of these trains on."""

    after_step: int
    saved: State
    loaded: tuple[State, ...]
