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

    def uncollapsed(A: torch.Tensor, A_scale: torch.Tensor, output_shape: list[int], **rest: Any) -> torch.Tensor:
        if A.dim() == 2 and len(output_shape) > 2:
            leading = output_shape[:-1]
            A = A.view(*leading, A.shape[-1])
            A_scale = A_scale.view(*leading, 1) if A_scale.numel() > 1 else A_scale
            rest["scatter_dim_after_maybe_reshape"] = rest["orig_scatter_dim"]
        result: torch.Tensor = stock(A=A, A_scale=A_scale, output_shape=output_shape, **rest)
        return result

    module._fused_scaled_matmul_reduce_scatter_impl = uncollapsed
