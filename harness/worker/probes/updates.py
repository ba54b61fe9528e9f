"""Watches what optimizers do in every step: to which parameters, with which options, and as their formulas say or not.

A formula is evaluated for a few values of each shard, from what the optimizer had left behind in the step before: what
is rounded or reset in between shows too.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Muon
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from harness.trace.model import Options, StepUpdate
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.tensors.names import clean_fqn, dtype_name
from harness.worker.tensors.places import local_shard, unwrapped

Values = npt.NDArray[np.float64]
Formula = Callable[[Mapping[str, Values], Mapping[str, Any]], dict[str, tuple[Values, Values]]]

_SAMPLES = 8  # of a shard
# Of a group: they change no number.
_HOW = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def _adam(was: Mapping[str, Values], options: Mapping[str, Any]) -> dict[str, tuple[Values, Values]]:
    """Return the values after a step, and how large the terms are that they are the sums of."""
    (first, second), decay, steps = options["betas"], options["weight_decay"], was["step"] + 1
    apart = options.get("decoupled_weight_decay", False)
    decayed = (0 if apart else decay) * was["param"]
    grad = was["grad"] * (-1 if options["maximize"] else 1) + decayed
    mean = first * was["exp_avg"] + (1 - first) * grad
    square = second * was["exp_avg_sq"] + (1 - second) * grad**2
    size = options["lr"] / (1 - first**steps) / (np.sqrt(square / (1 - second**steps)) + options["eps"])
    terms = abs(was["exp_avg"]) + abs(was["grad"]) + abs(decayed)
    param = was["param"] * (1 - (options["lr"] * decay if apart else 0)) - size * mean
    return {
        "param": (param, abs(was["param"]) + size * terms),
        "exp_avg": (mean, terms),
        "exp_avg_sq": (square, was["exp_avg_sq"] + (abs(was["grad"]) + abs(decayed)) ** 2),
        "step": (steps, steps),
    }


def _sgd(was: Mapping[str, Values], options: Mapping[str, Any]) -> dict[str, tuple[Values, Values]]:
    """Return the expected SGD update."""
    momentum = options["momentum"]
    decayed = options["weight_decay"] * was["param"]
    grad = was["grad"] * (-1 if options["maximize"] else 1) + decayed
    kept = momentum * was["momentum_buffer"] + grad if momentum else was["momentum_buffer"]
    step = grad + momentum * kept if options["nesterov"] or not momentum else kept
    terms = abs(was["grad"]) + abs(decayed) + abs(kept - grad)  # which may cancel each other
    return {
        "param": (was["param"] - options["lr"] * step, abs(was["param"]) + 2 * options["lr"] * terms),
        "momentum_buffer": (kept, terms),
    }


def _muon(was: Mapping[str, Values], options: Mapping[str, Any]) -> dict[str, tuple[Values, Values]]:
    """Return the momentum alone: the update is that of whole matrices."""
    momentum = options["momentum"]
    kept = momentum * was["momentum_buffer"] + (1 - momentum) * was["grad"]
    return {"momentum_buffer": (kept, abs(was["momentum_buffer"]) + abs(was["grad"]))}


_FORMULAS: dict[type[Optimizer], tuple[Formula, tuple[str, ...]]] = {
    Adam: (_adam, ("exp_avg", "exp_avg_sq", "step")),
    AdamW: (_adam, ("exp_avg", "exp_avg_sq", "step")),
    SGD: (_sgd, ("momentum_buffer",)),
    Muon: (_muon, ("momentum_buffer",)),
}


class _Seen(NamedTuple):
    """Some values of a group of parameters, and of what is kept of them. `rounding`: the largest of their dtypes."""

    values: dict[str, Values]
    sizes: list[int]
    rounding: float


class Updates:
    """What optimizers did to a model; `steps` that have ended."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(param): clean_fqn(name) for name, param in model.named_parameters()}
        self._options: dict[str, dict[str, str]] = {}
        self._seen: dict[tuple[int, ...], _Seen] = {}
        self._left: dict[tuple[int, ...], _Seen] = {}  # by the last step
        self._worst = StepUpdate(step=0)
        self.steps: tuple[StepUpdate, ...] = ()

    def continue_from(self, before: Self) -> None:
        """Prepend what was done to the model that was trained before the run was resumed."""
        self.steps = before.steps

    @contextmanager
    def step(self, step: int, call: Callable[[], None]) -> Iterator[Counter[int]]:
        """Call a function when an optimizer takes its first step in here. Yields the steps of each, by its id."""
        counts: Counter[int] = Counter()
        known, self._options, self._worst = self._options, {}, StepUpdate(step=step)

        def before(optimizer: Optimizer, *_: object) -> None:
            if not counts:
                call()
            counts[id(optimizer)] += 1
            self._seen.update(_read(optimizer, left=self._left))

        def after(optimizer: Optimizer, *_: object) -> None:
            self._note_options(optimizer)
            for params, now in _read(optimizer).items():
                if (was := self._seen.pop(params, None)) is not None:  # an optimizer may call another one's step
                    self._compare(optimizer, params, was, now)
                self._left[params] = now

        hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        try:
            yield counts
        finally:
            for hook in hooks:
                hook.remove()
        changed = () if self._options == known else _joined(self._options)
        self.steps += (replace(self._worst, updated=bool(self._options), options=changed),)
        self._seen.clear()

    def _note_options(self, optimizer: Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            options = {name: _text(value) for name, value in group.items() if name not in _HOW}
            options |= {"class": type(optimizer).__name__} if type(optimizer) in _FORMULAS else {}
            for place, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                kept = {"dtype": param, **optimizer.state.get(param, {})}
                dtypes = {of: dtype_name(value.dtype) for of, value in kept.items() if isinstance(value, torch.Tensor)}
                name = self._names.get(id(param), f"parameter {place} of group {number} of {type(optimizer).__name__}")
                self._options.setdefault(name, options | dtypes)

    def _compare(self, optimizer: Optimizer, params: tuple[int, ...], was: _Seen, now: _Seen) -> None:
        formula, names = _FORMULAS[type(optimizer)]
        kept = (self._left.get(params) or was).values
        if not kept.keys() >= {*names}:
            return  # these were never together before
        # What the hooks of an optimizer do to gradients, they do before it steps.
        values = {**{name: kept[name] for name in names}, "param": was.values["param"], "grad": now.values["grad"]}
        group = next(group for group in optimizer.param_groups if params[0] in map(id, group["params"]))
        for name, (expected, terms) in formula(values, group).items():
            found = now.values[name]
            same = (found == expected) | (np.isnan(found) & np.isnan(expected))
            with np.errstate(all="ignore"):
                off = np.where(same, 0.0, abs(found - expected) / (now.rounding * terms))
            worst = int(np.argmax(off)) if off.size else 0
            if off.size and not off[worst] <= self._worst.distance:
                at = int(np.searchsorted(np.cumsum(now.sizes), worst, side="right"))
                fqn = self._names.get(params[at], "")
                self._worst = replace(self._worst, fqn=fqn, what=name, distance=float(off[worst]))


@torch.no_grad()
@unobserved()
def _read(optimizer: Optimizer, *, left: Container[tuple[int, ...]] = ()) -> dict[tuple[int, ...], _Seen]:
    """Return, by the ids of its parameters that have gradients, what is seen of every group whose formula is known.

    Of groups in `left`, which were read after the step before, only the parameters.
    """
    seen = {}
    for group in optimizer.param_groups if type(optimizer) in _FORMULAS else ():
        params = [param for param in group["params"] if _is_laid_out_as_its_gradient(param)]
        if not params or group.get("amsgrad") or group.get("dampening"):
            continue
        tensors = {"param": params}
        if tuple(map(id, params)) not in left:
            none = torch.zeros((), dtype=params[0].dtype, device=params[0].device)
            of_each = [{"grad": param.grad, **optimizer.state.get(param, {})} for param in params]
            for name in ("grad", *_FORMULAS[type(optimizer)][1]):
                tensors[name] = [none if (kept := known.get(name)) is None else kept for known in of_each]
        sizes = [min(_SAMPLES, local_shard(param).numel()) for param in params]
        values = {name: _values(of_name, sizes) for name, of_name in tensors.items()}
        dtypes = {tensor.dtype for name, of_name in tensors.items() if name != "step" for tensor in of_name}
        seen[tuple(map(id, params))] = _Seen(values, sizes, max(torch.finfo(dtype).eps for dtype in dtypes))
    return seen


def _is_laid_out_as_its_gradient(param: torch.Tensor) -> bool:
    """Return False without a gradient, or if the optimizer has to sum its parts first."""
    grad, held = param.grad, unwrapped(param)
    if isinstance(grad, DTensor):
        return isinstance(held, DTensor) and grad.placements == held.placements
    return grad is not None


def _values(tensors: list[torch.Tensor], sizes: list[int]) -> Values:
    """Return this many values of each, spread out; a single value stands for all."""
    flat = [local_shard(tensor).reshape(-1) for tensor in tensors]
    parts = [
        part.expand(size) if part.numel() == 1 else part[:: max(1, part.numel() // _SAMPLES)][:size]
        for part, size in zip(flat, sizes, strict=True)
    ]
    return np.array(torch.cat(parts).double().cpu().numpy())  # a copy: a tensor that stays counts as a leak


def _text(value: object) -> str:
    return repr(value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)


def _joined(by_name: Mapping[str, dict[str, str]]) -> tuple[Options, ...]:
    """Return the same, with those together that have the same options."""
    names: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, options in by_name.items():
        names.setdefault(tuple(sorted(options.items())), []).append(name)
    return tuple(Options(names=tuple(of), values=dict(values)) for values, of in names.items())
