"""A Case in the words of torchtitan 0.3.0: the configurations of its Trainer and its Llama.

What it cannot be asked for is a rule in `matrix/rules.toml`, never something similar in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchtitan.components.loss import BaseLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.components.quantization.mx import MXFP8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from harness.matrix.linears import OUTPUT_FQN, converted_fqns, is_converted, linear_fqns, modules_of_stage, stage_count

if TYPE_CHECKING:
    from harness.matrix.case import Case
    from harness.worker.targets.target import World

GRAPH_BACKEND = "fp8_harness_graph"  # the name under which dynamo knows the backend of `compile = "graph"`
# Clipping multiplies by 1 below the limit, and is out of reach: active clipping amplifies rounding to percents.
_MAX_NORM = 1e30
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
# The options of the section `parallelism` for the degrees of a mesh.
_DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
}
_ANY = {"weight": lambda weight: weight.zero_()}  # the harness writes the weights


def trainer_config(case: Case, world: World, loss: BaseLoss.Config, **parts: Any) -> Trainer.Config:
    """The configuration that a user of torchtitan would write for this case. Raises ValueError where none exists.

    `parts` replace what reads files or needs an accelerator: tokenizer, data loader and metrics.
    """
    return Trainer.Config(
        model_spec=_model_spec(case),
        loss=loss,
        optimizer=_optimizer(case),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),  # a constant learning rate
        training=TrainingConfig(
            local_batch_size=_sequences_of_step(case, world),
            global_batch_size=world.local_batch * case.layout.dp * world.microbatches,
            seq_len=case.train.seq_len,
            steps=case.train.steps,
            max_norm=_MAX_NORM,
            disable_cuda_graphs=True,  # on by default, and captured on CUDA only
            dtype=case.wide_dtype,
            mixed_precision_param=case.train.dtype,
            mixed_precision_reduce=case.wide_dtype,
        ),
        parallelism=ParallelismConfig(  # with the default SPMD backend: what users get who name none
            **_degrees(case.layout.mesh),
            fsdp_reshard_after_forward=case.layout.reshard_after_forward,
            enable_sequence_parallel=case.layout.sequence_parallel,
            **_pipeline_options(case, world),
        ),
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


def _degrees(mesh: Mapping[str, int]) -> dict[str, int]:
    """The degrees of a mesh by torchtitan's options, in its section `parallelism`."""
    return {_DEGREES[axis]: degree for axis, degree in mesh.items()}


def _sequences_of_step(case: Case, world: World) -> int:
    """The local batch size: a pipeline cuts it into microbatches, without one they are accumulated."""
    return world.local_batch * (world.microbatches if case.layout.pp > 1 else 1)


def _pipeline_options(case: Case, world: World) -> dict[str, Any]:
    """The options of a pipeline, with the stages of `matrix/linears.py`."""
    if case.layout.pp == 1:
        return {}
    stages = [modules_of_stage(case, stage) for stage in range(stage_count(case.layout))]
    return {
        "pipeline_parallel_schedule": _SCHEDULES[case.layout.schedule],
        "pipeline_parallel_microbatch_size": world.local_batch,
        "module_fqns_per_model_part": [["lm_head" if fqn == OUTPUT_FQN else fqn for fqn in stage] for stage in stages],
    }


def _optimizer(case: Case) -> Any:
    optimizer = default_adamw(lr=case.train.lr, eps=1e-5)
    # "fused" computes in another order than the reference target, and "foreach" cannot mix meshes.
    optimizer.implementation = "for-loop"
    return optimizer


def _model_spec(case: Case) -> ModelSpec:
    """torchtitan's llama3 in the sizes of the case, converted, and without checkpoints on disk."""
    model = llama_config(case)
    if case.float8.enabled:
        model = (_mxfp8(case) if case.float8.traits.in_blocks else _float8(case)).build().convert(model)
    return ModelSpec(
        name="llama3",
        flavor="case",
        model=model,
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def _float8(case: Case) -> Float8LinearConverter.Config:
    kept = {configured_name(fqn) for fqn in linear_fqns(case) if not is_converted(case, fqn)}
    return Float8LinearConverter.Config(
        recipe_name=case.float8.recipe,
        filter_fqns=sorted(kept),
        model_compile_enabled=case.compile != "none",
    )


def _mxfp8(case: Case) -> MXFP8LinearConverter.Config:
    """Without names it converts every linear, so a case that converts none has no such configuration."""
    converted = {configured_name(fqn) for fqn in converted_fqns(case)}
    if not converted:
        raise ValueError("torchtitan 0.3.0 cannot be told to convert nothing: without names it converts every linear")
    return MXFP8LinearConverter.Config(fqns=sorted(converted), model_compile_enabled=case.compile != "none")


def configured_name(fqn: str) -> str:
    """Return the name by which torchtitan's filter knows a linear of `linears.py`."""
    if fqn == OUTPUT_FQN:
        return "lm_head"
    layer, name = fqn.split(".", 2)[1:]
    return f"layers.{layer}.{_CONFIGURED_AS.get(name, name)}"


def llama_config(case: Case) -> Llama3Model.Config:
    """Return the Llama of a case, with a projection each for queries, keys and values, and without RoPE scaling.

    torchtitan's own flavors fuse the three, and attend with FlexAttention, whose backward runs on CUDA only.
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
            inner_attention=ScaledDotProductAttention.Config(),
            rope=ComplexRoPE.Config(dim=shape.head_dim, max_seq_len=case.train.seq_len, theta=500_000),
        ),
        feed_forward=make_ffn_config(dim=shape.dim, hidden_dim=shape.ffn_dim, w1_param_init=_ANY, w2w3_param_init=_ANY),
    )
