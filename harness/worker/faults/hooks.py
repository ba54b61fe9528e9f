"""Hooks for planting faults: wrappers around torch, torchao and the target, and queries of the current state."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchao.float8 import float8_scaling_utils, fsdp_utils
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from harness.worker import train
from harness.worker.probes.probe import in_backward
from harness.worker.probes.sketches import clean_fqn
from harness.worker.targets.target import Target
from harness.worker.virtual import collectives

ODD_RANK = 1  # the rank of single-rank faults


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the attribute `name` by `make(stock attribute)`; static methods stay static."""
    static = isinstance(vars(owner).get(name), staticmethod)
    made = make(getattr(owner, name))
    setattr(owner, name, staticmethod(made) if static else made)


def on_odd_rank() -> bool:
    """True on the rank of single-rank faults."""
    return dist.get_rank() == ODD_RANK


def on_last_rank() -> bool:
    """True on the last rank of the world, which holds the shards that end early and the sequences that come last."""
    return dist.get_rank() == dist.get_world_size() - 1


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, without a copy; other tensors as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def float8_part(tensor: torch.Tensor) -> Any:
    """The local Float8TrainingTensor of a cast result."""
    inner = local(tensor)
    assert isinstance(inner, Float8TrainingTensor), f"a cast returned {type(inner)}"
    return inner


def wrap_casts(change: Callable[..., torch.Tensor]) -> None:
    """Replace every cast to float8 by `change(stock, hp_tensor, scale, *rest)`."""

    def make(stock: Any) -> Any:
        return lambda hp_tensor, s, *rest, **kwargs: change(stock, hp_tensor, s, *rest, **kwargs)

    for module in (float8_scaling_utils, fsdp_utils):
        wrap(module, "hp_tensor_and_scale_to_float8", make)


def role_of(rest: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The GemmInputRole in the arguments of a cast after tensor and scale."""
    return kwargs.get("gemm_input_role", rest[2] if len(rest) > 2 else None)


class Recomputing:
    """Tracks whether the forward of a Float8Linear runs as recomputation under activation checkpointing."""

    def __init__(self) -> None:
        self.active = False
        wrap(Float8Linear, "forward", self._make)

    def _make(self, stock: Any) -> Any:
        def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with self._while(in_backward()):
                return stock(module, x)

        return forward

    @contextlib.contextmanager
    def _while(self, active: bool) -> Iterator[None]:
        self.active = active
        try:
            yield
        finally:
            self.active = False


def after_build(change: Callable[[Any], object]) -> None:
    """Call `change(target)` when a target is built and has its weights, before the first step."""

    def make(stock: Any) -> Any:
        def prepare(*args: Any, **kwargs: Any) -> Any:
            prepared = stock(*args, **kwargs)
            change(prepared.target)
            return prepared

        return prepare

    wrap(train, "prepare", make)


def after_backward(change: Callable[[nn.Module, int], None]) -> None:
    """Call `change(model, step)` when the gradients of a step are complete, before anything reads them."""
    step, models = counted_steps(), list[nn.Module]()
    after_build(lambda target: models.append(target.model))

    @torch.no_grad()
    def before_update(*_: Any) -> None:
        change(models[-1], step())

    register_optimizer_step_pre_hook(before_update)


def counted_steps() -> Callable[[], int]:
    """Returns a function that says which step is trained: 1 in the first, 0 before it."""
    state = {"step": 0}

    def make(stock: Any) -> Any:
        def train_step(target: Target, step: int, *rest: Any) -> Any:
            state["step"] = step
            return stock(target, step, *rest)

        return train_step

    wrap(train, "train_step", make)
    return lambda: state["step"]


def around_update(change: Callable[[Callable[[], object], nn.Module, int], object]) -> None:
    """Replace the step of AdamW by `change(stock, model, step)`. Steps count from 1."""
    step, models = counted_steps(), list[nn.Module]()
    after_build(lambda target: models.append(target.model))

    def make(stock: Any) -> Any:
        @torch.no_grad()
        def update(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            change(functools.partial(stock, optimizer, *args, **kwargs), models[-1], step())

        return update

    wrap(torch.optim.AdamW, "step", make)


def weight_in_last_block(model: nn.Module, name: str) -> nn.Parameter:
    """The weight of the linear or norm of this name in the last block; IndexError where there is none."""
    fqns = {clean_fqn(fqn): param for fqn, param in model.named_parameters()}
    return [param for fqn, param in fqns.items() if fqn.startswith("layers.") and fqn.endswith(f".{name}.weight")][-1]


def module_in_last_block(model: nn.Module, name: str) -> nn.Module:
    """The module of this name in the last block; IndexError where there is none."""
    return [module for fqn, module in model.named_modules() if clean_fqn(fqn).endswith(f".{name}")][-1]


def gathered_copies(tensor: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
    """A copy of the `tensor` of each of these global ranks, gathered unseen by the traffic probe."""
    group = collectives.FABRIC.group(f"fault-{list(ranks)}", lambda: ranks, lambda: list(ranks).index(dist.get_rank()))
    with collectives.unobserved():
        return collectives.gathered_copies(tensor, group)
