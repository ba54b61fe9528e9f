"""The seams: where in torch, torchao and the target a fault is planted, and what it may know of the moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.float8 import float8_scaling_utils, fsdp_utils
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from harness.worker import train
from harness.worker.target import Target
from harness.worker.virtual.collectives import FABRIC

ODD_RANK = 1  # the rank that goes wrong where a single one does


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by what `make` returns for the stock one; static methods stay static."""
    static = isinstance(vars(owner).get(name), staticmethod)
    made = make(getattr(owner, name))
    setattr(owner, name, staticmethod(made) if static else made)


def on_odd_rank() -> bool:
    """True on the one rank that goes wrong alone."""
    return dist.get_rank() == ODD_RANK


def in_backward() -> bool:
    """True while autograd runs backward, recomputation of a forward included."""
    return torch._C._current_graph_task_id() != -1


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a tensor: a view, never a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def float8_part(tensor: torch.Tensor) -> Any:
    """The Float8TrainingTensor of this rank inside a cast result."""
    inner = local(tensor)
    assert isinstance(inner, Float8TrainingTensor), f"a cast gave {type(inner)}"
    return inner


def wrap_casts(change: Callable[..., torch.Tensor]) -> None:
    """Make every cast to float8 go through `change(stock, hp_tensor, scale, *rest)`."""

    def make(stock: Any) -> Any:
        return lambda hp_tensor, s, *rest, **kwargs: change(stock, hp_tensor, s, *rest, **kwargs)

    for module in (float8_scaling_utils, fsdp_utils):
        wrap(module, "hp_tensor_and_scale_to_float8", make)


def role_of(rest: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The GemmInputRole among the arguments of a cast after tensor and scale."""
    return kwargs.get("gemm_input_role", rest[2] if len(rest) > 2 else None)


class Recomputing:
    """Knows whether the forward of a Float8Linear runs to recompute what checkpointing dropped."""

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


def after_build(change: Callable[[Target], object]) -> None:
    """Call `change` with the target once it is built, before the first step."""

    def make(stock: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> Target:
            target: Target = stock(*args, **kwargs)
            change(target)
            return target

        return build

    wrap(train, "build", make)


def after_backward(change: Callable[[nn.Module, int], None]) -> None:
    """Call `change` with the model and the step (from 1) when its gradients are there, before anybody looks at them."""
    state: dict[str, Any] = {"step": 0}
    after_build(lambda target: state.update(model=target.model))

    def make(stock: Any) -> Any:
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            stock(loss, *args, **kwargs)
            state["step"] += 1
            with torch.no_grad():
                change(state["model"], state["step"])

        return backward

    wrap(torch.Tensor, "backward", make)


def everyones(tensor: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
    """What each of these global ranks holds of `tensor`, over a channel that no probe of the traffic listens to."""
    group = FABRIC.group(f"fault-{list(ranks)}", lambda: ranks, lambda: list(ranks).index(dist.get_rank()))
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return [part.clone().view(tensor.dtype).view(tensor.shape) for part in group.exchange("all_gather", flat)]
