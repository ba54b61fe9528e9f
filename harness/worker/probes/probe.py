"""What a probe is, the probes that watch one run. Probes never change a number."""

import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

from harness.matrix.case import Case
from harness.matrix.dims.dimension import Played
from harness.matrix.numerics import Numerics
from harness.registry import answers
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

    def note_microbatches(self, count: int) -> None:
        """The step had so many: called before it ends, where they are not those of the case."""

    def after_update(self, model: nn.Module) -> None:
        """The optimizer and what follows it have run."""

    def result(self) -> Any:
        """Return what was recorded: the value of the field of `RankTrace` that has this probe's name."""
        raise NotImplementedError


# By the field of `RankTrace` that each fills; its module in this package has the same name.
PROBES = {
    "sketches": "SketchProbe",
    "operands": "OperandProbe",
    "unshards": "UnshardProbe",
    "traffic": "TrafficProbe",
    "saved_memory": "SavedMemoryProbe",
    "graphs": "GraphProbe",
    "flops": "FlopsProbe",
    "module_tensors": "ModuleTensorProbe",
    "experts": "ExpertProbe",
    "logprobs": "",  # of a plug-in, without which nothing is recorded
}


class ProbeSet:
    """Several probes as one context, by their names in PROBES, under which `results` has what they recorded.

    A probe is imported when it is asked for: one that lacks a private part is never imported. `plays`: the ranks
    that a single one trains for.
    """

    def __init__(
        self,
        names: Sequence[str],
        case: Case,
        device: torch.device,
        numerics: Numerics,
        *,
        plays: Played | None = None,
    ) -> None:
        unknown = sorted(set(names) - set(PROBES))
        assert not unknown, f"unknown probes {unknown}; there are {sorted(PROBES)}"
        self._probes: dict[str, Probe] = {}
        self._entered = ExitStack()
        options: dict[str, dict[str, object]] = {
            "module_tensors": {"numerics": numerics},
            "logprobs": {"plays": plays},
            "sketches": {} if plays is None else {"pieces": plays.ranks, "groups": plays.sharing_experts},
        }
        of_blocks = {"operands": ("block_operands", "BlockOperandProbe")} if case.float8.traits.block else {}
        for name in names:
            module, kind = of_blocks.get(name, (name, PROBES[name]))
            own = [getattr(importlib.import_module(f"{__package__}.{module}"), kind)] if kind else []
            for probe in own or answers(f"probe {name}"):
                self._probes[name] = probe(case, device, **options.get(name, {}))

    def __enter__(self) -> Self:
        for probe in self._probes.values():
            self._entered.enter_context(probe)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def attach(self, model: nn.Module) -> None:
        for probe in self._probes.values():
            probe.attach(model)

    def begin_step(self, step: int) -> None:
        for probe in self._probes.values():
            probe.begin_step(step)

    def note_microbatches(self, count: int) -> None:
        for probe in self._probes.values():
            probe.note_microbatches(count)

    @unobserved()
    def after_backward(self, model: nn.Module) -> None:
        for probe in self._probes.values():
            probe.after_backward(model)

    @unobserved()
    def after_update(self, model: nn.Module) -> None:
        for probe in self._probes.values():
            probe.after_update(model)

    def results(self) -> dict[str, Any]:
        return {name: probe.result() for name, probe in self._probes.items()}
