"""Candidate fixes for torchao 0.18: weights that `quantize_` wraps for MXFP8.

    fp8-harness run single-mxfp8-wrapper-bias-v2048-s2-b16 --inject cases/fixes/mxfp8_wrapper.py:with_bias
    fp8-harness run tp2-mxfp8-wrapper-v2048-s2-b16 --inject cases/fixes/mxfp8_wrapper.py:inside_dtensor

The wrapper multiplies by MXFP8 where it sees `torch.nn.functional.linear`, and leaves out the third argument, the bias
(https://github.com/pytorch/ao/pull/4847). Where tensor parallelism distributes a wrapped weight, DTensor is outside and
takes `linear` apart before the wrapper sees it, so that the linear multiplies in bfloat16
(https://github.com/pytorch/ao/pull/4010). Here such a linear multiplies by MXFP8 on the DTensor of the weight itself.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor


def with_bias() -> None:
    """Patch the wrapper in this process."""
    wrapper: Any = MXFP8TrainingWeightWrapperTensor
    stock = wrapper.__torch_function__.__func__

    def multiplied(cls: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = stock(cls, func, types, args, given)
        if func is not torch.nn.functional.linear:
            return result
        return _added(result, args[2] if len(args) > 2 else given.get("bias"))

    wrapper.__torch_function__ = classmethod(multiplied)


def inside_dtensor() -> None:
    """Patch `torch.nn.Linear` in this process, and what MXFP8 under tensor parallelism and biases need beside."""
    with_bias()
    runpy.run_path(str(Path(__file__).with_name("mxfp8_under_tp.py")))["apply"]()
    stock = torch.nn.Linear.forward

    def forward(self: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if not (isinstance(weight, DTensor) and isinstance(weight._local_tensor, MXFP8TrainingWeightWrapperTensor)):
            return stock(self, inputs)
        config: Any = weight._local_tensor.config
        output = _to_mxfp8_then_scaled_mm(
            inputs,
            _Unwrapped.apply(weight),
            kernel_preference=config.kernel_preference,
            scale_calculation_mode=config.scale_calculation_mode,
            wgrad_with_hp=config.wgrad_with_hp,
        )
        return _added(output, self.bias)

    torch.nn.Linear.forward = forward  # type: ignore[method-assign]


class _Unwrapped(torch.autograd.Function):
    """The DTensor of what a DTensor of wrappers wraps."""

    @staticmethod
    def forward(context: Any, weight: Any) -> torch.Tensor:
        mesh, placements = weight.device_mesh, weight.placements
        local = weight._local_tensor._data
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _added(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return output if bias is None else output + bias.to(output.dtype)
