"""The scope: what people know from FP8 training and look for here, and why it is not there."""

from __future__ import annotations

import re

import msgspec


class OutOfScope(msgspec.Struct, frozen=True, kw_only=True):
    """Something that no case can have. `words` is a pattern of what people write for it in ids, axes and values."""

    name: str
    words: str
    reason: str

    @property
    def text(self) -> str:
        """What it is and why it is out of scope."""
        return f"{self.name} is out of scope: {self.reason}"


SCOPE = (
    OutOfScope(
        name="context parallelism",
        words=r"(cp|context_parallel\w*)\d*",
        reason="every rank computes attention over whole sequences",
    ),
    OutOfScope(
        name="pipeline parallelism",
        words=r"(pp|pipeline_parallel\w*)\d*",
        reason="every rank has all layers of the model",
    ),
    OutOfScope(
        name="expert parallelism (mixture of experts)",
        words=r"(moe|ep|etp|experts|expert_(tensor_)?parallel\w*)\d*",
        reason="the model is a dense Llama without grouped matmuls",
    ),
    OutOfScope(
        name="MX scaling (MXFP8)",
        words=r"mx(fp\d+)?(_\w+)?",
        reason="scales of blocks of 32 values need another matmul than torch._scaled_mm with float32 scales",
    ),
    OutOfScope(
        name="NVFP4",
        words=r"nv(fp)?4?(_\w+)?|fp4",
        reason="4-bit values need another matmul than torch._scaled_mm with float8",
    ),
    OutOfScope(
        name="block-wise scaling",
        words=r"(block|group)wise\w*",
        reason="recipes are those of Float8LinearConfig: one scale per tensor or per row",
    ),
    OutOfScope(
        name="delayed scaling",
        words=r"delayed(_\w+)?",
        reason="torchao removed it; every recipe computes a scale from the tensor that it casts",
    ),
    OutOfScope(
        name="FSDP1",
        words=r"fsdp1|fsdp_?v1",
        reason="the float8 all-gather exists in FSDP2 (fully_shard) only",
    ),
    OutOfScope(
        name="DDP",
        words=r"ddp\d*",
        reason="replicas come with shards, as HSDP (hsdp2x2); dp_replicate alone is excluded",
    ),
    OutOfScope(
        name="float16",
        words=r"f16|fp16|float16|half",
        reason="float8 training is for models in bfloat16 or float32",
    ),
)


def out_of_scope(word: str) -> OutOfScope | None:
    """What the word means, where that is out of scope; None otherwise."""
    plain = re.sub(r"[.-]", "_", word.lower())
    return next((each for each in SCOPE if re.fullmatch(each.words, plain)), None)
