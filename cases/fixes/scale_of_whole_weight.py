"""Candidate fix for torchao 0.18: under FSDP2 x TP the float8 all-gather scales a weight by the amax of one TP shard.

    fp8-harness run nightly --select 'fp8_all_gather=true tp>1' --inject cases/fixes/scale_of_whole_weight.py:apply

`fsdp_pre_all_gather` knows the FSDP mesh only, so the maximum is not taken over the TP ranks, although the weight is
one tensor for everything that multiplies it. Here it is taken over both: the TP mesh is that of the parallel styles.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torchao.float8 import fsdp_utils
from torchao.float8.float8_utils import amax_to_scale


def apply() -> None:
    """Patch the weight subclass in this process."""
    weights: Any = fsdp_utils.WeightWithDynamicFloat8CastTensor
    stock = weights.fsdp_pre_all_gather
    tp = _meshes_of_styles()

    @functools.wraps(stock)  # FSDP2 passes as many arguments as the signature has, which another fix may have changed
    def with_one_scale(self: Any, mesh: Any, *others: Any) -> Any:
        if self._precomputed_scale is not None or not tp:
            return stock(self, mesh, *others)
        amax = torch.max(torch.abs(self._tensor))
        for axis in (mesh, tp[-1]):
            amax = all_reduce(amax, "MAX", axis.get_group()).wait()
        self._precomputed_scale = amax_to_scale(amax, self._dtype)
        try:
            return stock(self, mesh, *others)
        finally:
            self._precomputed_scale = None

    weights.fsdp_pre_all_gather = with_one_scale


def _meshes_of_styles() -> list[DeviceMesh]:
    """The meshes over which linears and embeddings are sharded from now on."""
    seen: list[DeviceMesh] = []

    def noting(stock: Any) -> Any:
        def apply_style(self: Any, module: Any, device_mesh: DeviceMesh) -> Any:
            seen.append(device_mesh)
            return stock(self, module, device_mesh)

        return apply_style

    styles: tuple[Any, ...] = (ColwiseParallel, RowwiseParallel)
    for style in styles:
        style._apply = noting(style._apply)
    return seen
