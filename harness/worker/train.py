"""The reference target: builds a case and trains it for a few steps. Read this file top to bottom as the example of
composing FP8, tensor and sequence parallelism, activation checkpointing and FSDP2 in torch and torchao.
"""

from __future__ import annotations

import contextlib
import platform
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchao
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import loss_parallel

from harness.spec.case import Case
from harness.trace import RankTrace, StepTrace
from harness.worker import data
from harness.worker.checkpointing import apply_checkpointing
from harness.worker.float8 import Conversion, after_optimizer_step, convert
from harness.worker.model import Llama
from harness.worker.parallel import Meshes, apply_fsdp, apply_tp, build_meshes, uses_fsdp
from harness.worker.probes.matmuls import ScaledMMCounter

ReportPhase = Callable[[str], None]


class Target(NamedTuple):
    """A built case, ready to train."""

    model: Llama
    optimizer: torch.optim.Optimizer
    conversion: Conversion
    data_digest: str
    tokens: torch.Tensor  # [steps, local_batch, seq_len + 1], this rank's slice of the global batch


def build(case: Case, device: torch.device) -> Target:
    """Build model, parallelism and optimizer in the order that matters: FP8, TP, checkpointing, FSDP2, weights."""
    meshes = build_meshes(case, device.type)
    with torch.device(device):
        model = Llama(case.model.shape, vocab_size=case.model.padded_vocab_size, seq_len=case.train.seq_len)
    weights = initial_weights(model, case)
    load_weights(model, weights)
    conversion = convert(model, case.float8)
    if meshes.tp is not None:
        apply_tp(model, meshes.tp, case)
    apply_checkpointing(model.layers, case.checkpointing)
    if uses_fsdp(case):
        assert meshes.dp is not None
        apply_fsdp(model, meshes.dp, case)
    tokens = global_tokens(case)
    return Target(
        model=model,
        optimizer=build_optimizer(model, case),
        conversion=conversion,
        data_digest=data.digest({"tokens": tokens, **weights}),
        tokens=torch.from_numpy(tokens[:, batch_slice(case, meshes)]).to(device),
    )


def global_tokens(case: Case) -> data.Tokens:
    """The tokens of the whole run: [steps, global_batch, seq_len + 1]."""
    train = case.train
    return data.make_tokens(
        steps=train.steps,
        sequences=train.global_batch,
        seq_len=train.seq_len,
        vocab_size=case.model.vocab_size,
        seed=train.seed,
    )


def batch_slice(case: Case, meshes: Meshes) -> slice:
    """Which sequences of the global batch this rank trains on. TP ranks of one dp rank share them."""
    dp_rank = 0
    if meshes.dp is not None:
        for axis in meshes.dp.mesh_dim_names or ():
            dp_rank = dp_rank * meshes.dp[axis].size() + meshes.dp.get_local_rank(axis)
    return slice(dp_rank * case.local_batch, (dp_rank + 1) * case.local_batch)


def initial_weights(model: Llama, case: Case) -> dict[str, data.Weights]:
    """Full initial weights of every parameter by FQN, float32, without the rows that only pad the vocabulary."""
    vocab_size, padded = case.model.vocab_size, case.model.padded_vocab_size
    shapes = {fqn: tuple(param.shape) for fqn, param in model.named_parameters()}
    for fqn in VOCAB_FQNS:
        assert shapes[fqn][0] == padded, f"{fqn} has {shapes[fqn][0]} rows, expected {padded}"
        shapes[fqn] = (vocab_size, *shapes[fqn][1:])
    return {fqn: data.make_weight(fqn, shape, seed=case.train.seed) for fqn, shape in shapes.items()}


VOCAB_FQNS = ("tok_embeddings.weight", "output.weight")


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, data.Weights]) -> None:
    """Copy full weights into a model that is not distributed yet: every rank holds the same ones. Padding is zero."""
    for fqn, param in model.named_parameters():
        param.zero_()
        param[: len(weights[fqn])].copy_(torch.from_numpy(weights[fqn]))


def build_optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """AdamW over one group per device mesh: its foreach kernels do not mix tensors of different meshes."""
    groups: dict[object, list[nn.Parameter]] = {}
    for param in model.parameters():
        groups.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    return torch.optim.AdamW([{"params": params} for params in groups.values()], lr=case.train.lr, **LLAMA_ADAMW)


# Llama 2 (arXiv:2307.09288, section 2.2). An eps of 1e-5 instead of torch's 1e-8 also keeps the noise small: parameters
# whose gradient is only rounding error are not moved by a full step.
LLAMA_ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}


def train(case: Case, device: torch.device, report_phase: ReportPhase, virtual: tuple[str, ...]) -> RankTrace:
    """Build and train one case on this rank. Returns what was recorded."""
    base_memory = _peak_memory_bytes(device)
    report_phase("build")
    target = build(case, device)
    steps = []
    with ScaledMMCounter(device) as scaled_mm:
        for step, batch in enumerate(target.tokens, start=1):
            report_phase(f"step {step}")
            steps.append(train_step(case, target, step, batch, scaled_mm))
    return RankTrace(
        rank=dist.get_rank(),
        steps=tuple(steps),
        converted_fqns=target.conversion.converted_fqns,
        unmatched_filters=target.conversion.unmatched_filters,
        peak_memory_bytes=_peak_memory_bytes(device) - base_memory,
        data_digest=target.data_digest,
        software=software(),
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        virtual=virtual,
    )


def train_step(case: Case, target: Target, step: int, batch: torch.Tensor, scaled_mm: ScaledMMCounter) -> StepTrace:
    """Forward, backward, norm, update. The loss is the mean over the tokens of the global batch."""
    started, calls_before = time.perf_counter(), scaled_mm.calls
    inputs, labels = batch[:, :-1], batch[:, 1:]
    with _loss_context(case):
        logits = mask_padded_vocab(target.model(inputs), case)
        loss = summed_loss(logits, labels) / global_token_count(case)
        loss.backward()
    reduced = reduce_over_ranks(loss.detach(), target.model, case.layout.tp)
    target.optimizer.step()
    target.optimizer.zero_grad()
    after_optimizer_step(target.model, case.float8)
    return StepTrace(
        step=step,
        loss=reduced.loss,
        grad_norm=reduced.grad_norm,
        scaled_mm_calls=scaled_mm.calls - calls_before,
        seconds=time.perf_counter() - started,
    )


def global_token_count(case: Case) -> int:
    """Tokens whose loss is averaged in one step, over all data-parallel ranks."""
    return case.train.global_batch * case.train.seq_len


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over the tokens of this rank, in float32 as torchtitan computes it."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")


def mask_padded_vocab(logits: torch.Tensor, case: Case) -> torch.Tensor:
    """Logits [..., padded vocab] with those of padding rows at -inf, so that they take no probability."""
    vocab_size = case.model.vocab_size
    if vocab_size == case.model.padded_vocab_size:
        return logits
    if not isinstance(logits, DTensor):
        return logits.index_fill(-1, torch.arange(vocab_size, logits.size(-1), device=logits.device), -torch.inf)
    mesh, placements = logits.device_mesh, logits.placements
    _, offsets = compute_local_shape_and_global_offset(logits.shape, mesh, placements)
    local = logits.to_local()
    first = min(max(vocab_size - offsets[-1], 0), local.size(-1))
    padding = torch.arange(first, local.size(-1), device=local.device)
    masked = local.index_fill(-1, padding, -torch.inf)
    return DTensor.from_local(masked, mesh, placements, shape=logits.shape, stride=logits.stride())


@contextlib.contextmanager
def _loss_context(case: Case) -> Iterator[None]:
    with loss_parallel() if case.layout.tp > 1 and case.layout.loss_parallel else contextlib.nullcontext():
        yield


class Reduced(NamedTuple):
    """Numbers of one step over all ranks."""

    loss: float
    grad_norm: float


@torch.no_grad()
def reduce_over_ranks(loss: torch.Tensor, model: nn.Module, tp: int) -> Reduced:
    """Global loss and gradient norm from one all-gather of (local loss, local sum of squares), summed in rank order.

    Every TP rank adds up the losses of its own position on the TP axis, so that TP ranks that disagree show.
    """
    local = loss.full_tensor() if isinstance(loss, DTensor) else loss
    mine = torch.stack([local.double(), _squared_norm_share(model)])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    table = torch.stack(everyone)
    return Reduced(loss=table[dist.get_rank() % tp :: tp, 0].sum().item(), grad_norm=table[:, 1].sum().sqrt().item())


def _squared_norm_share(model: nn.Module) -> torch.Tensor:
    """This rank's share of the squared gradient norm: what several ranks hold is divided among them."""
    world = dist.get_world_size()
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for param in model.parameters():
        grad = param.grad
        if grad is None:
            continue
        shards = 1
        if isinstance(grad, DTensor):
            assert isinstance(param, DTensor), "a distributed gradient belongs to a distributed parameter"
            grad = grad.redistribute(placements=param.placements)  # gradients of norms arrive as partial sums
            for axis, placement in enumerate(grad.placements):
                shards *= 1 if placement.is_replicate() else grad.device_mesh.size(axis)
            grad = grad.to_local()
        total += grad.double().square().sum() * (shards / world)
    return total


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def software() -> dict[str, str]:
    """Versions of what computes."""
    return {
        "torch": str(torch.__version__),
        "torchao": str(torchao.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
