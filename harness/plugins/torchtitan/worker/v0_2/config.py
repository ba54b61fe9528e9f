"""A Case in torchtitan's words: its JobConfig and the arguments of its model.

What torchtitan 0.2.2 cannot be asked for is a ValueError that names it, never something similar in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan.config import JobConfig
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

from harness.matrix.linears import OUTPUT_FQN
from harness.matrix.targets import torchtitan_degrees
from harness.plugins.torchtitan.worker.v0_2.step import GRAPH_BACKEND, MAX_NORM, pipeline_options, sequences_of_step

if TYPE_CHECKING:
    from harness.matrix.case import Case
    from harness.worker.targets.target import World

FLAVOR = "case"


def job_config(case: Case, world: World) -> JobConfig:
    """The configuration that a user of torchtitan would write for this case. Raises ValueError where none exists."""
    config = JobConfig()
    config.model.name, config.model.flavor = "llama3", FLAVOR
    config.debug.seed = case.train.seed  # without one, rank 0 draws a seed and broadcasts it
    _set_training(config, case, world)
    _set_optimizer(config, case)
    _set_layout(config, case, world)
    _set_float8(config, case)
    _set_checkpointing(config, case)
    config.compile.enable = case.compile != "none"
    config.compile.components = ["model"]
    config.compile.backend = GRAPH_BACKEND if case.compile == "graph" else "inductor"
    return config


def _set_training(config: JobConfig, case: Case, world: World) -> None:
    training, dtype = config.training, case.train.dtype
    training.steps, training.seq_len = case.train.steps, case.train.seq_len
    training.local_batch_size = sequences_of_step(case, world)
    training.global_batch_size = world.local_batch * case.layout.dp * world.microbatches
    training.max_norm = MAX_NORM if case.train.max_norm is None else case.train.max_norm
    training.dtype = case.wide_dtype
    training.mixed_precision_param, training.mixed_precision_reduce = dtype, case.wide_dtype


def _set_optimizer(config: JobConfig, case: Case) -> None:
    optimizer = config.optimizer
    optimizer.name, optimizer.lr = "AdamW", case.train.lr
    optimizer.beta1, optimizer.beta2 = 0.9, 0.95
    optimizer.eps, optimizer.weight_decay = 1e-5, 0.1
    # "fused" computes in another order than the reference target, and "foreach" cannot mix meshes.
    optimizer.implementation = "for-loop"
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 0, 0.0  # a constant learning rate


def _set_layout(config: JobConfig, case: Case, world: World) -> None:
    parallelism, layout = config.parallelism, case.layout
    for option, degree in torchtitan_degrees(layout.mesh).items():
        setattr(parallelism, option, degree)
    for option, value in pipeline_options(case, world, output=OUTPUT_FQN).items():
        setattr(parallelism, option, value)
    parallelism.fsdp_reshard_after_forward = layout.reshard_after_forward
    parallelism.disable_loss_parallel = not layout.loss_parallel
    parallelism.enable_async_tensor_parallel = layout.async_tp


def _set_float8(config: JobConfig, case: Case) -> None:
    """The converter's own name, under which `parallelize_llama` of 0.2.2 does not find it and takes plain TP styles."""
    if not case.float8.enabled:
        return
    config.model.converters = ["quantize.linear.float8"]
    float8 = config.quantize.linear.float8
    # Without a name the recipe is tensorwise, the only one with a float8 all-gather.
    float8.recipe_name = None if case.float8.recipe == "tensorwise" else case.float8.recipe
    float8.enable_fsdp_float8_all_gather = case.float8.fp8_all_gather
    float8.precompute_float8_dynamic_scale_for_fsdp = case.float8.precompute_scale
    float8.filter_fqns = [*case.float8.filter_fqns, *([] if case.float8.output_layer else [OUTPUT_FQN])]


def _set_checkpointing(config: JobConfig, case: Case) -> None:
    checkpointing, mode = config.activation_checkpoint, case.checkpointing.mode
    checkpointing.mode = "selective" if mode.startswith("selective") else mode
    checkpointing.selective_ac_option = "op" if mode == "selective_op" else str(case.checkpointing.every)


def model_args(case: Case) -> TransformerModelArgs:
    """The Llama of a case, as a flavor of torchtitan's llama3. Rotary embeddings are not scaled (Llama 3, not 3.1)."""
    shape = case.model.shape
    return TransformerModelArgs(
        dim=shape.dim,
        n_layers=shape.layers,
        n_heads=shape.heads,
        n_kv_heads=shape.kv_heads,
        vocab_size=case.model.padded_vocab_size,
        # The hidden size of SwiGLU is 2/3 of 4 dim times the multiplier, rounded up to the multiple: ffn_dim exactly.
        multiple_of=shape.ffn_dim,
        ffn_dim_multiplier=shape.ffn_dim / int(2 * (4 * shape.dim) / 3),
        rope_theta=500_000,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )
