"""Trains `tiny_gpt` under fp8-harness: what a case asks for, in the words of `tiny_gpt.config`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tiny_gpt.config import Config, Float8
from tiny_gpt.trainer import Trainer

from harness.matrix.case import Case
from harness.worker.targets.target import World
from harness.worker.virtual.graph_backend import graph_backend

ACCUMULATE = 2  # microbatches of an update, as in training
BACKENDS = {"none": None, "graph": graph_backend, "inductor": "inductor"}


class Target:
    """What the harness drives."""

    def __init__(self, trainer: Trainer) -> None:
        self.model = trainer.model
        self._trainer = trainer

    def step(self, microbatches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """One update: the mean loss over all ranks, and the norm of the gradients before clipping."""
        return self._trainer.step([part for batch in microbatches for part in batch.chunk(ACCUMULATE)])


def build(case: Case, world: World) -> Target:
    """The trainer of a case on this rank. The harness then overwrites its weights."""
    check_supported(case)
    shape, layout, float8 = case.model.shape, case.layout, case.float8
    config = Config(
        vocab_size=case.model.vocab_size,
        dim=shape.dim,
        layers=shape.layers,
        heads=shape.heads,
        hidden=shape.ffn_dim,
        seq_len=case.train.seq_len,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        tp=layout.tp,
        fsdp=world.fsdp,
        dtype=case.train.dtype,
        float8=Float8(
            recipe=float8.recipe,
            all_gather=float8.fp8_all_gather,
            precompute_scale=float8.precompute_scale,
            pad_inner_dim=float8.pad_inner_dim,
            filter_fqns=float8.filter_fqns,
        )
        if float8.enabled
        else None,
        checkpoint_blocks=case.checkpointing.mode == "full",
        compile_backend=BACKENDS[case.compile],
        lr=case.train.lr,
        max_norm=math.inf,  # clipping makes every gradient depend on the rounding of all of them
    )
    return Target(Trainer(config, world.device))


def check_supported(case: Case) -> None:
    """Raises for what a case can ask for and `tiny_gpt` cannot do: it must not train something else instead."""
    asked = {
        "sequence_parallel": case.layout.sequence_parallel and case.layout.tp > 1,
        "loss_parallel": case.layout.loss_parallel and case.layout.tp > 1,
        "reshard_after_forward": case.layout.reshard_after_forward != "default",
        "accumulation": case.train.accumulation > 1,
        "tp_styles": case.float8.tp_styles != "plain",
        "output_layer": case.float8.output_layer,
        "kv_heads": case.model.shape.kv_heads != case.model.shape.heads,
        "pad_vocab_to_multiple_of": case.model.pad_vocab_to_multiple_of > 1,
        "reduce_dtype": case.train.reduce_dtype != "float32",
        "checkpointing": case.checkpointing.mode not in ("none", "full"),
    }
    if refused := [name for name, is_asked in asked.items() if is_asked]:
        raise NotImplementedError(f"tiny_gpt has no {', '.join(refused)}")
