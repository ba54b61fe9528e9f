"""The process of a rank: what was put into torch for all of its life, and what goes on in it at the moment.

Whatever the worker keeps for a whole process is in `PROCESS`, except what docs/architecture.md lists with its reason.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from harness.matrix.case import Case
from harness.trace.model import StateChange

_SETTINGS: Mapping[str, Callable[[], object]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "gradients": torch.is_grad_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "threads": torch.get_num_threads,
}


class Settings:
    """Settings of torch that a target leaves changed: those that changed between calls of `record_changes`.

    A changed default dtype, for example, applies to every tensor that the harness or a library creates from then on. A
    forked rank inherits what was recorded before.
    """

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


class Phase:
    """What this rank does, as the engine learns it: where a run hangs, it is the last thing that is known."""

    def __init__(self) -> None:
        self._now = ""
        self.report: Callable[[str], None] = lambda _: None

    def begin(self, phase: str) -> None:
        self._now = phase
        self.report(phase)

    @contextlib.contextmanager
    def within(self, activity: str) -> Iterator[None]:
        """While in it, `activity` goes on in the phase that began last. It is not left by an exception."""
        self.report(f"{self._now}, {activity}")
        yield
        self.report(self._now)


class Process:
    """The record of one process. Ranks inherit that of the process from which they are forked."""

    def __init__(self) -> None:
        # By name, all that was installed: torch drops a registration when its Library object is collected.
        self._installed: dict[str, tuple[torch.library.Library, ...]] = {}
        self.remarks: tuple[str, ...] = ()  # at the start of a run
        self.workarounds: list[str] = []  # names of those that compiled graphs have used
        self.settings = Settings()
        self.phase = Phase()
        self.share_metas: Callable[[], None] = lambda: None  # with the ranks of the fork server that this one is from
        self.unobserved = 0  # how many contexts are entered in which hooks call no observer
        self.evaluating = False  # a forward pass of a target without a backward: probes of training ignore it
        self.step = 0  # that a script trains, where no case is run
        # Called with case and model where a script, and no target, has built one that is about to train.
        self.followers: list[Callable[[Case, nn.Module], object]] = []
        self.computes_for_all = False  # experts run once more, for the weight gradients of several ranks

    def keep(self, name: str, *libraries: torch.library.Library) -> None:
        """Note what was installed, and keep its registrations alive."""
        self._installed[name] = (*self._installed.get(name, ()), *libraries)

    def take_back(self, name: str) -> None:
        """Restore the kernels that the registrations of this name had overridden. What is not installed stays so."""
        for library in self._installed.pop(name, ()):
            library._destroy()

    def has(self, name: str) -> bool:
        return name in self._installed

    @property
    def installed(self) -> tuple[str, ...]:
        """Return the sorted names of all that was installed."""
        return tuple(sorted(self._installed))


def in_backward() -> bool:
    """Return True while autograd runs backward, including the recomputation of a forward."""
    return torch._C._current_graph_task_id() != -1


PROCESS = Process()
