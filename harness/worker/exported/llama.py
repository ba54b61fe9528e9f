"""A Llama without rotary embedding, whose blocks have their linears side by side, in the layout of a case."""

from __future__ import annotations

import contextlib
import dataclasses
import runpy
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

from harness.worker.exported.cpu import all_gather, all_gather_coalesced, scaled_mm
from harness.worker.exported.given import (
    ALWAYS_PARALLEL,
    AXES,
    BATCH,
    BIAS,
    CHECKPOINT_ALL,
    CHECKPOINT_OPS,
    CHECKPOINT_SOME,
    COMPILE,
    DEGREES,
    DIM,
    DP,
    DTYPE,
    EVERY,
    FFN,
    FILTERED,
    FLOAT8_STYLES,
    FP8_ALL_GATHER,
    FSDP,
    HEAD_DIM,
    HSDP,
    KV_DIM,
    LAYERS,
    LINEARS,
    LOSS_PARALLEL,
    LR,
    MIXED_PRECISION,
    NOT_CONVERTED,
    PAD_INNER_DIM,
    PRECOMPUTE,
    RECIPE,
    REPLICAS,
    SEQUENCE_PARALLEL,
    STEPS,
    STEPS_BEFORE,
    TOKENS,
    TP,
    VOCAB,
)
from harness.worker.exported.linears import watch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        widths = {"wq": (DIM, DIM), "wk": (DIM, KV_DIM), "wv": (DIM, KV_DIM), "wo": (DIM, DIM)}
        for name, (k, n) in (widths | {"w1": (DIM, FFN), "w2": (FFN, DIM), "w3": (DIM, FFN)}).items():
            if BIAS:
                setattr(self, name, nn.Linear(k, n))
            else:
                setattr(self, name, nn.Linear(k, n, bias=False))

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(h.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def build(dp, tp):
    torch.manual_seed(0)
    layers = nn.Sequential(*(Block() for _ in range(LAYERS)))
    parts = {"embedding": nn.Embedding(VOCAB, DIM), "layers": layers, "norm": nn.RMSNorm(DIM)}
    model = nn.Sequential(OrderedDict(parts | {"output": nn.Linear(DIM, VOCAB, bias=False)})).to(DEVICE, DTYPE)
    for weight in model.parameters():  # larger from row to row, so that no two shards have the same amax
        weight.data.mul_(torch.linspace(1, 2, weight.numel(), device=DEVICE).view_as(weight))
    if FP8_ALL_GATHER:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    else:
        config = Float8LinearConfig.from_recipe_name(RECIPE)
    if PAD_INNER_DIM:
        config = dataclasses.replace(config, pad_inner_dim=True)
    if FILTERED:
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, n: not n.endswith(NOT_CONVERTED))
    else:
        convert_to_float8_training(model, config=config)
    if TP:
        if tp is not None:
            stream = Shard(1) if SEQUENCE_PARALLEL else Replicate()
            colwise = Float8ColwiseParallel if FLOAT8_STYLES else ColwiseParallel
            rowwise = Float8RowwiseParallel if FLOAT8_STYLES else RowwiseParallel
            plan = {f"layers.*.{name}": colwise(input_layouts=stream) for name in ("wq", "wk", "wv", "w1", "w3")}
            plan |= {f"layers.*.{name}": rowwise(output_layouts=stream) for name in ("wo", "w2")}
            plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
            if LOSS_PARALLEL:
                plan["output"] = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
            else:
                plan["output"] = ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
            if SEQUENCE_PARALLEL:
                plan |= {name: SequenceParallel() for name in ("norm", "layers.*.attention_norm", "layers.*.ffn_norm")}
            parallelize_module(model, tp, plan)
    if CHECKPOINT_ALL:
        for name, block in layers.named_children():
            setattr(layers, name, checkpoint_wrapper(block))
    if CHECKPOINT_SOME:
        for name, block in list(layers.named_children())[EVERY - 1 :: EVERY]:
            setattr(layers, name, checkpoint_wrapper(block))
    if CHECKPOINT_OPS:
        for name, block in layers.named_children():
            setattr(layers, name, checkpoint_wrapper(block, context_fn=keep_attention))
    if COMPILE:
        for block in layers:
            block.compile(fullgraph=True)
    if FSDP:
        for unit in (model.embedding, *layers, [model.norm, model.output], model):
            if MIXED_PRECISION:
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                fully_shard(unit, mesh=dp, mp_policy=policy)
            else:
                fully_shard(unit, mesh=dp)
    return model


def keep_attention():
    kept = [torch.ops.aten._scaled_dot_product_flash_attention.default, torch.ops.aten.max.default]
    policy = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(lambda _, op, *args, **kwargs: policy[op not in kept])


def prepare():
    """What a CPU lacks: the matmul with the rules of a GPU, and float8 in gloo. Then PATCH.py:FUNCTION."""
    if DEVICE == "cpu":
        torch.library.impl("aten::_scaled_mm", "cpu", scaled_mm)
        if FP8_ALL_GATHER:
            torch.library.impl("c10d::_allgather_base_", "cpu", all_gather)
        if FLOAT8_STYLES:
            torch.library.impl("c10d::allgather_into_tensor_coalesced_", "cpu", all_gather_coalesced)
    for file, _, function in (patch.rpartition(":") for patch in sys.argv[1:]):
        runpy.run_path(file)[function]()


def gradients(parallel):
    """Of the layout that fails; of one rank that gets the batches of all ranks one after the other."""
    tokens = torch.randint(VOCAB, (STEPS, REPLICAS, BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    if ALWAYS_PARALLEL or parallel:
        mesh = init_device_mesh(DEVICE, DEGREES, mesh_dim_names=AXES)
        if HSDP:
            model = build(mesh["dp_replicate", "dp_shard"], mesh["tp"] if TP else None)
        else:
            model = build(mesh["dp_shard"] if FSDP else None, mesh["tp"] if TP else None)
        if DP:
            tokens = tokens.chunk(REPLICAS, dim=1)[dist.get_rank() * REPLICAS // dist.get_world_size()]
        if LINEARS:
            watch(model)
    else:
        if FSDP:
            alone = init_device_mesh(DEVICE, (dist.get_world_size(), 1), mesh_dim_names=("rank", "alone"))["alone"]
            model = build(alone, None)
        else:
            model = build(None, None)
    if STEPS_BEFORE:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-5, foreach=False)
    for batches in tokens.to(DEVICE):
        if STEPS_BEFORE:  # nothing before the first one
            optimizer.step()
            optimizer.zero_grad()
            if PRECOMPUTE:
                precompute_float8_dynamic_scale_for_fsdp(model)
        for batch in batches:
            with loss_parallel() if LOSS_PARALLEL else contextlib.nullcontext():
                logits = model(batch).float().flatten(0, 1)
                (F.cross_entropy(logits, batch.roll(-1, 1).flatten()) / len(batches)).backward()
    if ALWAYS_PARALLEL:
        return
    else:
        if FSDP:
            return {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
        else:
            grads = {name: weight.grad for name, weight in model.named_parameters()}
            return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
