"""The operand probe of runs in MXFP8: the seams of torchao 0.18's `mx_mm`.

Of its three matmuls every operand is cast anew: along its last dim by `MXTensor.to_mx`, along its first dim by
`_to_mxfp8_dim1_kernel_wrapper`. Scales are recorded as torchao keeps them: a value times its scale is the operand.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.matrix.recipes import MX
from harness.trace.operands import Role
from harness.worker.probes.cast_numbers import Cast
from harness.worker.probes.operands import OperandProbe
from harness.worker.tensors.places import local_part


class BlockOperandProbe(OperandProbe):
    """Records the casts and matmuls of MXFP8 linears of either conversion too."""

    def install(self) -> None:
        from torchao.prototype.moe_training import mxfp8_linear
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        super().install()
        function: Any = mxfp8_linear.mx_mm
        for linear in (nn.Linear, mxfp8_linear.MXFP8Linear):
            self.replace(linear, "forward", self.watch_linear(linear.forward))
        self.replace(function, "forward", staticmethod(self._watch_forward(function.forward)))
        watched = self.watch_backward(self._watch_backward(function.backward))
        self.replace(function, "backward", staticmethod(watched))
        columns = "_to_mxfp8_dim1_kernel_wrapper"
        self.replace(MXTensor, "to_mx", staticmethod(self._watch_block_cast(MXTensor.to_mx, -1)))
        self.replace(mxfp8_linear, columns, self._watch_block_cast(getattr(mxfp8_linear, columns), 0))

    def _watch_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
            self.remember(ctx)
            self.place.operands = _storages(source, weight)
            return original(ctx, source, weight, *args)

        return forward

    def _watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            unpacked = _Unpacked(ctx)
            self.place.operands = _storages(*unpacked.saved_tensors)
            return original(unpacked, *grads)

        return backward

    def _watch_block_cast(self, original: Callable[..., Any], dim: int) -> Callable[..., Any]:
        rounds_down = self._case.float8.traits.rounds_scales_down

        def cast(source: torch.Tensor, *args: Any, **options: Any) -> Any:
            result = original(source, *args, **options)
            bits, scale = (
                tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (result.qdata, result.scale)
            )
            seen = Cast(local_part(source), bits if dim == -1 else bits.t(), scale, dim, MX, rounds_down)
            self.record_cast(seen, logical=source, role=self._role(source))
            return result

        return cast

    def _role(self, source: torch.Tensor) -> Role:
        """By the memory of the source: a copy that a reshape has made is of an activation."""
        activation: Role = "grad_output" if self.place.phase == "backward" else "input"
        return self.place.operands.get(_storage(source), activation)


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
