"""A rank program that trains linears which own their float8 operands: quantized when FSDP2 has gathered a weight.

Its options are JSON: `fault`, a function of `ownedfaults.py`; `reshard`, what FSDP2 does after forward. It returns the
record of `UnshardProbe`. The rows of 32 that three ranks share are uneven.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple, Self

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import _pytree as pytree

from harness.engine.program import RankContext
from harness.matrix.case import Case
from harness.worker import process_group
from harness.worker.probes.unshards import UnshardProbe
from harness.worker.virtual import device

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
SIZES = (32, 64, 48)
STEPS, MICROBATCHES, TOKENS = 3, 2, 16

aten: Any = torch.ops.aten
_KEEP = {
    aten.as_strided.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
}


class Operands(NamedTuple):
    forward: Tensor  # [rows, columns]
    forward_scale: Tensor  # [rows, 1]
    backward: Tensor  # [columns, rows]
    backward_scale: Tensor  # [columns, 1]


def cast(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float8, and the inverse scale of each."""
    amax = rows.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    return (rows.float() * (448 / amax)).to(E4M3), amax / 448


def quantize(weight: Tensor) -> Operands:
    return Operands(*cast(weight), *cast(weight.t().contiguous()))


class Shard(torch.Tensor):
    """The rows of a weight that a rank has, with the hooks of FSDP2."""

    @staticmethod
    def __new__(cls, rows: Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, rows.shape, strides=rows.stride(), dtype=rows.dtype)

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda shard: shard.rows, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, cls, result) if func in _KEEP else result

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        rows = self.rows.to(policy.param_dtype)
        missing = -(-size[0] // mesh.size()) - len(rows)
        return (torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]),), size[0]

    def fsdp_post_all_gather(self, gathered: Any, rows: int, dtype: torch.dtype, *, out: Any = None) -> Any:
        made = self.quantize(self.cut(gathered[0], rows))
        if out is None:
            return Gathered(made, dtype), made
        self.refill(out.operands, made)
        return None

    def cut(self, gathered: Tensor, rows: int) -> Tensor:
        return gathered[:rows]

    def quantize(self, weight: Tensor) -> Operands:
        return quantize(weight)

    def refill(self, operands: Operands, made: Operands) -> None:
        for operand, tensor in zip(operands, made, strict=True):
            operand.copy_(tensor)


class Gathered(torch.Tensor):
    """The whole weight, of which there are the operands alone."""

    @staticmethod
    def __new__(cls, operands: Operands, dtype: torch.dtype) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, operands.forward.shape, dtype=dtype)

    def __init__(self, operands: Operands, dtype: torch.dtype) -> None:
        self.operands = operands

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in _KEEP, func
        return cls(args[0].operands, args[0].dtype)


def multiply(rows: Tensor, columns: Tensor, scales: Tensor) -> Tensor:
    """[tokens, k] times the columns [n, k] of a weight."""
    data, inverse = cast(rows)
    return torch._scaled_mm(data, columns.t(), inverse, scales.t(), out_dtype=torch.bfloat16)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Gathered) -> Tensor:
        ctx.save_for_backward(given, weight)
        return multiply(given, *of_use(weight)[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        given, weight = ctx.saved_tensors
        return multiply(grad, *of_use(weight)[2:]), grad.t() @ given


def of_use(weight: Gathered) -> Operands:
    return weight.operands


class Owning(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Shard(torch.randn(rows, columns)))

    def forward(self, given: Tensor) -> Tensor:
        return Multiply.apply(given, self.weight)


def between(model: nn.Module) -> None:
    """Called between the forward and the backward of a microbatch."""


def begin(model: nn.Module, microbatch: int) -> None:
    """Called before a microbatch."""


def preload(options: Mapping[str, str]) -> None:
    torch.set_num_threads(1)
    device.install()


def rank_main(context: RankContext) -> bytes:
    options = json.loads(context.payload)
    process_group.join(context, "shared")
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(Owning(*sizes) for sizes in pairwise(SIZES)))
        if options["fault"]:
            getattr(importlib.import_module("tests.worker.ownedfaults"), options["fault"])(model)
        with UnshardProbe(Case(), torch.device("cpu")) as probe:
            policy, mesh = MixedPrecisionPolicy(torch.bfloat16, torch.float32), init_device_mesh("cpu", (3,))
            for module in (*model, model):
                fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=options["reshard"])
            probe.attach(model)
            train(model, probe)
            return msgspec.json.encode(probe.result())
    finally:
        dist.destroy_process_group()


def train(model: Any, probe: UnshardProbe) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        probe.begin_step(step)
        for microbatch in range(MICROBATCHES):
            begin(model, microbatch)
            # As pipelines do: weights stay until the last microbatch.
            last = microbatch == MICROBATCHES - 1
            model.set_reshard_after_backward(
                last or model[0]._get_fsdp_state()._fsdp_param_group._reshard_after_forward
            )
            result = model(torch.randn(TOKENS, SIZES[0], dtype=torch.bfloat16))
            between(model)
            result.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.after_update(model)
        dist.barrier()
