"""torchtitan's `train_step`: what it is given, and what it logs."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torchtitan.tools.utils import NoColor
from torchtitan.tools.utils import device_type as torchtitan_device

from harness.matrix.case import Case
from harness.matrix.linears import OUTPUT_FQN
from harness.matrix.stages import modules_of_stage, stage_count
from harness.plugins.torchtitan.worker.shims import garbage_collected, local_rank
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.targets.target import StepResult, World
from harness.worker.virtual.graph_backend import graph_backend

GRAPH_BACKEND = "fp8_harness_graph"  # the name under which dynamo knows the backend of `compile = "graph"`
# Clipping multiplies by 1 below the limit, and is out of reach: active clipping amplifies rounding to percents.
MAX_NORM = 1e30


# The schedules of `torch.distributed.pipelining`, by those of a case.
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
}


def sequences_of_step(case: Case, world: World) -> int:
    """The local batch size: a pipeline cuts it into microbatches, without one they are accumulated."""
    return world.local_batch * (world.microbatches if case.layout.pp > 1 else 1)


def pipeline_options(case: Case, world: World, *, output: str) -> dict[str, Any]:
    """The options of a pipeline, with the stages of `matrix/stages.py`. `output`: the name of the output layer."""
    if case.layout.pp == 1:
        return {}
    stages = [modules_of_stage(case, stage) for stage in range(stage_count(case.layout))]
    return {
        "pipeline_parallel_schedule": _SCHEDULES[case.layout.schedule],
        "pipeline_parallel_microbatch_size": world.local_batch,
        "module_fqns_per_model_part": [[output if fqn == OUTPUT_FQN else fqn for fqn in stage] for stage in stages],
    }


def infer_shapes(trainer: Any, tokens: torch.Tensor, **of_loss: object) -> None:
    """Let stages learn the shapes that they send now: they compute one microbatch for it, as in no other step.

    `tokens` [local_batch, seq_len]; `of_loss`: what the loss gets besides logits and labels.
    """
    inputs, labels, *options = trainer.post_dataloading_process({"input": tokens.to(trainer.device)}, tokens)
    schedule = trainer.pp_schedule
    initialize = getattr(schedule, "_initialize_stages", None) or schedule._initialize_stage
    with trainer.train_context():
        initialize((inputs,) if trainer.pp_has_first_stage else (), options[-1], labels, of_loss)
    for part in trainer.model_parts:
        part.zero_grad(set_to_none=True)


class TrainedByTorchtitan:
    """What a Trainer of torchtitan trains: its model, and its `train_step` on the microbatches of the harness."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        parts = trainer.model_parts
        self.model: nn.Module = parts[0] if len(parts) == 1 else StagesOfRank(parts)

    def step(self, microbatches: Sequence[torch.Tensor], labels: Sequence[torch.Tensor] | None = None) -> StepResult:
        """One `train_step`; returns the loss and the gradient norm that torchtitan logs."""
        self._trainer.step += 1
        labels = labels or [tokens[:, 1:] for tokens in microbatches]
        # A batch as torchtitan's data loaders give it: named inputs, and labels, each [local_batch, seq_len].
        batches = [({"input": tokens[:, :-1]}, label) for tokens, label in zip(microbatches, labels, strict=True)]
        self._trainer.train_step(self._trainer.batch_generator(batches))
        logged: Logged = self._trainer.metrics_processor.logged
        return self._of_last_stage(logged.loss), logged.grad_norm

    def _of_last_stage(self, loss: float) -> float:
        """The loss of a pipeline, which torchtitan logs on the ranks of its last stage alone."""
        if self._trainer.parallel_dims.pp == 1:
            return loss
        group = self._trainer.parallel_dims.get_mesh("pp").get_group()
        shared = torch.tensor(loss, dtype=torch.float64, device=torchtitan_device)
        with unobserved():
            dist.broadcast(shared, group=group, group_src=group.size() - 1)
        return float(shared)


def trained_by(make_trainer: Callable[[], Any], case: Case, world: World) -> TrainedByTorchtitan:
    """The case as a Trainer trains it. Raises ValueError when torchtitan was imported for another kind of device."""
    if world.device.type != torchtitan_device:
        raise ValueError(f"torchtitan was imported for {torchtitan_device}, this rank runs on {world.device.type}")
    if case.compile == "graph" and GRAPH_BACKEND not in torch.compiler.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(graph_backend, name=GRAPH_BACKEND)  # torchtitan takes backends by name alone
    with local_rank(world.device), garbage_collected():
        return TrainedByTorchtitan(make_trainer())


class StagesOfRank(nn.Module):
    """The stages that a rank trains as one model, with the names that modules have in the whole one."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for stage in stages:
            for name, module in stage.named_children():
                if name == "layers":
                    self.layers.update(dict(module.named_children()))
                else:
                    setattr(self, name, module)
        self.stages = nn.ModuleList(stages)  # last, so that other names come first


class Logged(NamedTuple):
    """What torchtitan logs of a step: the mean loss over the tokens of the global batch, the norm before clipping."""

    loss: float
    grad_norm: float


class Metrics:
    """A metrics processor that keeps the last logged loss and gradient norm, and measures nothing.

    torchtitan's own asks an accelerator for its memory and its name.
    """

    color = NoColor()
    device_memory_monitor = types.SimpleNamespace(
        device_name="",
        get_peak_stats=lambda: types.SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0),
    )

    def __init__(self) -> None:
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.logged = Logged(float("nan"), float("nan"))

    def should_log(self, _: int) -> bool:
        """Every step: the loss is only summed over ranks to be logged."""
        return True

    def log(self, _: int, loss: float, __: float, grad_norm: float, **___: object) -> None:
        self.logged = Logged(loss, grad_norm)
