"""torchtitan's Trainer as a target: built from a case, and driven one `train_step` at a time.

What torchtitan cannot be asked for is a rule of `rules.toml`, never something similar in its place.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import BaseLoss, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig, Configurable, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.tools.utils import NoColor
from torchtitan.tools.utils import device_type as torchtitan_device
from torchtitan.trainer import Trainer

from harness.matrix.dims.pp import modules_of_stage, stage_count
from harness.matrix.linears import OUTPUT_FQN
from harness.plugins.torchtitan import REGISTERED
from harness.plugins.torchtitan.worker.context_parallel import OfAllRanks
from harness.plugins.torchtitan.worker.model import add_names, model_spec
from harness.plugins.torchtitan.worker.registered import registered_spec
from harness.plugins.torchtitan.worker.shims import float64_kept, garbage_collected, local_rank
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.targets.target import StepResult
from harness.worker.virtual.graph_backend import graph_backend

if TYPE_CHECKING:
    from harness.matrix.case import Case
    from harness.worker.targets.target import World

GRAPH_BACKEND = "fp8_harness_graph"  # the name under which dynamo knows the backend of `compile = "graph"`
# Of a case that does not clip: the limit cannot be turned off, and is out of reach.
_MAX_NORM = 1e30
# The schedules of `torch.distributed.pipelining`, by those of a case.
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
}
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]  # inputs with their positions, and labels: [tokens] each


def trainer_config(case: Case, world: World, loss: BaseLoss.Config, **parts: Any) -> Trainer.Config:
    """Return the configuration that a user of torchtitan would write for this case. ValueError if none exists.

    `parts` replace what reads files or needs an accelerator: tokenizer, data loader and metrics.
    """
    return Trainer.Config(
        model_spec=registered_spec(case) if case.target in REGISTERED else model_spec(case, len(world.plays.positions)),
        loss=loss,
        optimizer=_optimizer(case),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),  # a constant learning rate
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=world.local_batch * case.train.seq_len,
            num_tokens_per_train_step=case.layout.batches * world.microbatches * world.local_batch * case.train.seq_len,
            max_context_length=case.train.seq_len,
            steps=case.train.steps,
            max_norm=case.train.max_norm or _MAX_NORM,
            disable_cuda_graphs=True,  # on by default, and captured on CUDA only
            dtype=case.wide_dtype,
            mixed_precision_param=case.train.dtype,
            mixed_precision_reduce=case.wide_dtype,
        ),
        parallelism=_parallelism(case, world),
        activation_checkpoint={"none": None, "full": FullAC.Config(), "selective_op": SelectiveAC.Config()}[
            case.checkpointing.mode
        ],
        compile=CompileConfig(
            enable=case.compile != "none",
            enable_async_tensor_parallel=case.layout.async_tp,
            components=["model"],
            backend=GRAPH_BACKEND if case.compile == "graph" else "inductor",
        ),
        # A validation step has one microbatch, or all of a pipeline.
        validator=Validator.Config(
            enable=True, steps=world.microbatches if case.layout.pp == 1 else 1, dataloader=_Given.Config()
        ),
        debug=DebugConfig(seed=case.train.seed, enable_structured_logging=False),
        **parts,
    )


def _parallelism(case: Case, world: World) -> ParallelismConfig:
    """With the default SPMD backend: what users get who name none. Pipelines have the stages of `matrix/dims/pp.py`."""
    layout = case.layout
    named = lambda fqn: "lm_head" if fqn == OUTPUT_FQN else fqn  # noqa: E731
    stages = [list(map(named, modules_of_stage(case, stage))) for stage in range(stage_count(layout))]
    return ParallelismConfig(
        pipeline_parallel_degree=layout.pp,
        data_parallel_replicate_degree=layout.dp_replicate,
        data_parallel_shard_degree=layout.dp_shard // layout.cp,
        context_parallel_degree=layout.cp,
        context_parallel_load_balancer="headtail" if layout.sequence_order == "headtail" else None,
        tensor_parallel_degree=layout.tp,
        expert_parallel_degree=layout.ep,
        fsdp_reshard_after_forward=layout.reshard_after_forward,
        enable_sequence_parallel=layout.sequence_parallel,
        pipeline_parallel_schedule=_SCHEDULES[layout.schedule],
        num_pp_microbatches=world.microbatches,
        module_fqns_per_model_part=stages if layout.pp > 1 else None,
    )


def _optimizer(case: Case) -> Any:
    optimizer = default_adamw(lr=case.train.lr, eps=1e-5)
    # "fused" computes in another order than the reference target, and "foreach" cannot mix meshes.
    optimizer.implementation = "for-loop"
    return optimizer


def trained(case: Case, world: World) -> TrainedByTorchtitan:
    """Return the case as torchtitan trains it. ValueError where it cannot, or was imported for other devices."""
    if world.device.type != torchtitan_device:
        raise ValueError(f"torchtitan was imported for {torchtitan_device}, this rank runs on {world.device.type}")
    if case.compile == "graph" and GRAPH_BACKEND not in torch.compiler.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(graph_backend, name=GRAPH_BACKEND)  # torchtitan takes backends by name alone
    loss = _Loss.Config(global_vocab_size=case.model.padded_vocab_size, vocab_size=case.model.vocab_size)
    parts = {"tokenizer": _Nothing.Config(), "dataloader": _Given.Config(), "metrics": _Metrics.Config()}
    with local_rank(world.device), garbage_collected():
        config, positions = trainer_config(case, world, loss, **parts), world.plays.positions
        trainer = OfAllRanks(config, positions) if len(positions) > 1 else Trainer(config)
        if case.layout.pp > 1:
            tokens = torch.zeros(world.local_batch, case.train.seq_len, dtype=torch.int64, device=trainer.device)
            _infer_shapes(trainer, packed(tokens, tokens))
        target = TrainedByTorchtitan(trainer)
    if case.target not in REGISTERED:
        add_names(target.model)
    return target


@unobserved()
def _infer_shapes(trainer: Any, batch: Batch, *, training: bool = True) -> None:
    """Let stages of a pipeline learn the shapes that they send now: they compute one microbatch for it.

    They would in the first step, and whenever a forward pass without a backward follows one with it, or the other way
    round.
    """
    inputs, labels, options = trainer.post_dataloading_process(*batch)
    schedule = trainer.pp_schedule
    initialize = getattr(schedule, "_initialize_stages", None) or schedule._initialize_stage
    of_loss = {"global_valid_tokens": torch.tensor(labels.numel(), device=trainer.device)} if training else {}
    schedule._has_backward = training
    with trainer.train_context(), torch.set_grad_enabled(training):
        initialize((inputs,) if trainer.pp_has_first_stage else (), options, labels, of_loss)
    schedule._has_backward = True
    for part in trainer.model_parts:
        part.zero_grad(set_to_none=True)


def packed(tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None) -> Batch:
    """Return a batch as torchtitan's data loaders pack it: one row of tokens, whose positions start at 0 per document.

    `tokens`, `labels`, `positions`: [local_batch, seq_len]. Without positions every sequence is a document.
    """
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return {"input": tokens.reshape(-1), "positions": positions.reshape(-1)}, labels.reshape(-1)


def _batches(
    microbatches: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor] | None = None,
    positions: Sequence[torch.Tensor] | None = None,
) -> list[Batch]:
    """Return the arguments of `Target.step` as torchtitan's data loaders give them."""
    labels = labels or [tokens[:, 1:] for tokens in microbatches]
    inputs = (tokens[:, :-1] for tokens in microbatches)
    return list(map(packed, inputs, labels, positions or itertools.repeat(None)))


class TrainedByTorchtitan:
    """What a Trainer of torchtitan trains: its model, and its `train_step` and validator on what the harness gives."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        parts = trainer.model_parts
        self.model: nn.Module = parts[0] if len(parts) == 1 else StagesOfRank(parts)

    def step(self, *given: Sequence[torch.Tensor]) -> StepResult:
        """Return one `train_step`; returns the loss and the gradient norm that torchtitan logs."""
        self._trainer.step += 1
        self._trainer.train_step(self._trainer.batch_generator(_batches(*given)))
        logged: Logged = self._trainer.metrics_processor.logged
        return self._of_last_stage(logged.loss), logged.grad_norm

    def evaluate(self, *given: Sequence[torch.Tensor]) -> float:
        """Return the loss that torchtitan's validator logs of these microbatches."""
        validator = self._trainer.validator
        validator.dl_config.batches = batches = _batches(*given)
        pipelined = self._trainer.parallel_dims.pp > 1
        if pipelined:
            _infer_shapes(self._trainer, batches[0], training=False)
        validator.validate(self._trainer.model_parts, self._trainer.step)
        if pipelined:
            _infer_shapes(self._trainer, batches[0])
        return self._of_last_stage(self._trainer.metrics_processor.validation_loss)

    def _of_last_stage(self, loss: float) -> float:
        """Return the loss of a pipeline, which torchtitan logs on the ranks of its last stage alone."""
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
    """In place of a tokenizer: the harness brings the tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        """Nothing to configure."""

    def __init__(self, config: Config, **_: object) -> None:
        self.config = config


class _Given(Configurable):  # type: ignore[misc]
    """A data loader of the microbatches that the harness gives. The validator builds one for every evaluation."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        """`repeat`: what the validator asks of every data loader. The batches are as many as its steps need."""

        batches: Sequence[Batch] = ()
        repeat: bool = False

    def __init__(self, config: Config, **_: object) -> None:
        self.config = config

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.config.batches)

    def close(self) -> None:
        """Close nothing."""


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
        device_name="", get_peak_stats=lambda: types.SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    )

    def __init__(self, config: Config, **_: object) -> None:
        self.config = config
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.logged = Logged(float("nan"), float("nan"))
        self.validation_loss = float("nan")

    def should_log(self, _: int) -> bool:
        """Return True: the loss is only summed over ranks to be logged."""
        return True

    def log(self, _: int, loss: float, __: float, grad_norm: float, **___: object) -> None:
        self.logged = Logged(loss, grad_norm)

    def log_validation(self, loss: float, step: int) -> None:
        self.validation_loss = loss


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
        """Return the loss of this rank over the tokens of the global batch, and no metrics."""
        with float64_kept():
            return super().__call__(self._masked(pred), *args, **options)

    def _masked(self, pred: torch.Tensor) -> torch.Tensor:
        """Return the logits [tokens, rows of this TP rank] with those of the padding set to -inf."""
        first = max(0, self._vocab_size - self._first_row())
        if first >= pred.size(-1):
            return pred
        return pred.index_fill(-1, torch.arange(first, pred.size(-1), device=pred.device), -torch.inf)

    def _first_row(self) -> int:
        tp = spmd_mesh_size("tp")
        mesh = current_spmd_mesh()
        return 0 if tp == 1 or mesh is None else -(-self.global_vocab_size // tp) * mesh.get_local_rank("tp")
