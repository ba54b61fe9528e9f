"""The model of a case: a Llama by preset, every size of which can be overridden."""

import functools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from harness.declared import Declares
from harness.matrix.axis import Changes, axis, flag, number

PRESET_WORDS = {"tiny": "tiny", "debug": "debug", "llama3-8b-layer": "llama3.8b.layer"}  # `-` separates words of ids
PositiveInt = Annotated[int, Meta(ge=1)]
BALANCE_COEFFICIENT = 1e-3  # by which `balance` moves a bias: torchtitan's default

_axis = functools.partial(axis, part="model", changes=Changes.TRAINING)


class CaseStruct(
    msgspec.Struct, metaclass=Declares, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base of a case and of its parts: immutable, keyword-only, unknown keys rejected."""


class ModelShape(CaseStruct, frozen=True, kw_only=True):
    """The sizes of a Llama: `dim` and `ffn_dim` in features, the others are counts."""

    dim: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    ffn_dim: PositiveInt

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


# `debug` is torchtitan 0.2.2's llama3 debugmodel (dim 256, 6 layers, 16 heads); `llama3-8b-layer` is one block of
# Llama 3 8B. Both ffn sizes follow their SwiGLU rule (multiple_of 256, ffn_dim_multiplier 1.3 for 8B).
MODEL_PRESETS: dict[str, ModelShape] = {
    "tiny": ModelShape(dim=128, layers=2, heads=8, kv_heads=8, ffn_dim=256),
    "debug": ModelShape(dim=256, layers=6, heads=16, kv_heads=16, ffn_dim=768),
    "llama3-8b-layer": ModelShape(dim=4096, layers=1, heads=32, kv_heads=8, ffn_dim=14336),
}


_PRESETS = tuple(
    flag(word, f"preset {preset} instead of tiny", model=preset)
    for preset, word in PRESET_WORDS.items()
    if preset != "tiny"
)


def _size(name: str, example: str, meaning: str) -> Any:
    return _axis(
        meaning, number(f"{example.partition('.')[0]}.{{{name}}}", example, f"{name} {{0}}"), noise=f"_{name}{{}}"
    )


class Model(CaseStruct, frozen=True, kw_only=True):
    """Which model is trained: a preset, every size of which can be overridden, and the vocabulary size.

    `pad_vocab_to_multiple_of` adds rows to the embedding and to the output layer. Their logits are masked in the loss:
    the result is the same as with the unpadded vocabulary, the shapes are those that a GPU accepts.

    With `bias` every linear of a block has one, colwise and rowwise ones; the output layer has none. With `tied` the
    output layer has no weights of its own: it multiplies by those of the embedding, as in Llama 3.2 1B.

    With `experts` every block but the first is a mixture of experts, as in DeepSeek-V3: a router in float32 sends each
    token to the `top_k` experts of the highest score, a shared expert gets all tokens, and each expert has half of
    `ffn_dim` hidden features. `router`: scores are a softmax over experts, or sigmoids whose chosen ones are divided by
    their sum. `balance`: a bias, which only the choice of experts reads, is moved after every step towards those that
    had fewer tokens than the mean.
    """

    preset: Literal["tiny", "debug", "llama3-8b-layer"] = _axis(
        "model preset; the sizes below override it", *_PRESETS, name="model", unset="tiny"
    )
    dim: PositiveInt | None = _size("dim", "dim.512", "model dim")
    layers: PositiveInt | None = _size("layers", "layers.4", "blocks")
    heads: PositiveInt | None = _size("heads", "heads.4", "attention heads")
    kv_heads: PositiveInt | None = _size("kv_heads", "kvheads.4", "number of KV heads")
    ffn_dim: PositiveInt | None = _size("ffn_dim", "ffn.512", "hidden dim of the feed-forward")
    bias: bool = _axis(
        "the linears of blocks have a bias; the output layer has none",
        flag("bias", "the linears of blocks have a bias", bias=True),
        noise="_bias",
        unset=False,
    )
    tied: bool = _axis(
        "the output layer multiplies by the weights of the embedding",
        flag("tied", "embedding and output layer share their weights", tied=True),
        noise="_tied",
        unset=False,
    )
    experts: Annotated[int, Meta(ge=0, le=1024)] = _axis(
        "experts of every block but the first; 0: all blocks are dense",
        number("moe{experts}", "moe4", "{0} experts in every block but the first"),
        noise="_moe{}",
        example=4,
        unset=0,
    )
    top_k: PositiveInt = _axis(
        "experts that every token is sent to",
        number("top{top_k}", "top1", "every token is sent to {0} experts"),
        needs=("experts",),
        noise="_top{}",
        unset=2,
    )
    router: Literal["softmax", "sigmoid"] = _axis(
        "router scores: softmax, or sigmoid normalized over the chosen experts",
        flag("sigmoid", "router scores are sigmoids, normalized over the chosen experts", router="sigmoid"),
        needs=("experts",),
        noise="_{}",
        unset="softmax",
    )
    balance: bool = _axis(
        "auxiliary-loss-free load balancing (`expert_bias`), updated once per step",
        flag("balance", "auxiliary-loss-free load balancing", balance=True),
        needs=("experts",),
        noise="_balance",
        unset=False,
    )
    vocab_size: PositiveInt = _axis(
        "tokens of the vocabulary",
        number("v{vocab_size}", "v2048", "vocabulary of {0} tokens"),
        part="vocabulary",
        always=True,
        everyday=True,
        unset=2048,
    )
    pad_vocab_to_multiple_of: PositiveInt = _axis(
        "add rows to embedding and output layer up to a multiple of this",
        number("vpad{pad_vocab_to_multiple_of}", "vpad128", "padded to a multiple of {0}"),
        changes=Changes.PADDING,
        part="vocabulary",
        unset=1,
    )

    def __post_init__(self) -> None:
        base = MODEL_PRESETS[self.preset]
        for name in ModelShape.__struct_fields__:
            if getattr(self, name) == getattr(base, name):
                msgspec.structs.force_setattr(self, name, None)  # one spelling per model, so that ids are canonical
        shape = self.shape
        if shape.dim % shape.heads or shape.head_dim % 2:
            raise ValueError(f"dim {shape.dim} does not split into {shape.heads} heads of an even size: change heads")
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{shape.heads} heads is not a multiple of {shape.kv_heads} kv_heads: set kv_heads, too")
        if not self.experts:
            for name, value in (("top_k", 2), ("router", "softmax"), ("balance", False)):
                msgspec.structs.force_setattr(self, name, value)

    def has_experts(self, layer: int) -> bool:
        """Return True if block `layer` (from 0) is a mixture of experts: with `experts` all but the first."""
        return self.experts > 0 and layer > 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return tuple(filter(self.has_experts, range(self.shape.layers)))

    @property
    def expert_dim(self) -> int:
        """Hidden features of every expert, the shared one too."""
        return self.shape.ffn_dim // 2

    @property
    def padded_vocab_size(self) -> int:
        """Return the rows of the embedding and of the output layer."""
        multiple = self.pad_vocab_to_multiple_of
        return -(-self.vocab_size // multiple) * multiple

    @property
    def shape(self) -> ModelShape:
        """Return the sizes of the preset with the overrides applied."""
        return _shape(self)


@functools.lru_cache(maxsize=1024)
def _shape(model: Model) -> ModelShape:
    base = MODEL_PRESETS[model.preset]
    return ModelShape(**{name: getattr(model, name) or getattr(base, name) for name in ModelShape.__struct_fields__})
