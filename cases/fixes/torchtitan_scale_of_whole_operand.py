"""Candidate fix for torchtitan: under TP the default SPMD backend scales every shard of an operand by itself.

    fp8-harness run torchtitan --select 'tp>1' --inject cases/fixes/torchtitan_scale_of_whole_operand.py:apply

Rowwise scaling takes the amax of a row. With plain tensors nothing tells torchao that a TP rank has only a part of the
row, as a DTensor would. Here the maximum is taken over TP wherever the dim that a scale spans is sharded.
"""

from __future__ import annotations

import importlib
from typing import Any

from torchao.float8 import float8_linear
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig


class _Sharded(LinearMMConfig):  # type: ignore[misc]
    """The configuration of the matmuls of a linear, by which its casts know how it is sharded."""

    tp: Any
    by_rows: bool  # the weight is sharded over in_features, and so is the input


def apply() -> None:
    """Patch the float8 linears of torchtitan, and the casts of torchao, in this process."""
    linear: Any = importlib.import_module("torchtitan.components.quantization.float8").Float8Linear
    casts: Any = float8_linear
    stock_parallelize, stock_cast = linear.parallelize, casts.hp_tensor_to_float8_dynamic

    def parallelize(self: Any, parallel_dims: Any) -> None:
        stock_parallelize(self, parallel_dims)
        if parallel_dims.tp_enabled:
            config = _Sharded(*self.linear_mm_config)
            config.tp = parallel_dims.get_dense_tp_mesh()
            config.by_rows = self.weight.shape[1] < self.in_features
            self.linear_mm_config = config

    def cast(tensor: Any, dtype: Any, config: Any, **options: Any) -> Any:
        role, dim = options["gemm_input_role"], options["axiswise_dim"]
        if isinstance(config, _Sharded) and _is_shared(config, role, dim):
            options |= {"reduce_amax": True, "device_mesh": config.tp}
        return stock_cast(tensor, dtype, config, **options)

    linear.parallelize = parallelize
    casts.hp_tensor_to_float8_dynamic = cast


def _is_shared(config: _Sharded, role: GemmInputRole, dim: int | None) -> bool:
    """True when TP ranks have parts of what one scale is for. `dim` is None for one scale per tensor."""
    if role is GemmInputRole.WEIGHT:
        return dim is None or dim == (0 if config.by_rows else -1)
    return dim == -1 and (role is GemmInputRole.INPUT) == config.by_rows
