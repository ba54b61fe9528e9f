"""The scope: what people know from FP8 training and look for here, and why it is not there.

The one list. What asks for it in configurations of other tools is in `harness/plugins/bugs/spellings.toml`.
"""

import re

import msgspec


class OutOfScope(msgspec.Struct, frozen=True, kw_only=True):
    """Something that no case can have. `words`: a pattern of what people write for it in ids, axes and values."""

    name: str
    reason: str
    words: str = ""

    @property
    def text(self) -> str:
        return f"{self.name} is out of scope: {self.reason}"


SCOPE = (
    OutOfScope(
        name="a mixture of experts",
        reason="the reference has a small one of its own: write experts, top_k and ep in a case",
        words=r"expert_parallel\w*\d*",
    ),
    OutOfScope(
        name="pipeline parallelism",
        reason="the reference trains in one: write pp, schedule and accumulation in a case",
        words=r"pipeline_parallel\w*\d*",
    ),
    OutOfScope(
        name="context parallelism",
        reason="the reference trains with it: write cp and sequence_order in a case",
        words=r"context_parallel\w*\d*",
    ),
    OutOfScope(
        name="expert tensor parallelism",
        reason="each expert is whole on one rank of ep; tensor parallelism shards the other linears only",
        words=r"(etp|expert_tensor_parallel\w*)\d*",
    ),
    OutOfScope(
        name="MX formats other than MXFP8",
        reason="torchao trains in MXFP8 alone; its MXLinear went before 0.18",
        words=r"mx(fp[46])?(_\w+)?",
    ),
    OutOfScope(
        name="emulated MXFP8",
        reason="MXFP8 runs as a GPU runs it, with kernels chosen by AUTO; an emulated matmul is a bfloat16 one",
    ),
    OutOfScope(
        name="NVFP4",
        reason="4-bit values need another matmul than torch._scaled_mm with float8",
        words=r"nv(fp)?4?(_\w+)?|fp4",
    ),
    OutOfScope(
        name="block-wise scaling",
        reason="recipes are those of Float8LinearConfig: one scale per tensor or per row",
        words=r"(block|group)wise\w*",
    ),
    OutOfScope(
        name="delayed scaling",
        reason="torchao removed it; every recipe computes a scale from the tensor that it casts",
        words=r"delayed(_\w+)?",
    ),
    OutOfScope(name="TransformerEngine", reason="its modules and kernels are other software than torchao"),
    OutOfScope(name="FP8 of another library", reason="its casts and kernels are not those of torchao"),
    OutOfScope(
        name="FSDP1", reason="the float8 all-gather exists in FSDP2 (fully_shard) only", words=r"fsdp1|fsdp_?v1"
    ),
    OutOfScope(
        name="ZeRO stage 1 or 2",
        reason="it keeps whole parameters on every rank; FSDP2 stands for stage 3, which shards them",
    ),
    OutOfScope(
        name="DDP",
        reason="replicas come with shards, as HSDP (hsdp2x2); dp_replicate alone is excluded",
        words=r"ddp\d*",
    ),
    OutOfScope(
        name="float16",
        reason="float8 training is for models in bfloat16 or float32",
        words=r"f16|fp16|float16|half",
    ),
    OutOfScope(name="LoRA", reason="frozen weights with adapters need a case that does not train every weight"),
    OutOfScope(name="another compiler", reason="blocks are compiled by torch.compile, or not at all"),
    OutOfScope(name="a memory budget of the compiler", reason="the compiler chooses what is computed again"),
    OutOfScope(name="inference", reason="a case trains"),
    OutOfScope(
        name="checkpoint save and load",
        reason="a case starts from its seed, and loads only what it saved itself (resume)",
    ),
)


def out_of_scope(word: str) -> OutOfScope | None:
    plain = re.sub(r"[.-]", "_", word.lower())
    return next((feature for feature in SCOPE if feature.words and re.fullmatch(feature.words, plain)), None)
