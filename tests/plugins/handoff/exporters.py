"""Exporters of trainers as users write them, called on every rank of a case: right ones, and one for each mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from harness.plugins.handoff.formats import FORMATS
from harness.plugins.handoff.worker.export import export, quantized

State = Mapping[str, torch.Tensor]
Made = dict[str, Any]
ROW = FORMATS["fp8_row"]


def right(state: State) -> Made:
    return export(state, ROW)


def is_sharded(tensor: torch.Tensor, dim: int) -> bool:
    return isinstance(tensor, DTensor) and any(one.is_shard(dim) for one in tensor.placements)


def changed(state: State, change: Callable[[str, DTensor], torch.Tensor | None]) -> Made:
    """Export weights that `change` returns another tensor for, and the others as they are."""
    whole = {name: change(name, each) if isinstance(each, DTensor) else None for name, each in state.items()}
    return export({name: each if whole[name] is None else whole[name] for name, each in state.items()}, ROW)


def experts_gathered_in_another_order(state: State) -> Made:
    """Put the experts of all ranks together, those of the last rank first."""

    def gathered(name: str, tensor: DTensor) -> torch.Tensor | None:
        if ".experts." not in name:
            return None
        whole = tensor.full_tensor()
        return torch.cat(list(reversed(whole.chunk(2))))

    return changed(state, gathered)


def experts_of_this_rank_alone(state: State) -> Made:
    """Number the experts of each rank from 0 on, so that all ranks but one are lost."""
    return changed(state, lambda name, tensor: tensor.to_local() if ".experts." in name else None)


def first_stage_alone(state: State) -> Made:
    """Export on the ranks of the first stage, as if they had all layers."""
    return right(state) if any("embed" in name for name in state) else {}


def layers_by_their_number_on_the_stage(state: State) -> Made:
    """Number the layers of each stage from 0 on."""
    first = min((int(name.split(".")[1]) for name in state if name.startswith("layers.")), default=0)
    return {name.replace(f"layers.{first}.", "layers.0."): each for name, each in right(state).items()}


def one_scale_of_each_shard(state: State) -> Made:
    """Quantize what this rank has by its own amax, gather the data, and keep the scale of the first rank."""
    made = export(state, FORMATS["fp8_tensor"])
    for name, tensor in state.items():
        if f"{name}_scale" in made and is_sharded(tensor, 0) and isinstance(tensor, DTensor):
            data, scale = quantized(tensor.to_local(), FORMATS["fp8_tensor"])
            parts = DTensor.from_local(data.view(torch.uint8), tensor.device_mesh, tensor.placements)
            dist.broadcast(scale, 0)
            made[name], made[f"{name}_scale"] = parts.full_tensor().view(data.dtype), scale
    return made


def columns_taken_for_rows(state: State) -> Made:
    """Gather the shards of row-parallel linears below one another, and not side by side."""
    return changed(
        state, lambda _, tensor: torch.cat(tensor.full_tensor().chunk(2, 1)) if is_sharded(tensor, 1) else None
    )


_KEPT: Made = {}


def cached(state: State) -> Made:
    """Quantize `wq` once, and hand it off again whatever happens to it."""
    made = right(state)
    _KEPT.update({name: each for name, each in made.items() if "wq" in name and name not in _KEPT})
    return made | _KEPT


def norms_not_copied(state: State) -> Made:
    """Hand off what has one dimension in the memory of the trainer."""
    local = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}
    return right(state) | {name: each for name, each in local.items() if each.ndim == 1}


def in_bfloat16_first(state: State) -> Made:
    """Cast weights to bfloat16 before they are quantized."""
    return export({name: each.to(torch.bfloat16) for name, each in state.items()}, ROW)
