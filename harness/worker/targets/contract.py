"""The contract of a target: what its module, what it builds and what its step returns must be."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.matrix.case import Case
from harness.registry import module_of
from harness.worker.targets.target import Target, World
from harness.worker.tensors.names import optimizers_of


class TargetMisfit(Exception):
    """A target does not keep to the interface. The text says where, what is wrong and how to mend it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what} Fix: {fix}")


_INTERFACE = "see the interface in harness/worker/targets/target.py."


def build_target(case: Case, world: World) -> Target:
    """Return the target of a case, built by its module. Raises TargetMisfit where one of them is none."""
    name = module_of(case.target)
    module = importlib.import_module(name)
    if not callable(getattr(module, "build", None)):
        raise TargetMisfit(
            f"module {name} has no function `build`.",
            f"define `def build(case, world)` that returns an object with `model` and `step`; {_INTERFACE}",
        )
    built = module.build(case, world)
    require_process_group("build")
    _require_model(built)
    _require_method(built, "step(self, microbatches)", " that returns `loss, grad_norm`")
    evaluates = case.train.evaluate or case.train.packing != "none"
    if evaluates:
        axis, has = ("evaluate", "evaluate = true") if case.train.evaluate else ("packing", "packing")
        wanted = f" that returns the loss, or leave `{axis}` out of the case"
        _require_method(built, "evaluate(self, microbatches)", wanted, f", and the case has {has}")
    if case.train.counts_labels:
        for name in ("step", *(["evaluate"] if evaluates else [])):
            _require_labels(name, getattr(built, name), packed=case.train.packing != "none")
    if case.train.resume != "none":
        for name in ("save", "load"):
            wanted = ", or leave `resume` out of the case"
            _require_method(built, f"{name}(self, folder)", wanted, ", and the case is resumed")
    _require_parameters(built.model)
    if case.train.optimizer == "sgd":
        _require_sgd(built.model)
    target: Target = built
    return target


def _require_model(built: Any) -> None:
    if not isinstance(getattr(built, "model", None), nn.Module):
        held = f", whose `model` is {_kind(built.model)}" if hasattr(built, "model") else " without `model`"
        raise TargetMisfit(
            f"build() returned {_kind(built)}{held}.",
            f"return an object whose `model` is the nn.Module that `step` trains; {_INTERFACE}",
        )


def _require_method(built: Any, signature: str, wanted: str, because: str = "") -> None:
    name = signature.partition("(")[0]
    if not callable(getattr(built, name, None)):
        raise TargetMisfit(
            f"build() returned {_kind(built)} without a method `{name}`{because}.",
            f"give it `def {signature}`{wanted}; {_INTERFACE}",
        )


def _require_labels(name: str, method: Callable[..., Any], *, packed: bool) -> None:
    axis, more = ("packing", ", positions=None") if packed else ("ignored_tokens", "")
    try:
        inspect.signature(method).bind((), (), *([()] * packed))
    except TypeError as error:
        raise TargetMisfit(
            f"{name}() takes no {'positions' if packed else 'labels'}, and the case has {axis}.",
            f"give it `def {name}(self, microbatches, labels=None{more})`, with labels of -100 where the loss leaves a "
            f"token out, or leave `{axis}` out of the case; {_INTERFACE}",
        ) from error


def _require_parameters(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    if not parameters:
        raise TargetMisfit(
            f"the model ({type(model).__name__}) has no parameters.",
            "`model` must be the module whose parameters `step` trains, not a wrapper that hides it.",
        )
    empty = [fqn for fqn, parameter in parameters.items() if parameter.is_meta]
    if empty:
        raise TargetMisfit(
            f"{len(empty)} of {len(parameters)} parameters are on the meta device, {empty[0]} first.",
            "call `model.to_empty(device=world.device)` before build() returns; the harness writes the weights.",
        )


def _require_sgd(model: nn.Module) -> None:
    """Any other optimizer would be trained with under the name of SGD, in the single-rank reference too."""
    optimizers = optimizers_of(model)
    other = next((_kind(optimizer) for optimizer in optimizers if not isinstance(optimizer, torch.optim.SGD)), None)
    if other is not None or not optimizers:
        raise TargetMisfit(
            f"build() made {other or 'no optimizer'}, and the case has optimizer = sgd.",
            "let build() give the parameters to torch.optim.SGD where `case.train.optimizer` says so, or leave "
            f"`optimizer` out of the case; {_INTERFACE}",
        )


def require_process_group(where: str) -> None:
    """Raise TargetMisfit when the target has destroyed the process group."""
    if not dist.is_initialized():
        raise TargetMisfit(
            f"{where}() destroyed the process group.",
            "leave out dist.destroy_process_group(): the harness made the group and needs it until the last step.",
        )


def require_result(result: Any) -> tuple[Any, Any]:
    """Return the loss and gradient norm that `step` returned. Raises TargetMisfit for anything else."""
    if not (isinstance(result, tuple) and len(result) == 2):
        returned = f"{_kind(result)} of {len(result)}" if isinstance(result, tuple | list) else _kind(result)
        raise TargetMisfit(
            f"step() returned {returned}, not the pair (loss, grad_norm).",
            "end it with `return loss, grad_norm`, or with `return loss, None` where it computes no norm.",
        )
    loss, norm = result
    _require_number("step", "loss", loss)
    if norm is not None:
        _require_number("step", "gradient norm", norm)
    return loss, norm


def require_loss(loss: Any) -> torch.Tensor | float:
    """Return the loss that `evaluate` returned. Raises TargetMisfit for anything else."""
    _require_number("evaluate", "loss", loss)
    number: torch.Tensor | float = loss
    return number


def _require_number(method: str, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TargetMisfit(
                f"{method}() returned a {name} of shape {list(value.shape)}.",
                "return one number: the mean over the tokens of the global batch."
                if name == "loss"
                else "return one number: the global L2 norm before clipping.",
            )
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise TargetMisfit(
            f"{method}() returned {_kind(value)} as its {name}.",
            "return a tensor with one element, or a float" + ("." if name == "loss" else ", or None."),
        )


def _kind(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
