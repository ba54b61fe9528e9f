"""Why a collective of a compiled graph was not fused with a matmul, judged by its neighbours in the graph.

The conditions are those of `torch/_inductor/fx_passes/micro_pipeline_tp.py` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor.config
from torch.distributed import _symmetric_memory

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_prims = torch.ops.prims

ALL_GATHER = _c10d.all_gather_into_tensor.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
MATMULS = frozenset({_aten.mm.default, _aten._scaled_mm.default})
_CASTS = frozenset({_aten._to_copy.default, _prims.convert_element_type.default})
# Operators that move elements and change none.
_MOVES = frozenset(
    {
        _aten.reshape.default,
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.cat.default,
        _aten.slice.Tensor,
        _aten.permute.default,
        _aten.transpose.int,
        _aten.t.default,
        _aten.clone.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.select.int,
        _c10d.wait_tensor.default,
    }
)


def group_name(node: torch.fx.Node) -> str:
    """The process group of an all-gather or a reduce-scatter: its last argument."""
    return str(node.args[-1])


def reason(node: torch.fx.Node) -> str:
    """Why `node`, an all-gather or a reduce-scatter, stands in the graph by itself."""
    if not torch._inductor.config._micro_pipeline_tp:
        return "the fusion pass is off"
    enabled: Any = _symmetric_memory.is_symm_mem_enabled_for_group
    if not enabled(group_name(node)):
        return "symmetric memory is not enabled for its process group"
    return _unfused_scatter(node) if node.target is REDUCE_SCATTER else _unfused_gather(node)


def _unfused_scatter(node: torch.fx.Node) -> str:
    producer = _produced_by(node)
    if producer.target in _CASTS:
        return "a cast stands between the matmul and the reduce-scatter"
    if producer.target is _aten.add.Tensor:
        return "it sums several matmuls"
    if producer.target in MATMULS:
        if len(producer.users) > 1:
            return "the matmul has another user"
        if any(user.op == "output" for user in node.users):
            return "what it scatters is saved for backward before it has arrived"
        return "the pass does not know this way from matmul to scatter"
    return f"its input is no matmul, but {producer.target}"


def _unfused_gather(node: torch.fx.Node) -> str:
    consumers = sorted({str(user.target) for user in _consumed_by(node) if user.target not in MATMULS})
    multiplied = any(user.target in MATMULS for user in _consumed_by(node))
    if multiplied:
        return "the pass does not know this way from gather to matmul (local batch 1 takes another one)"
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    return f"it gathers {dtype}, and what it gathers goes into {', '.join(consumers)} before any matmul"


def _produced_by(node: torch.fx.Node) -> torch.fx.Node:
    """The operator whose elements `node` gets."""
    source = node.all_input_nodes[0]
    while source.target in _MOVES or getattr(source.target, "__name__", "") == "getitem":
        source = source.all_input_nodes[0]
    return source


def _consumed_by(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The operators that get the elements of `node`."""
    for user in node.users:
        if user.target in _MOVES or getattr(user.target, "__name__", "") == "getitem":
            yield from _consumed_by(user)
        elif user.op != "output":
            yield user
