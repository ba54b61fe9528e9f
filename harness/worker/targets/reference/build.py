"""Builds the target: an example of applying FP8, TP, checkpointing, compile and FSDP2 in the correct order.

The solo witness (`solo.py`) is built here too: the same steps on one rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.matrix.case import Case
from harness.worker import data
from harness.worker.targets.reference import solo
from harness.worker.targets.reference.checkpointing import apply_checkpointing
from harness.worker.targets.reference.compiled import apply_compile
from harness.worker.targets.reference.float8 import Conversion, convert
from harness.worker.targets.reference.model import Llama
from harness.worker.targets.reference.parallel import Meshes, apply_fsdp, apply_tp, build_meshes

VOCAB_FQNS = ("tok_embeddings.weight", "output.weight")

# Llama 2 (arXiv:2307.09288, section 2.2). An eps of 1e-5 instead of torch's 1e-8 also keeps the noise small: a gradient
# that is only rounding error does not cause a full step.
LLAMA_ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}


class Target(NamedTuple):
    """A built case, ready to train."""

    model: Llama
    optimizer: torch.optim.Optimizer
    meshes: Meshes
    conversion: Conversion
    data_digest: str
    # [steps, replays, local_batch, seq_len + 1]: one replay, or one per dp rank for the solo witness
    tokens: torch.Tensor


def build(case: Case, device: torch.device, *, solo_witness: bool = False) -> Target:
    """Build model, parallelism and optimizer. The order matters: FP8, TP, checkpointing, compile, FSDP2."""
    meshes = solo.meshes(case, device.type) if solo_witness else build_meshes(case, device.type)
    with torch.device(device):
        model = Llama(case.model.shape, vocab_size=case.model.padded_vocab_size, seq_len=case.train.seq_len)
    weights = initial_weights(model, case)
    if case.train.dtype == "float64":
        model.double()
    load_weights(model, weights)
    conversion = convert(model, case.float8)
    if meshes.tp is not None:
        apply_tp(model, meshes.tp, case)
    apply_checkpointing(model.layers, case.checkpointing)
    if case.compile != "none":
        apply_compile(model, meshes.tp, case)
    if meshes.dp is not None:
        apply_fsdp(model, meshes.dp, case)
    tokens = global_tokens(case)
    replays = solo.replays(tokens, case) if solo_witness else tokens[:, None, batch_slice(case, meshes)]
    return Target(
        model=model,
        optimizer=build_optimizer(model, case),
        meshes=meshes,
        conversion=conversion,
        data_digest=data.digest({"tokens": tokens, **weights}),
        tokens=torch.from_numpy(replays).to(device),
    )


def batch_slice(case: Case, meshes: Meshes) -> slice:
    """The sequences of the global batch that this rank trains on. TP ranks of one dp rank share them."""
    dp_rank = 0
    if meshes.dp is not None:
        for axis in meshes.dp.mesh_dim_names or ():
            dp_rank = dp_rank * meshes.dp[axis].size() + meshes.dp.get_local_rank(axis)
    return slice(dp_rank * case.local_batch, (dp_rank + 1) * case.local_batch)


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


def initial_weights(model: Llama, case: Case) -> dict[str, data.Weights]:
    """Full initial weights of every parameter by FQN, float32, without the padding rows of the vocabulary."""
    vocab_size, padded = case.model.vocab_size, case.model.padded_vocab_size
    shapes = {fqn: tuple(param.shape) for fqn, param in model.named_parameters()}
    for fqn in VOCAB_FQNS:
        assert shapes[fqn][0] == padded, f"{fqn} has {shapes[fqn][0]} rows, expected {padded}"
        shapes[fqn] = (vocab_size, *shapes[fqn][1:])
    return {fqn: data.make_weight(fqn, shape, seed=case.train.seed) for fqn, shape in shapes.items()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, data.Weights]) -> None:
    """Copy full weights, which are equal on every rank, into a model before it is distributed. Padding is zero."""
    for fqn, param in model.named_parameters():
        param.zero_()
        param[: len(weights[fqn])].copy_(torch.from_numpy(weights[fqn]))


def build_optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """AdamW with one parameter group per device mesh: its foreach kernels cannot mix meshes."""
    groups: dict[object, list[nn.Parameter]] = {}
    for param in model.parameters():
        groups.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
    return torch.optim.AdamW([{"params": params} for params in groups.values()], lr=case.train.lr, **LLAMA_ADAMW)
