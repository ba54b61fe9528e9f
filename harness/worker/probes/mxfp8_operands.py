"""The casts and matmuls of MXFP8, for the operand probe: the seams of torchao 0.18's `mx_mm`.

Of its three matmuls every operand is cast anew: along its last dim by `MXTensor.to_mx`, along its first dim by
`_to_mxfp8_dim1_kernel_wrapper`. Scales are recorded as torchao keeps them: a value times its scale is the operand.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.matrix.recipes import BLOCK, RecipeTraits
from harness.trace.operands import Role
from harness.worker.probes.cast_numbers import Cast
from harness.worker.tensors.places import local_part


class Place(Protocol):
    """Where the run is."""

    operands: dict[int, Role]  # of the linear that runs: which is in which memory

    @property
    def phase(self) -> str: ...


class Recorder(Protocol):
    """What the probe of operands offers."""

    @property
    def place(self) -> Place: ...
    def replace(self, owner: Any, name: str, value: Any) -> None: ...
    def watch_linear(self, original: Callable[..., Any]) -> Callable[..., Any]: ...
    def watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]: ...
    def remember(self, ctx: Any) -> None: ...
    def record_cast(self, cast: Cast, *, logical: torch.Tensor, role: Role) -> None: ...


def watch(probe: Recorder, traits: RecipeTraits) -> None:
    """Record the casts and matmuls of MXFP8 linears of either conversion, until the probe is closed."""
    from torchao.prototype.moe_training import mxfp8_linear
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    function: Any = mxfp8_linear.mx_mm
    for linear in (nn.Linear, mxfp8_linear.MXFP8Linear):
        probe.replace(linear, "forward", probe.watch_linear(linear.forward))
    probe.replace(function, "forward", staticmethod(_watch_forward(probe, function.forward)))
    watched = probe.watch_backward(_watch_backward(probe, function.backward))
    probe.replace(function, "backward", staticmethod(watched))
    columns = "_to_mxfp8_dim1_kernel_wrapper"
    down = traits.rounds_scales_down
    probe.replace(MXTensor, "to_mx", staticmethod(_watch_cast(probe, MXTensor.to_mx, -1, down)))
    probe.replace(mxfp8_linear, columns, _watch_cast(probe, getattr(mxfp8_linear, columns), 0, down))


def _watch_forward(probe: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
        probe.remember(ctx)
        probe.place.operands = _storages(source, weight)
        return original(ctx, source, weight, *args)

    return forward


def _watch_backward(probe: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        unpacked = _Unpacked(ctx)
        probe.place.operands = _storages(*unpacked.saved_tensors)
        return original(unpacked, *grads)

    return backward


class _Unpacked:
    """The context of a backward, whose saved tensors are unpacked once: a checkpoint refuses to unpack them again."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _storages(source: torch.Tensor, weight: torch.Tensor) -> dict[int, Role]:
    return {_storage(source): "input", _storage(weight): "weight"}


def _storage(tensor: torch.Tensor) -> int:
    return int(local_part(tensor).untyped_storage().data_ptr())


def _watch_cast(probe: Recorder, original: Callable[..., Any], dim: int, rounds_down: bool) -> Callable[..., Any]:
    def cast(source: torch.Tensor, *args: Any, **options: Any) -> Any:
        result = original(source, *args, **options)
        bits, scale = (
            tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (result.qdata, result.scale)
        )
        seen = Cast(local_part(source), bits if dim == -1 else bits.t(), scale, dim, BLOCK, rounds_down)
        probe.record_cast(seen, logical=source, role=_role(probe, source))
        return result

    return cast


def _role(probe: Recorder, source: torch.Tensor) -> Role:
    """By the memory of the source: a copy that a reshape has made is of an activation."""
    place = probe.place
    activation: Role = "grad_output" if place.phase == "backward" else "input"
    return place.operands.get(_storage(source), activation)
