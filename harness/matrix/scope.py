"""The scope: what people know from FP8 training and look for here, and why it is not there.

The one list: of what ids, axes and values cannot say, and of what reports and configurations may ask for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

_SEVERAL = r"[2-9]|[1-9]\d+"  # any degree above 1
_MIXTURES = r".*(?:mixtral|moe|-a\d+b|llama-?4|deepseek[-_]?v[23]|gpt-oss|glm-4\.5|kimi).*"  # models with experts


class OutOfScope(msgspec.Struct, frozen=True, kw_only=True):
    """Something that no case can have.

    `words`: a pattern of what people write for it in ids, axes and values. `options`: by the last part of an option's
    name, a pattern of the values that ask for it. `calls`: a pattern of names in Python. `said`: one of prose.
    `float8_of`: one of repositories whose float8 it is. `axes`: of a case of the reference, which has it, each with the
    smallest value that asks for it; a report that only mentions it is asked for details instead of refused.
    """

    name: str
    reason: str
    words: str = ""
    options: Mapping[str, str] = {}
    calls: str = ""
    said: str = ""
    float8_of: str = ""
    axes: Mapping[str, int] = {}

    def question(self, words: str) -> str:
        """What to ask of a report that has these words for it."""
        return f"was it run ({words})? {self.reason if self.axes else 'No case has it'}"

    @property
    def text(self) -> str:
        return f"{self.name} is out of scope: {self.reason}"


def _options(names: str, values: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), values)


FSDP1 = OutOfScope(
    name="FSDP1",
    reason="the float8 all-gather exists in FSDP2 (fully_shard) only",
    words=r"fsdp1|fsdp_?v1",
    options={"fsdp_version": r"1", "fsdp": r"(?:full_shard|shard_grad_op|hybrid_shard)\b.*"},
    calls=r"FSDP|FullyShardedDataParallel",
    said=r"(?i)\b(?:FSDP ?v?1|fairscale)\b",
)
DDP = OutOfScope(
    name="DDP",
    reason="replicas come with shards, as HSDP (hsdp2x2); dp_replicate alone is excluded",
    words=r"ddp\d*",
    options={"distributed_type": r"multi_gpu", "strategy": r"ddp\w*"},
    calls=r"DDP|DistributedDataParallel",
    said=r"(?i)\b(?:DDP|DistributedDataParallel)\b",
)
EXPERTS = OutOfScope(
    name="a mixture of experts",
    reason="the reference has a small one of its own: write experts, top_k and ep in a case",
    axes={"experts": 1, "ep": 2},
    words=r"expert_parallel\w*\d*",
    options={
        **_options("name module config config_file", r"(?:.*/)?(?:llama4|deepseek).*|.*_moe.*"),
        **_options("base_model model model_name model_name_or_path", _MIXTURES),
    },
    calls=r"_?grouped_mm|_scaled_grouped_mm",
    said=r"(?i)\b(?:MoE|mixture[- ]of[- ]experts|expert[- ]parallel\w*|grouped[ _]?(?:gemm|mm)"
    r"|(?:routed|shared)[ _]experts?|Mixtral|DeepSeek\w*|gpt-oss|Llama[- ]?4|Qwen[-\w.]*-A\d+B)\b",
)
PIPELINES = OutOfScope(
    name="pipeline parallelism",
    reason="the reference trains in one: write pp, schedule and accumulation in a case",
    axes={"pp": 2},
    words=r"pipeline_parallel\w*\d*",
    calls=r"PipelineStage|ScheduleGPipe|Schedule1F1B",
    said=r"\bPP(?![A-Za-z]| ?= ?1\b)|\b(?i:pipeline[- ]parallel|pp(?:_size)? ?(?:[>+]|=(?! ?1\b)))",
)
CONTEXT = OutOfScope(
    name="context parallelism",
    reason="the reference trains with it: write cp and sequence_order in a case",
    axes={"cp": 2},
    words=r"context_parallel\w*\d*",
    calls=r"context_parallel",
    said=r"\bCP(?![A-Za-z]| ?= ?1\b)|\b(?i:context[- ]parallel)",
)
SCOPE = (
    EXPERTS,
    PIPELINES,
    CONTEXT,
    OutOfScope(
        name="expert tensor parallelism",
        reason="each expert is whole on one rank of ep; tensor parallelism shards the other linears only",
        words=r"(etp|expert_tensor_parallel\w*)\d*",
        options=_options("expert_tensor_parallel_degree expert_tensor_parallel_size", _SEVERAL),
        said=r"\bETP(?![A-Za-z]| ?= ?1\b)|\b(?i:expert[- ]tensor[- ]parallel)",
    ),
    OutOfScope(
        name="MX formats other than MXFP8",
        reason="torchao trains in MXFP8 alone; its MXLinear went before 0.18",
        words=r"mx(fp[46])?(_\w+)?",
        options=_options("recipe_name fp8_recipe converters", r"mxfp[46]\w*|mx|quantize\.\w+\.mx"),
        calls=r"MXLinear\w*",
        said=r"(?i)\b(?:MXFP[46]|MXLinear)\b",
    ),
    OutOfScope(
        name="emulated MXFP8",
        reason="MXFP8 runs as a GPU runs it, with kernels chosen by AUTO; an emulated matmul is a bfloat16 one",
        options={
            "kernel_preference": r"(?:\w+\.)*emulated",
            **_options("recipe_name from_recipe() MXFP8TrainingRecipe()", r"(?:\w+\.)*mxfp8_emulated\w*"),
        },
        said=r"(?i)\bMXFP8_EMULATED\w*",
    ),
    OutOfScope(
        name="NVFP4",
        reason="4-bit values need another matmul than torch._scaled_mm with float8",
        words=r"nv(fp)?4?(_\w+)?|fp4",
        options=_options("recipe_name fp8_recipe fp4_recipe converters", r"nvfp4\w*|quantize\.\w+\.nvfp4"),
        calls=r"NVFP4\w*",
        said=r"(?i)\bNVFP4\b",
    ),
    OutOfScope(
        name="block-wise scaling",
        reason="recipes are those of Float8LinearConfig: one scale per tensor or per row",
        words=r"(block|group)wise\w*",
        options=_options("recipe_name fp8_recipe", r"(?:block|group)wise\w*"),
        calls=r"Float8Blockwise\w*",
        said=r"(?i)\bblock-?wise (?:scaling|fp8|float8)\b",
    ),
    OutOfScope(
        name="delayed scaling",
        reason="torchao removed it; every recipe computes a scale from the tensor that it casts",
        words=r"delayed(_\w+)?",
        options={
            **_options("fp8_recipe fp8_linear scaling_type", r"(?:\w+\.)?delayed"),
            **_options("scaling_type_input scaling_type_weight scaling_type_grad_output", r"(?:\w+\.)?delayed"),
        },
        calls=r"DELAYED|DelayedScaling|sync_float8_amax_and_scale_history",
        said=r"(?i)\bdelayed[ -]?scaling\b",
    ),
    OutOfScope(
        name="TransformerEngine",
        reason="its modules and kernels are other software than torchao",
        options={
            "backend": r"te|msamp",
            "fp8_backend": r"te|msamp",
            "transformer_impl": r"transformer_engine",
            "transformer_engine": r"true",
            **_options("fp8_format fp8_recipe", r"(?!none$).+"),
            **_options("fp8_hybrid fp8_e4m3 fp8_param fp8_param_gather first_last_layers_bf16", r"true"),
            "fp8": r"e4m3|hybrid",
        },
        calls=r"te|transformer_engine|fp8_autocast",
        said=r"(?i)\b(?:transformer[ _-]?engine|(?-i:TE)|MS-?AMP)\b",
        float8_of=r"(?i).*(?:megatron|nemo)(?!.*automodel).*",
    ),
    OutOfScope(
        name="FP8 of another library",
        reason="its casts and kernels are not those of torchao",
        calls=r"HybridParallelPlugin|linear_fp8",
        float8_of=r"(?i)hpcaitech/.*|.*/(?:ColossalAI|DeepSpeed|optimum-(?:neuron|habana)|torch-spyre|MS-AMP)",
    ),
    FSDP1,
    OutOfScope(
        name="ZeRO",
        reason="DeepSpeed shards the optimizer in its own way; cases have FSDP2 (fully_shard)",
        options={
            "distributed_type": r"deepspeed",
            "deepspeed": r"true|.+\.json",
            **_options("zero_1 zero_2 zero_3", r"true"),
        },
        calls=r"deepspeed",
        said=r"(?i)\b(?:deepspeed|ZeRO-?[123])\b",
    ),
    DDP,
    OutOfScope(
        name="float16",
        reason="float8 training is for models in bfloat16 or float32",
        words=r"f16|fp16|float16|half",
        options={"fp16": r"true", "mixed_precision_param": r"float16"},
        said=r"(?i)\bfp16 (?:loss|gradient|scal|train)\w*|\bGradScaler\b",
    ),
    OutOfScope(
        name="LoRA",
        reason="frozen weights with adapters need a case that does not train every weight",
        options={"adapter": r"q?lora"},
        calls=r"LoraConfig|get_peft_model",
        said=r"(?i)\bQ?LoRA\b",
    ),
    OutOfScope(
        name="another compiler",
        reason="blocks are compiled by torch.compile, or not at all",
        calls=r"thunder|torch_xla|torch_tensorrt",
    ),
    OutOfScope(
        name="a memory budget of the compiler",
        reason="the compiler chooses what is computed again",
        options={"mode": r"memory_budget"},
    ),
    OutOfScope(
        name="inference",
        reason="a case trains",
        calls=r"inference_mode|Float8InferenceLinear|trtexec"
        r"|(?i:float8_?(?:dynamic|static)_?activation_?float8_?weight\w*|float8_?weight_?only\w*)",
        said=r"(?i)\b(?:inference|Float8InferenceLinear|vLLM|SGLang|gpt-fast|TensorRT(?:-LLM)?|trtexec|ONNX)\b",
        float8_of=r"(?i)(?:vllm-project|sgl-project)/.*|.*/(?:AutoFP8|Model-Optimizer|auto-round|llm-compressor)",
    ),
    OutOfScope(
        name="checkpoint save and load",
        reason="a case starts from its seed, and loads only what it saved itself (resume)",
        calls=r"(?:dcp|checkpoint)\.(?:save|load)",
        said=r"(?i)\b(?:load|sav|resum|convert|export)\w*[^.\n]{0,40}checkpoints?\b|\bDCP\b|\bstate[_ ]dicts?\b",
    ),
)
SIZED: Mapping[str, OutOfScope] = {axis: feature for feature in SCOPE for axis in feature.axes}  # by axis


def out_of_scope(word: str) -> OutOfScope | None:
    plain = re.sub(r"[.-]", "_", word.lower())
    return next((feature for feature in SCOPE if feature.words and re.fullmatch(feature.words, plain)), None)


def asked_by_option(key: str, value: object) -> OutOfScope | None:
    last = key.rpartition(".")[2]
    values = value if isinstance(value, list | tuple) else str(value).split(",")
    for feature in SCOPE:
        pattern = feature.options.get(last)
        if pattern and any(re.fullmatch(pattern, str(item).strip().lower()) for item in values):
            return feature
    return None


def asked_by_call(name: str) -> OutOfScope | None:
    for feature in SCOPE:
        if feature.calls and re.search(rf"(?:^|\.)(?:{feature.calls})(?:\.|$)", name):
            return feature
    return None
