"""The Trainer of torchtitan 0.3.0 as a target: built from a case, and driven one `train_step` at a time."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import Configurable
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.tools.utils import NoColor
from torchtitan.tools.utils import device_type as torchtitan_device
from torchtitan.trainer import Trainer

from harness.matrix.linears import OUTPUT_FQN
from harness.plugins.torchtitan.worker.config import GRAPH_BACKEND, trainer_config
from harness.plugins.torchtitan.worker.shims import float64_kept, garbage_collected, local_rank
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.targets.target import StepResult
from harness.worker.virtual.graph_backend import graph_backend

if TYPE_CHECKING:
    from harness.matrix.case import Case
    from harness.worker.targets.target import World


def trained(case: Case, world: World) -> TrainedByTorchtitan:
    """Return the case as torchtitan trains it. ValueError where it cannot, or was imported for other devices."""
    if world.device.type != torchtitan_device:
        raise ValueError(f"torchtitan was imported for {torchtitan_device}, this rank runs on {world.device.type}")
    if case.compile == "graph" and GRAPH_BACKEND not in torch.compiler.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(graph_backend, name=GRAPH_BACKEND)  # torchtitan takes backends by name alone
    loss = _Loss.Config(global_vocab_size=case.model.padded_vocab_size, vocab_size=case.model.vocab_size)
    parts = {"tokenizer": _Nothing.Config(), "dataloader": _Nothing.Config(), "metrics": _Metrics.Config()}
    with local_rank(world.device), garbage_collected():
        trainer = Trainer(trainer_config(case, world, loss, **parts))
        if case.layout.pp > 1:
            _infer_shapes(trainer, torch.zeros(world.local_batch, case.train.seq_len, dtype=torch.int64))
        target = TrainedByTorchtitan(trainer)
    add_names(target.model)
    return target


def _infer_shapes(trainer: Any, tokens: torch.Tensor) -> None:
    """Let stages learn the shapes that they send now: they compute one microbatch for it, as in no other step.

    `tokens`: [local_batch, seq_len].
    """
    inputs, labels, *options = trainer.post_dataloading_process({"input": tokens.to(trainer.device)}, tokens)
    schedule = trainer.pp_schedule
    initialize = getattr(schedule, "_initialize_stages", None) or schedule._initialize_stage
    of_loss = {"global_valid_tokens": torch.tensor(tokens.numel(), device=trainer.device)}
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


class _Nothing(Configurable):  # type: ignore[misc]  # torchtitan is not installed where mypy runs
    """In place of a tokenizer and a data loader: the harness brings the tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        """Nothing to configure."""

    def __init__(self, config: Config, **_: object) -> None:
        self.config = config


class Logged(NamedTuple):
    """What torchtitan logs of a step: the mean loss over the tokens of the global batch, the norm before clipping."""

    loss: float
    grad_norm: float


class _Metrics(Configurable):  # type: ignore[misc]
    """A metrics processor that keeps the last logged loss and gradient norm, and measures nothing.

    torchtitan's own asks an accelerator for its memory and its name.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        """Nothing to configure."""

    color = NoColor()
    device_memory_monitor = types.SimpleNamespace(
        device_name="",
        get_peak_stats=lambda: types.SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0),
    )

    def __init__(self, config: Config, **_: object) -> None:
        self.config = config
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.logged = Logged(float("nan"), float("nan"))

    def should_log(self, _: int) -> bool:
        """Return True: the loss is only summed over ranks to be logged."""
        return True

    def log(self, _: int, loss: float, __: float, grad_norm: float, **___: object) -> None:
        self.logged = Logged(loss, grad_norm)


class _Loss(CrossEntropyLoss):  # type: ignore[misc]
    """torchtitan's loss, with what it cannot say: float64 is kept, and rows that pad the vocabulary are masked."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):  # type: ignore[misc]
        """`vocab_size`: without padding."""

        vocab_size: int

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self._vocab_size = config.vocab_size

    def __call__(self, pred: torch.Tensor, *args: Any, **options: Any) -> Any:
        """The loss of this rank over the tokens of the global batch, and no metrics."""
        with float64_kept():
            return super().__call__(self._masked(pred), *args, **options)

    def _masked(self, pred: torch.Tensor) -> torch.Tensor:
        """Logits [batch, seq, rows of this TP rank] with those of the padding set to -inf."""
        first = max(0, self._vocab_size - self._first_row())
        if first >= pred.size(-1):
            return pred
        return pred.index_fill(-1, torch.arange(first, pred.size(-1), device=pred.device), -torch.inf)

    def _first_row(self) -> int:
        tp = spmd_mesh_size("tp")
        mesh = current_spmd_mesh()
        return 0 if tp == 1 or mesh is None else -(-self.global_vocab_size // tp) * mesh.get_local_rank("tp")


def add_names(model: Any) -> None:
    """Let modules be found by the names of `linears.py` first. Nothing else changes: torchtitan's own names still hold.

    In 0.3.0 the projections of attention lie in a module `qkv_linear`, and the output layer is `lm_head`.
    """
    if getattr(model, "lm_head", None) is not None:  # a stage of a pipeline may have none
        _put_first(model, {OUTPUT_FQN: model.lm_head})
    for block in model.layers.values():
        projections = block.attention.qkv_linear
        _put_first(block.attention, {name: getattr(projections, name) for name in ("wq", "wk", "wv")})


def _put_first(module: nn.Module, children: dict[str, nn.Module]) -> None:
    others = dict(module._modules)
    module._modules.clear()
    module._modules.update(children | others)
