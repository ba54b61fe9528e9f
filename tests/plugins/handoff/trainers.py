"""Weights of a small Llama with experts, in the layouts of trainers, and exported by torch in every format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.plugins.handoff.formats import FORMATS as FORMATS_BY_NAME
from harness.plugins.handoff.worker import export
from harness.plugins.handoff.worker.states import copied

torch.set_num_threads(1)  # tests run beside one another
Tensors = Mapping[str, Any]
FORMATS = ("fp8_tensor", "fp8_row", "fp8_block128", "fp8_block128_ue8m0", "mxfp8")
WIDTH, HIDDEN, EXPERTS = 160, 192, 4
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def quantized(weight: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return export.quantized(weight, FORMATS_BY_NAME[name])


def exported(state: Tensors, name: str, *, sharded: bool = False) -> dict[str, Any]:
    """Return a state as an inference engine wants it: matrices quantized, the rest in bfloat16, experts one by one."""
    made: dict[str, Any] = {}
    for fqn, tensor in state.items():
        if sharded and isinstance(tensor, DTensor) and tensor.ndim == 2 and _by_rows(tensor) and _converts(fqn):
            for suffix, part in zip(("", "_scale"), quantized(tensor.to_local(), name), strict=True):
                shape = torch.Size((tensor.shape[0], part.shape[1]))
                placed = (part, tensor.device_mesh, tensor.placements)
                made[fqn + suffix] = DTensor.from_local(*placed, shape=shape, stride=(shape[1], 1))
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        made |= _of_whole(fqn, whole, name)
    return made


def _converts(fqn: str) -> bool:
    return "embed" not in fqn and not fqn.endswith("mlp.gate.weight")


def _by_rows(tensor: DTensor) -> bool:
    return all((type(one) is Shard and one.dim == 0) or one.is_replicate() for one in tensor.placements)


def _of_whole(fqn: str, whole: torch.Tensor, name: str) -> dict[str, Any]:
    if whole.ndim == 3:
        stem, _, part = fqn.rpartition(".")
        experts = [(f"{stem}.{at}.{part}.weight", whole[at]) for at in range(len(whole))]
    else:
        experts = [(fqn, whole)]
    made: dict[str, Any] = {}
    for own, matrix in experts:
        if matrix.ndim < 2 or not _converts(own):
            made[own] = matrix.to(torch.bfloat16)
        else:
            made[own], made[f"{own}_scale"] = quantized(matrix, name)
    return made


def weights(layers: Iterable[int] = (0, 1), *, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return the weights of some layers, the same ones in every process."""
    found: dict[str, torch.Tensor] = {}

    def some(name: str, *shape: int) -> None:
        generator = torch.Generator().manual_seed(sum(map(ord, name)) * 7919 + len(found))
        found[name] = (torch.randn(shape, generator=generator) * 0.05).to(dtype)

    some("model.embed_tokens.weight", 160, WIDTH)
    for layer in range(2):
        stem = f"model.layers.{layer}"
        for name in COLUMNS:
            at = "self_attn" if name in ("q_proj", "k_proj", "v_proj") else "mlp"
            some(f"{stem}.{at}.{name}.weight", HIDDEN, WIDTH)
        some(f"{stem}.self_attn.o_proj.weight", WIDTH, HIDDEN)
        some(f"{stem}.mlp.down_proj.weight", WIDTH, HIDDEN)
        some(f"{stem}.mlp.gate.weight", EXPERTS, WIDTH)
        some(f"{stem}.mlp.experts.gate_up_proj", EXPERTS, 132, WIDTH)
        some(f"{stem}.input_layernorm.weight", WIDTH)
    kept = tuple(f"layers.{layer}." for layer in layers)
    return {name: each for name, each in found.items() if "layers." not in name or any(own in name for own in kept)}


class Layer(nn.Module):
    """Modules that carry the weights of one layer, for `fully_shard` and `parallelize_module`."""

    def __init__(self, own: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, weight in own.items():
            module = nn.Module()
            module.register_parameter("weight", nn.Parameter(weight.clone()))
            if weight.ndim == 2:
                module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                module.weight = nn.Parameter(weight.clone())
            self.add_module(name.removesuffix(".weight").replace(".", "/"), module)


def sharded_by_torch(tp: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the weights as parameters of modules that torch's own FSDP2 and TP have sharded."""
    model = Layer(weights())
    if tp > 1:
        names = [name for name, _ in model.named_children() if name.endswith("_proj") and "experts" not in name]
        plan = {name: ColwiseParallel() if name.endswith(COLUMNS) else RowwiseParallel() for name in names}
        parallelize_module(model, mesh["tp"], plan)
    if "shard" in (mesh.mesh_dim_names or ()):
        fully_shard(model, mesh=mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")])
    return {_fqn(name): each for name, each in model.state_dict().items()}


def _fqn(name: str) -> str:
    """Return the name that a weight of `Layer` has in a model; stacks of experts are no modules there."""
    fqn = name.replace("/", ".")
    return fqn.removesuffix(".weight") if "experts" in fqn else fqn


def by_experts(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the weights with stacks of experts sharded over ranks, and the rest on all of them."""
    found: dict[str, Any] = weights()
    return {name: distribute_tensor(each, mesh, [Shard(0)]) if each.ndim == 3 else each for name, each in found.items()}


def named_experts() -> dict[str, Any]:
    """Return the weights with the experts of this rank alone, under the names that they have in the whole model."""
    rank, own = dist.get_rank(), EXPERTS // dist.get_world_size()
    state = {name: each for name, each in weights().items() if each.ndim < 3}
    for name, each in weights().items():
        if each.ndim == 3:
            stem, _, part = name.rpartition(".")
            state |= {f"{stem}.{at}.{part}.weight": each[at] for at in range(rank * own, (rank + 1) * own)}
    return state


def pipeline() -> dict[str, Any]:
    """Return the weights of this stage."""
    state = weights([dist.get_rank()])
    return state if dist.get_rank() == 0 else {name: each for name, each in state.items() if "embed" not in name}


def _mesh(*sizes: int, names: str) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names.split()))


LAYOUTS: Mapping[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "single": (1, weights),
    "fsdp2": (2, lambda: sharded_by_torch(1, _mesh(2, names="shard"))),
    "fsdp3": (3, lambda: sharded_by_torch(1, _mesh(3, names="shard"))),
    "fsdp4": (4, lambda: sharded_by_torch(1, _mesh(4, names="shard"))),
    "hsdp2x2": (4, lambda: sharded_by_torch(1, _mesh(2, 2, names="replicate shard"))),
    "tp2": (2, lambda: sharded_by_torch(2, _mesh(2, names="tp"))),
    "tp4": (4, lambda: sharded_by_torch(4, _mesh(4, names="tp"))),
    "fsdp2-tp2": (4, lambda: sharded_by_torch(2, _mesh(2, 2, names="shard tp"))),
    "ep2": (2, lambda: by_experts(_mesh(2, names="ep"))),
    "ep4": (4, lambda: by_experts(_mesh(4, names="ep"))),
    "ep2-by-name": (2, named_experts),
    "pp2": (2, pipeline),
}


def handed_off(layouts: list[str]) -> dict[str, dict[str, Any]]:
    """Return the state of each layout on this rank, and its exports in all formats."""
    return {layout: _handed_off(layout) for layout in layouts}


def _handed_off(layout: str) -> dict[str, Any]:
    state = LAYOUTS[layout][1]()
    made = {"source": copied(state)}
    for name in FORMATS:
        sharded = layout.startswith(("fsdp", "hsdp")) and name in ("fp8_row", "mxfp8")
        made[name] = copied(exported(state, name, sharded=sharded))
    return made
