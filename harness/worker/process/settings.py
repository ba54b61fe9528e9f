"""Settings of torch that belong to the whole process: which of them a target leaves changed, and when.

A changed default dtype, for example, applies to every tensor that the harness or a library creates from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from harness.trace.model import StateChange

_SETTINGS: Mapping[str, Callable[[], object]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "gradients": torch.is_grad_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "threads": torch.get_num_threads,
}


class GlobalState:
    """The settings that changed between calls of `record_changes`. A forked rank inherits what was recorded before."""

    def __init__(self) -> None:
        self._last = _now()
        self.changes: list[StateChange] = []  # in the order in which they were found

    def restart(self) -> None:
        """Ignore what changed since the last call: the harness changed it."""
        self._last = _now()

    def record_changes(self, phase: str) -> None:
        now = _now()
        self.changes += [
            StateChange(name=name, phase=phase, before=self._last[name], after=value)
            for name, value in now.items()
            if value != self._last[name]
        ]
        self._last = now


def _now() -> dict[str, str]:
    return {name: str(setting()).removeprefix("torch.") for name, setting in _SETTINGS.items()}


STATE = GlobalState()  # of this process
