"""A plain script: FSDP2 and FP8 without any target. `LAYOUT`: fsdp, tp, hsdp or ddp; `STEPS_OF`: how many steps."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

LAYOUT, STEPS = os.environ.get("LAYOUT", "fsdp"), int(os.environ.get("STEPS_OF", "5"))
RECIPE, REDUCE = os.environ.get("RECIPE", "tensorwise"), os.environ.get("REDUCE", "float32")
LOST = os.environ.get("LOST", "") == "1"
EVALUATE = os.environ.get("EVALUATE", "") == "1"
CHECKPOINT = os.environ.get("CHECKPOINT", "") == "1"
GATHER = os.environ.get("GATHER", "") == "1"
DIM, VOCAB = int(os.environ.get("DIM", "64")), 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.up(self.norm(x))))
        return x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def distributed(model: Model, world: int) -> int:
    """Distribute the model as LAYOUT says. Return which tokens this rank trains on."""
    rank = dist.get_rank()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, REDUCE))
    mesh = None
    if LAYOUT in ("tp", "fsdptp"):
        of_tp, names = ((2, 2), ("dp", "tp")) if LAYOUT == "fsdptp" else ((world,), ("tp",))
        whole = init_device_mesh("cpu", of_tp, mesh_dim_names=names)
        for layer in model.layers:
            parallelize_module(layer, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = whole["dp"] if LAYOUT == "fsdptp" else None
        rank = 0 if mesh is None else mesh.get_local_rank()
    elif LAYOUT in ("fsdp", "hsdp"):
        degrees = {"shards": world} if LAYOUT == "fsdp" else {"replicas": 2, "shards": world // 2}
        mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    if CHECKPOINT:
        for name, layer in model.layers.named_children():
            model.layers.register_module(name, checkpoint_wrapper(layer))
    for module in (*model.layers, model) if mesh is not None else ():
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return rank


def gradients(model: Model, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and loss of the last of two microbatches."""
    for _ in range(2):
        tokens = torch.randint(VOCAB, (4, 17), generator=generator)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / 2
        loss.backward()  # type: ignore[no-untyped-call]
    if LAYOUT == "ddp":
        for param in model.parameters():
            dist.all_reduce(param.grad, dist.ReduceOp.AVG)
    if "tp" not in LAYOUT:  # torch does not join the norms of two meshes
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return tokens, loss


def main() -> None:
    dist.init_process_group("virtual", init_method=os.environ["INIT_METHOD"])
    torch.manual_seed(0)
    model = Model()
    config = Float8LinearConfig.from_recipe_name(RECIPE)
    if GATHER:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, fqn: fqn != "head")
    before = list(model.parameters())
    generator = torch.Generator().manual_seed(distributed(model, dist.get_world_size()))
    optimizer = torch.optim.AdamW(before if LOST else model.parameters(), lr=1e-3, foreach="tp" not in LAYOUT)
    for step in range(STEPS):
        tokens, loss = gradients(model, generator)
        optimizer.step()
        optimizer.zero_grad()
        if GATHER:
            precompute_float8_dynamic_scale_for_fsdp(model)
        if EVALUATE and step == 1:
            with torch.no_grad():
                model(tokens[:, :-1])
        dist.all_reduce(loss.detach())
    dist.destroy_process_group()


main()
