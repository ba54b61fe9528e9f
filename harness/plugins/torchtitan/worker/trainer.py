"""torchtitan's Trainer as a target: built from a case, and driven one `train_step` at a time.

What torchtitan cannot be asked for is a rule of `rules.toml`, never something similar in its place.
"""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import BaseLoss, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter, MXFP8LinearConverter
from torchtitan.config import CompileConfig, Configurable, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.utils import NoColor
from torchtitan.tools.utils import device_type as torchtitan_device
from torchtitan.trainer import Trainer

from harness.matrix.dims.pp import modules_of_stage, stage_count
from harness.matrix.linears import OUTPUT_FQN, converted_fqns, is_converted, linear_fqns
from harness.plugins.torchtitan.worker.context_parallel import OfAllRanks, parallelize
from harness.plugins.torchtitan.worker.shims import float64_kept, garbage_collected, local_rank
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.targets.target import StepResult
from harness.worker.virtual.graph_backend import graph_backend

if TYPE_CHECKING:
    from harness.matrix.case import Case
    from harness.worker.targets.target import World

GRAPH_BACKEND = "fp8_harness_graph"  # the name under which dynamo knows the backend of `compile = "graph"`
# Clipping multiplies by 1 below the limit, and is out of reach: active clipping amplifies rounding to percents.
_MAX_NORM = 1e30
_BLOCK = 128  # of a block mask, by default: the queries of a CP rank are whole blocks
# The schedules of `torch.distributed.pipelining`, by those of a case.
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
}
# torchtitan's own names, by those of `linears.py`. The keys and the values of attention share one configuration.
_CONFIGURED_AS = {
    "attention.wq": "attention.qkv_linear.wq",
    "attention.wk": "attention.qkv_linear.wkv",
    "attention.wv": "attention.qkv_linear.wkv",
}
_ANY = {"weight": lambda weight: weight.zero_()}  # the harness writes the weights


def trainer_config(case: Case, world: World, loss: BaseLoss.Config, **parts: Any) -> Trainer.Config:
    """Return the configuration that a user of torchtitan would write for this case. ValueError if none exists.

    `parts` replace what reads files or needs an accelerator: tokenizer, data loader and metrics.
    """
    return Trainer.Config(
        model_spec=_model_spec(case, len(world.plays.positions)),
        loss=loss,
        optimizer=_optimizer(case),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),  # a constant learning rate
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=world.local_batch * case.train.seq_len,
            num_tokens_per_train_step=case.train.global_batch * case.train.seq_len,
            max_context_length=case.train.seq_len,
            steps=case.train.steps,
            max_norm=_MAX_NORM,
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


def _model_spec(case: Case, pieces: int) -> ModelSpec:
    """torchtitan's llama3 in the sizes of the case, converted, and without checkpoints on disk.

    `pieces`: of every row, that ranks of context parallelism have and this one stands for.
    """
    model = llama_config(case)
    if case.float8.enabled:
        model = (_mxfp8(case) if case.float8.traits.kernel == "mx" else _float8(case)).build().convert(model)
    return ModelSpec(
        name="llama3",
        flavor="case",
        model=model,
        parallelize_fn=parallelize_llama if pieces == case.layout.cp == 1 else partial(parallelize, pieces=pieces),
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def _float8(case: Case) -> Float8LinearConverter.Config:
    kept = {configured_name(fqn) for fqn in linear_fqns(case) if not is_converted(case, fqn)}
    return Float8LinearConverter.Config(
        recipe_name=case.float8.recipe, filter_fqns=sorted(kept), model_compile_enabled=case.compile != "none"
    )


def _mxfp8(case: Case) -> MXFP8LinearConverter.Config:
    """Without names it converts every linear, so a case that converts none has no such configuration."""
    converted = {configured_name(fqn) for fqn in converted_fqns(case)}
    if not converted:
        raise ValueError("torchtitan cannot be told to convert nothing: without names it converts every linear")
    return MXFP8LinearConverter.Config(fqns=sorted(converted), model_compile_enabled=case.compile != "none")


def configured_name(fqn: str) -> str:
    """Return the name by which torchtitan's filter knows a linear of `linears.py`."""
    if fqn == OUTPUT_FQN:
        return "lm_head"
    layer, name = fqn.split(".", 2)[1:]
    return f"layers.{layer}.{_CONFIGURED_AS.get(name, name)}"


def llama_config(case: Case) -> Llama3Model.Config:
    """Return the Llama of a case, with a projection each for queries, keys and values, and without RoPE scaling.

    torchtitan's own flavors fuse the three.
    """
    shape, vocab = case.model.shape, case.model.padded_vocab_size
    return Llama3Model.Config(
        dim=shape.dim,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=shape.dim, param_init=_ANY),
        norm=RMSNorm.Config(normalized_shape=shape.dim, param_init=_ANY),
        lm_head=Linear.Config(in_features=shape.dim, out_features=vocab, param_init=_ANY),
        layers=[_block(case) for _ in range(shape.layers)],
    )


def _block(case: Case) -> Llama3TransformerBlock.Config:
    shape = case.model.shape
    return Llama3TransformerBlock.Config(
        attention_norm=RMSNorm.Config(normalized_shape=shape.dim, param_init=_ANY),
        ffn_norm=RMSNorm.Config(normalized_shape=shape.dim, param_init=_ANY),
        attention=make_gqa_config(
            dim=shape.dim,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            wqkv_param_init=_ANY,
            wo_param_init=_ANY,
            inner_attention=FlexAttention.Config(block_size=math.gcd(_BLOCK, case.local_seq_len)),
            rope=ComplexRoPE.Config(dim=shape.head_dim, max_context_length=case.train.seq_len, theta=500_000),
        ),
        feed_forward=make_ffn_config(dim=shape.dim, hidden_dim=shape.ffn_dim, w1_param_init=_ANY, w2w3_param_init=_ANY),
    )


def trained(case: Case, world: World) -> TrainedByTorchtitan:
    """Return the case as torchtitan trains it. ValueError where it cannot, or was imported for other devices."""
    if world.device.type != torchtitan_device:
        raise ValueError(f"torchtitan was imported for {torchtitan_device}, this rank runs on {world.device.type}")
    if case.compile == "graph" and GRAPH_BACKEND not in torch.compiler.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(graph_backend, name=GRAPH_BACKEND)  # torchtitan takes backends by name alone
    loss = _Loss.Config(global_vocab_size=case.model.padded_vocab_size, vocab_size=case.model.vocab_size)
    parts = {"tokenizer": _Nothing.Config(), "dataloader": _Nothing.Config(), "metrics": _Metrics.Config()}
    with local_rank(world.device), garbage_collected():
        config, positions = trainer_config(case, world, loss, **parts), world.plays.positions
        trainer = OfAllRanks(config, positions) if len(positions) > 1 else Trainer(config)
        if case.layout.pp > 1:
            _infer_shapes(trainer, torch.zeros(world.local_batch, case.train.seq_len, dtype=torch.int64))
        target = TrainedByTorchtitan(trainer)
    add_names(target.model)
    return target


def _infer_shapes(trainer: Any, tokens: torch.Tensor) -> None:
    """Let stages learn the shapes that they send now: they compute one microbatch for it, as in no other step.

    `tokens`: [local_batch, seq_len].
    """
    given, targets = packed(tokens.to(trainer.device), tokens.to(trainer.device))
    inputs, labels, options = trainer.post_dataloading_process(given, targets)
    schedule = trainer.pp_schedule
    initialize = getattr(schedule, "_initialize_stages", None) or schedule._initialize_stage
    of_loss = {"global_valid_tokens": torch.tensor(tokens.numel(), device=trainer.device)}
    with trainer.train_context():
        initialize((inputs,) if trainer.pp_has_first_stage else (), options, labels, of_loss)
    for part in trainer.model_parts:
        part.zero_grad(set_to_none=True)


def packed(tokens: torch.Tensor, labels: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a batch as torchtitan's data loaders pack it: one row of tokens, whose positions start at 0 per sequence.

    `tokens`, `labels`: [local_batch, seq_len].
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0])
    return {"input": tokens.reshape(-1), "positions": positions}, labels.reshape(-1)


class TrainedByTorchtitan:
    """What a Trainer of torchtitan trains: its model, and its `train_step` on the microbatches of the harness."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        parts = trainer.model_parts
        self.model: nn.Module = parts[0] if len(parts) == 1 else StagesOfRank(parts)

    def step(self, microbatches: Sequence[torch.Tensor], labels: Sequence[torch.Tensor] | None = None) -> StepResult:
        """Return one `train_step`; returns the loss and the gradient norm that torchtitan logs."""
        self._trainer.step += 1
        labels = labels or [tokens[:, 1:] for tokens in microbatches]
        batches = [packed(tokens[:, :-1], label) for tokens, label in zip(microbatches, labels, strict=True)]
        self._trainer.train_step(self._trainer.batch_generator(batches))
        logged: Logged = self._trainer.metrics_processor.logged
        return self._of_last_stage(logged.loss), logged.grad_norm

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
        device_name="", get_peak_stats=lambda: types.SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
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


def add_names(model: Any) -> None:
    """Let modules be found by the names of `linears.py` first. Nothing else changes: torchtitan's own names still hold.

    In torchtitan the projections of attention lie in a module `qkv_linear`, and the output layer is `lm_head`.
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
