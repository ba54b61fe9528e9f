"""A small sound target: no Llama, FSDP2 and tensor parallelism, every recipe. What is broken in tests overrides a part.

It imports nothing of the harness, as a user's own module.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,)) * self.gain)))


class Net(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, vocab, bias=False)
        self.register_buffer("tilt", torch.linspace(0.5, 1, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + x.roll(1, 1)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(F.layer_norm(x, (WIDTH,)) * self.tilt.to(x.dtype))


class Toy:
    """Ready to train. `case` and `world` are what the harness gives."""

    def __init__(self, case: Any, world: Any) -> None:
        self.case, self.world = case, world
        torch.manual_seed(case.train.seed)
        self.model = self.make_model()
        if case.train.dtype == "float64":
            self.model.double()
        if case.float8.enabled:
            self.convert()
        self.parallelize()
        self.optimizer = self.make_optimizer()

    def make_model(self) -> nn.Module:
        return Net(self.case.model.vocab_size)

    def convert(self) -> None:
        config = Float8LinearConfig.from_recipe_name(self.case.float8.recipe)
        convert_to_float8_training(self.model, config=config, module_filter_fn=lambda _, fqn: "lm_head" not in fqn)

    def parallelize(self) -> None:
        layout, policy = self.case.layout, MixedPrecisionPolicy()
        degrees = (layout.dp_replicate, layout.dp_shard, layout.tp)
        mesh = init_device_mesh(self.world.device.type, degrees, mesh_dim_names=("replicate", "shard", "tp"))
        if layout.tp > 1:
            for block in self.model.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if self.case.train.dtype == "bfloat16":
            reduce_dtype = getattr(torch, self.case.reduce_dtype)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        if self.world.fsdp:
            dp = mesh["replicate", "shard"] if layout.dp_replicate > 1 else mesh["shard"]
            for block in self.model.blocks:
                fully_shard(block, mesh=dp, mp_policy=policy)
            fully_shard(self.model, mesh=dp, mp_policy=policy)

    def make_optimizer(self) -> torch.optim.Optimizer:
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=self.case.train.lr, eps=1e-5)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of a microbatch: the mean over its tokens."""
        logits = self.model(batch[:, :-1])
        if self.case.train.dtype != "float64":
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def reported(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the global batch."""
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    def parts(self, microbatches: Any) -> list[torch.Tensor]:
        """What the model is called with, one after another."""
        return list(microbatches)

    def evaluate(self, microbatches: Any) -> Any:
        self.model.eval()
        with torch.no_grad():
            parts = self.parts(microbatches)
            total = sum(self.loss(part).double() for part in parts) / len(parts)
        self.model.train()
        return self.reported(total)

    by_parameter = StateDictOptions(flatten_optimizer_state_dict=True)

    def state(self) -> dict[str, Any]:
        parts = get_state_dict(self.model, self.optimizer, options=self.by_parameter)
        return dict(zip(("model_state_dict", "optim_state_dict"), parts, strict=True))

    def save(self, folder: Path) -> None:
        save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self.state()
        load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, **state, options=self.by_parameter)

    def before(self, left: int) -> None:
        """Called before each part, with the number of those behind it."""

    def step(self, microbatches: Any) -> Any:
        total, parts = torch.zeros((), dtype=torch.float64, device=self.world.device), self.parts(microbatches)
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            self.before(left)
            loss = self.loss(part) / len(parts)
            loss.backward()
            total += loss.detach()
        norm = self.update()
        self.optimizer.zero_grad()
        return self.reported(total), norm

    def update(self) -> Any:
        """Return the norm of gradients, where they are clipped to it."""
        self.optimizer.step()


def build(case: Any, world: Any) -> Toy:
    return Toy(case, world)
