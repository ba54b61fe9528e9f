"""A case on its ranks, whose weights change hands: exported before and after its last step, each time from its layout.

`build` is called on every rank of the case. One rank gets what these had, exports it alone, and trains as the
single-rank reference of the case.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.matrix.caseid import parse_case_id
from harness.plugins.handoff.formats import FORMATS, Format
from harness.plugins.handoff.worker.export import State, export, load
from harness.plugins.handoff.worker.states import Tensors, copied
from harness.worker.tensors.names import clean_fqn
from harness.worker.tensors.places import local_shard, part_at, unwrapped
from harness.worker.training.train import Prepared, prepare

Ranks = Sequence[Mapping[str, Mapping[str, Any]]]


def build(case_id: str, formats: list[str], exporter: str, folders: list[str], given: Ranks) -> dict[str, Any]:
    """Return what this rank has of the weights and of their exports. `given`: the parts of all ranks; none on a rank.

    `exporter`: "module:function", or empty for that of this plug-in. `folders`: where its module is.
    """
    sys.path += [folder for folder in folders if folder not in sys.path]
    case = parse_case_id(case_id)
    prepared = prepare(case, torch.device("cpu"), solo_witness=bool(given))
    ways = {name: _exporter(exporter, FORMATS[name]) for name in formats}
    last = len(prepared.tokens)
    for step in range(1, last + bool(given)):
        prepared.target.step(*prepared.batches(step))
    if given:
        whole = _assembled(given)
        one_rank = {name: copied(way(whole)) for name, way in ways.items()}
        return {"trained": copied(_state(prepared)), "one_rank": one_rank}
    state = _state(prepared)
    source, firsts = copied(state), {name: way(state) for name, way in ways.items()}
    made: dict[str, dict[str, Any]] = {name: {"exported": copied(first)} for name, first in firsts.items()}
    if not exporter:
        dtype = next(iter(state.values())).dtype
        for name, first in firsts.items():
            made[name]["again"] = copied(export(load(first, FORMATS[name], dtype), FORMATS[name]))
    prepared.target.step(*prepared.batches(last))
    state = _state(prepared)
    for name, first in firsts.items():
        made[name] |= {"kept": copied(first), "after": copied(ways[name](state))}
    return {"source": source, "updated": copied(state), "made": made}


def _exporter(exporter: str, form: Format) -> Callable[[State], Tensors]:
    if not exporter:
        return lambda state: export(state, form)
    module, _, name = exporter.partition(":")
    found: Callable[[State], Tensors] = getattr(importlib.import_module(module), name)
    return found


def _state(prepared: Prepared) -> dict[str, torch.Tensor]:
    """Return the weights of this rank without what FSDP2 and torchao wrap them in, in the memory that they have."""
    model: nn.Module = prepared.target.model
    return {clean_fqn(name): _plain(param) for name, param in model.named_parameters()}


def _plain(param: torch.Tensor) -> torch.Tensor:
    local, whole = local_shard(param), unwrapped(param)
    if not isinstance(whole, DTensor):
        return local
    placed = local, whole.device_mesh, whole.placements
    return DTensor.from_local(*placed, run_check=False, shape=whole.shape, stride=whole.stride())


def _assembled(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return whole tensors of the parts that ranks have."""
    wholes: dict[str, torch.Tensor] = {}
    for part, name in ((part, name) for tensors in ranks for name, part in tensors.items()):
        whole = wholes.setdefault(name, torch.full(part["shape"], torch.nan, dtype=part["local"].dtype))
        whole[part_at(part["offsets"], part["local"].shape)] = part["local"]
    return wholes
