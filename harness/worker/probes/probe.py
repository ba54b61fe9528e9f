"""What a probe is, and the set of probes that watch one run. Probes never change a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

from harness.matrix.case import Case
from harness.worker.dispatch_hooks.hook import unobserved


class Probe:
    """Watches one run from before the model is built. A probe overrides the methods that it needs."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case = case
        self._step = 0  # 1-based; 0 before the first one
        self._installed = ExitStack()

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        self._installed.close()

    def install(self) -> None:
        """Install observers; `_installed` removes them."""

    def observe(self, observers: list[Any], observer: Any) -> None:
        """Add an observer, which `_installed` removes."""
        observers.append(observer)
        self._installed.callback(observers.remove, observer)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Put a value in the place of an attribute of a module or class, which `_installed` restores."""
        before = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
        self._installed.callback(setattr, owner, name, before)
        setattr(owner, name, value)

    def attach(self, model: nn.Module) -> None:
        """The model is built: converted, distributed, wrapped."""

    def begin_step(self, step: int) -> None:
        """Step `step` starts; nothing of it has run."""
        self._step = step

    def after_backward(self, model: nn.Module) -> None:
        """The gradients of this step are there, the optimizer has not run."""

    def after_update(self, model: nn.Module) -> None:
        """The optimizer and what follows it have run."""

    def result(self) -> Any:
        """What was recorded: the value of the field of `RankTrace` that has this probe's name."""
        raise NotImplementedError


ProbeFactory = Callable[[Case, torch.device], Probe]


class ProbeSet:
    """Several probes as one context; `results` are keyed by the names of `factories`."""

    def __init__(self, factories: Mapping[str, ProbeFactory], case: Case, device: torch.device) -> None:
        self._probes = {name: make(case, device) for name, make in factories.items()}
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        for probe in self._probes.values():
            self._entered.enter_context(probe)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def attach(self, model: nn.Module) -> None:
        """Tell every probe that the model is built."""
        for probe in self._probes.values():
            probe.attach(model)

    def begin_step(self, step: int) -> None:
        """Tell every probe that a step starts."""
        for probe in self._probes.values():
            probe.begin_step(step)

    @unobserved()
    def after_backward(self, model: nn.Module) -> None:
        """Tell every probe that the gradients are there."""
        for probe in self._probes.values():
            probe.after_backward(model)

    @unobserved()
    def after_update(self, model: nn.Module) -> None:
        """Tell every probe that the parameters are updated."""
        for probe in self._probes.values():
            probe.after_update(model)

    def results(self) -> dict[str, Any]:
        """What every probe recorded, by its name."""
        return {name: probe.result() for name, probe in self._probes.items()}


def in_backward() -> bool:
    """True while autograd runs backward, including the recomputation of a forward."""
    return torch._C._current_graph_task_id() != -1
