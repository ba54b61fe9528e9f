"""Candidate fix for torch 2.13: `fused_scaled_matmul_reduce_scatter` scatters rows by batch instead of by sequence.

    fp8-harness run pr --select 'async_tp=true' --inject cases/fixes/scattered_rows.py:apply

The operator gets A collapsed to two dims, but the dim to scatter along belongs to the tensor before that. Given back
its leading dims (they are those of the output), A is cut along the right one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem


def apply() -> None:
    """Patch the operator in this process."""
    module: Any = symm_mem
    stock = module._fused_scaled_matmul_reduce_scatter_impl

    def uncollapsed(**given: Any) -> torch.Tensor:
        operand, scale, leading = given["A"], given["A_scale"], given["output_shape"][:-1]
        if operand.dim() == 2 and len(leading) > 1:
            given["A"] = operand.view(*leading, operand.shape[-1])
            given["A_scale"] = scale.view(*leading, 1) if scale.numel() > 1 else scale
            given["scatter_dim_after_maybe_reshape"] = given["orig_scatter_dim"]
        result: torch.Tensor = stock(**given)
        return result

    module._fused_scaled_matmul_reduce_scatter_impl = uncollapsed
