"""Which combinations are excluded and which torch must refuse: every rule by name, with reason and source.

An excluded case is impossible or meaningless. A case with an expected refusal is run, and fails if it trains.
"""

from __future__ import annotations

import functools

import msgspec

from harness.matrix.case import Case
from harness.matrix.cast_rules import OF_CASTS
from harness.matrix.layout import DP_AXES
from harness.matrix.linears import OUTPUT_FQN, Gemm, converted_fqns, gemms, is_misaligned, linear_fqns, shard_sizes
from harness.matrix.resumed import OF_RESUMING
from harness.matrix.rule import Exclusion, Refusal
from harness.matrix.targets import TORCHTITAN, TORCHTITAN_0_3, VERSIONS

_TORCHAO = "https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8"
_TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/v0.2.2/torchtitan"
_TORCHTITAN_0_3 = "https://github.com/pytorch/torchtitan/blob/v0.3.0/torchtitan"
_META = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_meta_registrations.py"
_MODEL_AXES = ("target", "model", "dim", "layers", "heads", "kv_heads", "ffn_dim")
_CONVERSION_AXES = ("recipe", "filter_fqns", "casts")


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules say about a case. `refused_gemms` cause the refusal, in order of execution."""

    exclusions: tuple[Exclusion, ...]
    refusal: Refusal | None
    refused_gemms: tuple[Gemm, ...]


def exclusions(case: Case) -> tuple[Exclusion, ...]:
    """The rules that exclude this case, in the order of `EXCLUSIONS`."""
    return tuple(rule for rule in EXCLUSIONS if rule.applies(case))


@functools.lru_cache(maxsize=4096)
def expected_refusal(case: Case) -> Refusal | None:
    """The refusal that this case must end in, the first in order of execution; None when it must train."""
    return next((rule for rule in REFUSALS if rule.applies(case)), None)


def explain(case: Case) -> Explanation:
    """Everything the rules say about a case."""
    refusal = expected_refusal(case)
    return Explanation(
        exclusions=exclusions(case),
        refusal=refusal,
        refused_gemms=tuple(gemm for gemm in gemms(case) if is_misaligned(case, gemm)) if refusal else (),
    )


def _misaligned_weights(case: Case, *, output: bool) -> bool:
    return any(
        is_misaligned(case, gemm) for gemm in gemms(case) if gemm.role != "wgrad" and (gemm.fqn == OUTPUT_FQN) == output
    )


def _misaligned_tokens(case: Case) -> bool:
    unaligned = case.tokens_per_rank % 16 != 0 and not case.float8.pad_inner_dim
    return unaligned and case.float8.traits.multiplies("wgrad")


def _filter_misses(case: Case) -> bool:
    fqns = linear_fqns(case)
    return any(not any(entry in fqn for fqn in fqns) for entry in case.float8.filter_fqns)


def _filters_a_block_linear(case: Case) -> bool:
    return any(entry in fqn for entry in case.float8.filter_fqns for fqn in linear_fqns(case) if fqn != OUTPUT_FQN)


def _parts_keys_from_values(case: Case) -> bool:
    converted = set(converted_fqns(case))
    keys = {fqn for fqn in linear_fqns(case) if fqn.endswith(".wk")}
    return any((fqn in converted) != (fqn.removesuffix("wk") + "wv" in converted) for fqn in keys)


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        name="batch_divides_dp",
        reason="every data-parallel rank must get the same number of sequences, at least one",
        source=f"{_TORCHTITAN}/train.py",
        axes=("global_batch", *DP_AXES),
        when=lambda case: case.train.global_batch % case.layout.dp != 0,
    ),
    Exclusion(
        name="accumulation_divides_batch",
        reason="every microbatch must have the same number of sequences, at least one",
        source=f"{_TORCHTITAN}/train.py",
        axes=("global_batch", *DP_AXES, "accumulation"),
        when=lambda case: case.train.global_batch % (case.layout.dp * case.train.accumulation) != 0,
    ),
    Exclusion(
        name="accumulation_is_eager",
        reason="what compiled blocks are recorded to save, fuse and cast is that of one forward a step",
        source="docs/architecture.md",
        axes=("accumulation", "compile"),
        when=lambda case: case.train.accumulation > 1 and case.compile != "none",
    ),
    Exclusion(
        name="reduce_grads_needs_microbatches",
        reason="which microbatch FSDP2 reduces gradients after is a choice between several, of dp_shard above 1",
        source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        axes=("reduce_grads", "accumulation", "dp_shard"),
        when=lambda case: (
            case.train.reduce_grads != "every_microbatch"
            and (case.train.accumulation == 1 or case.layout.dp_shard == 1)
        ),
    ),
    Exclusion(
        name="torchtitan_reduces_every_microbatch",
        reason="torchtitan leaves FSDP2's gradient synchronization on for every microbatch",
        source=f"{_TORCHTITAN}/train.py",
        axes=("target", "reduce_grads"),
        when=lambda case: case.target in VERSIONS and case.train.reduce_grads != "every_microbatch",
    ),
    Exclusion(
        name="ignored_tokens_need_sequences",
        reason="the first sequence keeps all of its labels: of a batch of one sequence none is ignored",
        source="docs/architecture.md",
        axes=("ignored_tokens", "global_batch"),
        when=lambda case: case.train.ignored_tokens != "none" and case.train.global_batch == 1,
    ),
    Exclusion(
        name="replicate_needs_shard",
        reason="dp_replicate without dp_shard is DDP, which is not a supported layout; HSDP has both above 1",
        source=f"{_TORCHTITAN}/models/llama3/infra/parallelize.py",
        axes=DP_AXES,
        when=lambda case: case.layout.dp_replicate > 1 and case.layout.dp_shard == 1,
    ),
    Exclusion(
        name="heads_divide_tp",
        reason="TP splits attention by whole heads, so heads and kv_heads must be multiples of tp",
        source="https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html",
        axes=(*_MODEL_AXES, "tp"),
        when=lambda case: bool(case.model.shape.heads % case.layout.tp or case.model.shape.kv_heads % case.layout.tp),
    ),
    Exclusion(
        name="ffn_divides_tp",
        reason="w1 and w3 shard the hidden features over tp and w2 contracts them: ffn_dim must be a multiple of tp",
        source="https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html",
        axes=(*_MODEL_AXES, "tp"),
        when=lambda case: case.model.shape.ffn_dim % case.layout.tp != 0,
    ),
    Exclusion(
        name="vocab_fills_tp",
        reason="every TP rank must hold at least one row of the vocabulary",
        source="https://docs.pytorch.org/docs/stable/distributed.tensor.html",
        axes=("target", "vocab_size", "pad_vocab_to_multiple_of", "tp"),
        when=lambda case: 0 in shard_sizes(case.model.padded_vocab_size, case.layout.tp),
    ),
    Exclusion(
        name="vocab_padding_pads",
        reason="a vocabulary that is already a multiple of pad_vocab_to_multiple_of is not padded: the same run as 1",
        source="docs/architecture.md",
        axes=("vocab_size", "pad_vocab_to_multiple_of"),
        when=lambda case: (
            case.model.pad_vocab_to_multiple_of > 1 and case.model.padded_vocab_size == case.model.vocab_size
        ),
    ),
    Exclusion(
        name="sequence_divides_tp",
        reason="sequence parallelism gives every TP rank the same number of positions",
        source=f"{_TORCHTITAN}/distributed/parallel_dims.py",
        axes=("target", "seq_len", "tp", "sequence_parallel"),
        when=lambda case: case.layout.sequence_parallel and case.train.seq_len % case.layout.tp != 0,
    ),
    Exclusion(
        name="all_gather_needs_fsdp",
        reason="float8 all-gather is how FSDP2 gathers sharded weights: dp_shard must be above 1",
        source=f"{_TORCHAO}/fsdp_utils.py",
        axes=("fp8_all_gather", "recipe", "dp_shard"),
        when=lambda case: case.float8.fp8_all_gather and case.layout.dp_shard == 1,
    ),
    Exclusion(
        name="all_gather_needs_tensorwise",
        reason="enable_fsdp_float8_all_gather only supports tensorwise weight scaling (torchao asserts it)",
        source=f"{_TORCHAO}/config.py",
        axes=("fp8_all_gather", "recipe"),
        when=lambda case: case.float8.fp8_all_gather and not case.float8.traits.gathers_weights_in_float8,
    ),
    Exclusion(
        name="precompute_needs_all_gather",
        reason="precomputed scales are only used by the float8 all-gather",
        source=f"{_TORCHAO}/fsdp_utils.py",
        axes=("precompute_scale", "fp8_all_gather", "recipe"),
        when=lambda case: case.float8.precompute_scale and not case.float8.fp8_all_gather,
    ),
    Exclusion(
        name="reduce_dtype_needs_shards",
        reason="the reduce dtype is that of FSDP2's reduce-scatter: without dp_shard above 1 nothing is reduced",
        source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        axes=("reduce_dtype", "dp_shard"),
        when=lambda case: case.train.reduce_dtype != "float32" and case.layout.dp_shard == 1,
    ),
    Exclusion(
        name="reshard_needs_shards",
        reason="what FSDP2 frees after forward are weights that it gathered: without dp_shard above 1 none are",
        source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        axes=("reshard_after_forward", "dp_shard"),
        when=lambda case: case.layout.reshard_after_forward != "default" and case.layout.dp_shard == 1,
    ),
    Exclusion(
        name="reduce_dtype_of_exact_runs",
        reason="float64 is there so that nothing but FP8 rounds: gradients are reduced in float64",
        source="docs/architecture.md",
        axes=("reduce_dtype", "dtype"),
        when=lambda case: case.train.reduce_dtype != "float32" and case.train.dtype == "float64",
    ),
    Exclusion(
        name="parameters_of_bfloat16",
        reason="parameters in bfloat16 are weights without float32 masters, of runs whose activations are bfloat16",
        source=f"{_TORCHTITAN}/config/job_config.py",
        axes=("parameter_dtype", "dtype"),
        when=lambda case: case.train.parameter_dtype != "float32" and case.train.dtype != "bfloat16",
    ),
    Exclusion(
        name="torchtitan_keeps_float32_parameters",
        reason="what torchtitan's trainer sends and keeps with training.dtype = bfloat16 was not measured",
        source=f"{_TORCHTITAN}/config/job_config.py",
        axes=("target", "parameter_dtype"),
        when=lambda case: case.target in VERSIONS and case.train.parameter_dtype != "float32",
    ),
    Exclusion(
        name="clipping_is_exact",
        reason="the global norm is summed in the order of the layout and multiplies every gradient, so its rounding is "
        "in all of them: clipping is compared in float64",
        source="docs/architecture.md",
        axes=("max_norm", "dtype"),
        when=lambda case: case.train.max_norm is not None and case.train.dtype != "float64",
    ),
    Exclusion(
        name="evaluation_is_plain",
        reason="what FSDP2 gathers after an evaluation was measured with one batch a step and its default resharding",
        source="docs/architecture.md",
        axes=("evaluate", "accumulation", "reshard_after_forward", "dp_shard"),
        when=lambda case: (
            case.train.evaluate and (case.train.accumulation > 1 or case.layout.reshard_after_forward != "default")
        ),
    ),
    Exclusion(
        name="evaluation_is_eager",
        reason="a compiled block is another graph where no backward follows, and the checks of graphs judge those of "
        "training",
        source="docs/architecture.md",
        axes=("evaluate", "compile"),
        when=lambda case: case.train.evaluate and case.compile != "none",
    ),
    *OF_CASTS,
    *OF_RESUMING,
    Exclusion(
        name="tp_styles_need_tp",
        reason="float8 TP styles define how activations are sent between TP ranks: tp must be above 1",
        source=f"{_TORCHAO}/float8_tensor_parallel.py",
        axes=("tp_styles", "recipe", "tp"),
        when=lambda case: case.float8.tp_styles == "float8" and case.layout.tp == 1,
    ),
    Exclusion(
        name="tp_styles_need_tensorwise",
        reason="Float8ColwiseParallel and the other float8 TP styles assume tensorwise scaling of activations",
        source=f"{_TORCHAO}/float8_tensor_parallel.py",
        axes=("tp_styles", "recipe"),
        when=lambda case: case.float8.tp_styles == "float8" and not case.float8.traits.has_tp_styles,
    ),
    Exclusion(
        name="tp_styles_need_converted_blocks",
        reason="Float8ColwiseParallel rejects a linear that is not Float8Linear: no linear of a block may be filtered",
        source=f"{_TORCHAO}/float8_tensor_parallel.py",
        axes=("tp_styles", "recipe", "filter_fqns", *_MODEL_AXES),
        when=lambda case: case.float8.tp_styles == "float8" and _filters_a_block_linear(case),
    ),
    Exclusion(
        name="tp_styles_round_bias_gradients",
        reason="float8 TP styles cast a gradient before the bias gets its own of it, which is then 5 to 19 % off, and "
        "faults could hide in that",
        source=f"{_TORCHAO}/float8_tensor_parallel.py",
        axes=("tp_styles", "recipe", "bias"),
        when=lambda case: case.float8.tp_styles == "float8" and case.model.bias,
    ),
    Exclusion(
        name="filter_matches",
        reason="an entry of filter_fqns that matches no linear of the model has no effect",
        source=f"{_TORCHTITAN}/components/quantization/utils.py",
        axes=("filter_fqns", "recipe", *_MODEL_AXES),
        when=_filter_misses,
    ),
    Exclusion(
        name="filter_contradicts_output",
        reason="filter_fqns excludes the output layer while output_layer asks to convert it",
        source=f"{_TORCHTITAN}/components/quantization/float8.py",
        axes=("target", "filter_fqns", "recipe", "output_layer"),
        when=lambda case: case.float8.output_layer and any(entry in OUTPUT_FQN for entry in case.float8.filter_fqns),
    ),
    Exclusion(
        name="something_converted",
        reason="an FP8 recipe whose filter leaves no linear to convert is a bf16 run under another name",
        source=f"{_TORCHTITAN}/components/quantization/float8.py",
        axes=("recipe", "filter_fqns", "output_layer", *_MODEL_AXES),
        when=lambda case: case.float8.enabled and not converted_fqns(case),
    ),
    Exclusion(
        name="every_reaches_a_layer",
        reason="selective_layer with `every` above the number of layers checkpoints nothing",
        source=f"{_TORCHTITAN}/distributed/activation_checkpoint.py",
        axes=("checkpointing", "checkpoint_every", *_MODEL_AXES),
        when=lambda case: (
            case.checkpointing.mode == "selective_layer" and case.checkpointing.every > case.model.shape.layers
        ),
    ),
    Exclusion(
        name="async_tp_needs_tp",
        reason="async TP splits the collectives of TP: tp must be above 1",
        source=f"{_TORCHTITAN}/distributed/tensor_parallel.py",
        axes=("async_tp", "tp"),
        when=lambda case: case.layout.async_tp and case.layout.tp == 1,
    ),
    Exclusion(
        name="async_tp_needs_compile",
        reason="async TP is a pass over the compiled graph; eager runs would silently use plain TP",
        source=f"{_TORCHTITAN}/distributed/tensor_parallel.py",
        axes=("async_tp", "compile"),
        when=lambda case: case.layout.async_tp and case.compile == "none",
    ),
    Exclusion(
        name="async_tp_needs_sequence_parallel",
        reason="the pass fuses all-gathers and reduce-scatters, which only sequence parallelism puts into the graph",
        source="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/fx_passes/micro_pipeline_tp.py",
        axes=("async_tp", "sequence_parallel", "tp"),
        when=lambda case: case.layout.async_tp and not case.layout.sequence_parallel,
    ),
    Exclusion(
        name="torchtitan_shards_sequences",
        reason="torchtitan's TP plan always shards norms over the sequence: sequence_parallel must be true",
        source=f"{_TORCHTITAN}/models/llama3/infra/parallelize.py",
        axes=("target", "sequence_parallel", "tp"),
        when=lambda case: case.target == TORCHTITAN and not case.layout.sequence_parallel,
    ),
    Exclusion(
        name="torchtitan_pads_no_matmul",
        reason="torchtitan's float8 converter has no option for pad_inner_dim",
        source=f"{_TORCHTITAN}/components/quantization/float8.py",
        axes=("target", "pad_inner_dim", "recipe"),
        when=lambda case: case.target in VERSIONS and case.float8.pad_inner_dim,
    ),
    Exclusion(
        name="torchtitan_reduces_in_float32",
        reason="float32 is the only value of torchtitan's training.mixed_precision_reduce",
        source=f"{_TORCHTITAN}/config/job_config.py",
        axes=("target", "reduce_dtype"),
        when=lambda case: case.target == TORCHTITAN and case.train.reduce_dtype != "float32",
    ),
    Exclusion(
        name="torchtitan_has_no_bias",
        reason="the linears of torchtitan's Llama 3 have no bias",
        source=f"{_TORCHTITAN}/models/llama3/model/model.py",
        axes=("target", "bias"),
        when=lambda case: case.target in VERSIONS and case.model.bias,
    ),
    Exclusion(
        name="torchtitan_evaluates_other_tokens",
        reason="torchtitan's validator reads a data set of its own, so its loss is that of no batch of the case",
        source=f"{_TORCHTITAN}/components/validate.py",
        axes=("target", "evaluate"),
        when=lambda case: case.target in VERSIONS and case.train.evaluate,
    ),
    Exclusion(
        name="torchtitan_resumes_at_start",
        reason="torchtitan loads a checkpoint when a trainer starts; the target takes steps of one that has started",
        source=f"{_TORCHTITAN}/components/checkpoint.py",
        axes=("target", "resume"),
        when=lambda case: case.target in VERSIONS and case.train.resume != "none",
    ),
    Exclusion(
        name="torchtitan_chooses_symm_mem",
        reason="torchtitan has no option for the form of the fused operators: symm_mem keeps its default",
        source=f"{_TORCHTITAN}/distributed/tensor_parallel.py",
        axes=("target", "symm_mem", "async_tp", "tp"),
        when=lambda case: case.target in VERSIONS and case.layout.symm_mem == "fallback",
    ),
    Exclusion(
        name="torchtitan_waits_for_no_embedding",
        reason="torchtitan hands a compiled block the output of the embedding unfinished: wait_for_embedding must be "
        "false with TP",
        source=f"{_TORCHTITAN}/models/llama3/infra/parallelize.py",
        axes=("target", "wait_for_embedding", "compile", "tp"),
        when=lambda case: (
            case.target == TORCHTITAN
            and case.compile != "none"
            and case.layout.tp > 1
            and case.layout.wait_for_embedding
        ),
    ),
    Exclusion(
        name="torchtitan_0_3_scales_by_rows",
        reason="torchtitan 0.3.0 has the recipes rowwise and rowwise_with_gw_hp only: tensorwise went, and with it the "
        "float8 all-gather, precomputed scales and the float8 TP styles",
        source=f"{_TORCHTITAN_0_3}/components/quantization/float8.py",
        axes=("target", "recipe"),
        when=lambda case: case.target == TORCHTITAN_0_3 and case.float8.recipe == "tensorwise",
    ),
    Exclusion(
        name="torchtitan_0_3_shards_the_loss",
        reason="torchtitan 0.3.0 has no option for the loss over the whole vocabulary: with TP it is sharded",
        source=f"{_TORCHTITAN_0_3}/components/loss.py",
        axes=("target", "loss_parallel", "tp"),
        when=lambda case: case.target == TORCHTITAN_0_3 and case.layout.tp > 1 and not case.layout.loss_parallel,
    ),
    Exclusion(
        name="torchtitan_0_3_waits_for_the_embedding",
        reason="torchtitan 0.3.0 hands a compiled block a plain tensor, which is always finished: "
        "wait_for_embedding must be true",
        source=f"{_TORCHTITAN_0_3}/distributed/spmd_types.py",
        axes=("target", "wait_for_embedding"),
        when=lambda case: case.target == TORCHTITAN_0_3 and not case.layout.wait_for_embedding,
    ),
    Exclusion(
        name="torchtitan_0_3_checkpoints_every_block",
        reason="torchtitan 0.3.0 checkpoints all blocks, whole or by operator: selective_layer went",
        source=f"{_TORCHTITAN_0_3}/distributed/activation_checkpoint.py",
        axes=("target", "checkpointing"),
        when=lambda case: case.target == TORCHTITAN_0_3 and case.checkpointing.mode == "selective_layer",
    ),
    Exclusion(
        name="torchtitan_0_3_converts_keys_with_values",
        reason="torchtitan 0.3.0 configures the projections of keys and values as one: a filter keeps both or neither",
        source=f"{_TORCHTITAN_0_3}/models/common/attention.py",
        axes=("filter_fqns", "recipe", *_MODEL_AXES),
        when=lambda case: case.target == TORCHTITAN_0_3 and _parts_keys_from_values(case),
    ),
)

# The same requirement is worded differently in the meta registration ("Expected self.size(1) to be divisible by 16, …",
# "Expected both dimensions of mat2 to be divisible by 16 ...") and in the CUDA kernel ("Expected trailing dimension of
# mat1 to be divisible by 16 ...", "mat2 shape (128x1128) must be divisible by 16").
_ALIGNMENT_PATTERN = (
    r"Expected self\.size\(1\) to be divisible by 16"
    r"|Expected both dimensions of mat2 to be divisible by 16"
    r"|Expected trailing dimension of mat1 to be divisible by 16"
    r"|mat2 shape \(.*must be divisible by 16"
)

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        name="block_alignment",
        reason="a weight dimension of a converted linear inside a block, as one TP rank holds it, is not a multiple of "
        "16; pad_inner_dim cannot help, because every weight dimension is an output dimension of some matmul",
        source=_META,
        axes=(*_MODEL_AXES, "tp", *_CONVERSION_AXES),
        when=lambda case: _misaligned_weights(case, output=False),
        check="alignment",
        pattern=_ALIGNMENT_PATTERN,
    ),
    Refusal(
        name="output_alignment",
        reason="the converted output layer holds a shard of the vocabulary that is not a multiple of 16; pad_inner_dim "
        "cannot help, because the shard is the output dimension of the forward matmul; padding the vocabulary to a "
        "multiple of 16 * tp can",
        source=_META,
        axes=("vocab_size", "pad_vocab_to_multiple_of", *_MODEL_AXES, "tp", "output_layer", *_CONVERSION_AXES),
        when=lambda case: _misaligned_weights(case, output=True),
        check="alignment",
        pattern=_ALIGNMENT_PATTERN,
    ),
    Refusal(
        name="token_alignment",
        reason="the tokens per rank are the inner dimension of the weight-gradient matmul and not a multiple of 16; "
        "pad_inner_dim or rowwise_with_gw_hp (weight gradient in high precision) make the case valid",
        source=f"{_TORCHAO}/float8_linear.py",
        axes=("target", "global_batch", "accumulation", "seq_len", *DP_AXES, "recipe", "casts", "pad_inner_dim"),
        when=_misaligned_tokens,
        check="alignment",
        pattern=_ALIGNMENT_PATTERN,
    ),
)
