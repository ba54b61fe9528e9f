"""Trains `LlamaForCausalLM` of Hugging Face transformers under fp8-harness: FSDP2, HSDP, TP by torch's plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

from harness.matrix.case import Case
from harness.worker.targets.target import World

COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
PLAN = {
    **dict.fromkeys(COLWISE, ColwiseParallel()),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


class Trainer:
    def __init__(self, case: Case, world: World) -> None:
        shape, layout, train = case.model.shape, case.layout, case.train
        config = LlamaConfig(
            vocab_size=case.model.vocab_size,
            hidden_size=shape.dim,
            intermediate_size=shape.ffn_dim,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=train.seq_len,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config).to(
            world.device, torch.float64 if train.dtype == "float64" else torch.float32
        )
        if case.float8.enabled:
            recipe = Float8LinearConfig.from_recipe_name(case.float8.recipe)
            convert_to_float8_training(self.model, config=recipe, module_filter_fn=lambda _, fqn: fqn != "lm_head")
        sizes = (layout.dp_replicate, layout.dp_shard, layout.tp)
        mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        layers = self.model.model.layers
        if layout.tp > 1:
            for layer in layers:
                parallelize_module(layer, mesh["tp"], PLAN)
        if world.fsdp:  # of one rank too: the single-rank reference has the same dtypes
            wide = MixedPrecisionPolicy()
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            dp = mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"]
            for module in (*layers, self.model):
                fully_shard(module, mesh=dp, mp_policy=policy if train.dtype == "bfloat16" else wide)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=train.lr, foreach=False)

    def step(self, microbatches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, None]:
        """One update on int64 [sequences, seq_len + 1]; the mean loss over all ranks, and no norm."""
        total = torch.zeros((), dtype=torch.float64, device=microbatches[0].device)
        for batch in microbatches:
            logits = self.model(input_ids=batch[:, :-1]).logits
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(wide.flatten(0, 1), batch[:, 1:].flatten()) / len(microbatches)
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total / dist.get_world_size(), None


def build(case: Case, world: World) -> Trainer:
    return Trainer(case, world)
