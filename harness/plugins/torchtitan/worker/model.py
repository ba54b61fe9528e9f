"""The model of a case in torchtitan: Llama 3, or Qwen3 where it has experts, converted and distributed."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.components.quantization import Float8LinearConverter, MXFP8LinearConverter
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from harness.matrix.linears import OUTPUT_FQN, ROUTER, is_converted, linear_fqns
from harness.plugins.torchtitan.worker.context_parallel import parallelize
from harness.plugins.torchtitan.worker.experts import add_seams, converted_experts, moe_config, put_first

if TYPE_CHECKING:
    from collections.abc import Iterable

    from harness.matrix.case import Case

_BLOCK = 128  # of a block mask, by default: the queries of a CP rank are whole blocks
# torchtitan's own names, by those of `linears.py`. The keys and the values of attention share one configuration.
_CONFIGURED_AS = {
    "attention.wq": "attention.qkv_linear.wq",
    "attention.wk": "attention.qkv_linear.wkv",
    "attention.wv": "attention.qkv_linear.wkv",
}
_ANY = {"weight": lambda weight: weight.zero_()}  # the harness writes the weights


def model_spec(case: Case, pieces: int) -> ModelSpec:
    """torchtitan's llama3 or qwen3 in the sizes of the case, converted, and without checkpoints on disk.

    `pieces`: of every row, that ranks of context parallelism have and this one stands for.
    """
    model, mixtures = model_config(case), case.model.experts > 0
    distribute: Any = parallelize_qwen3 if mixtures else parallelize_llama
    if case.layout.cp > 1 or pieces > 1:
        distribute = partial(parallelize, pieces=pieces)
    if case.float8.enabled:
        linears = linear_fqns(case)
        kept = [configured_name(fqn) for fqn in linears if not is_converted(case, fqn)]
        model = converted(case, model, {configured_name(fqn) for fqn in linears}, [*kept, ROUTER])
    if case.float8.grouped_mm:
        model = converted_experts(case, model)
    return ModelSpec(
        name="qwen3" if mixtures else "llama3",
        flavor="case",
        model=model,
        parallelize_fn=distribute,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook if mixtures else None,
        state_dict_adapter=None,
    )


def converted(case: Case, model: Any, linears: Iterable[str], kept: Iterable[str]) -> Any:
    """Return the model with the recipe of the case in all of these linears whose names have no part in `kept`.

    Of MXFP8 torchtitan takes the names of what it converts, and without names it converts every linear.
    """
    kept, compiled = sorted(set(kept)), case.compile != "none"
    if case.float8.traits.kernel != "mx":
        made = Float8LinearConverter.Config(
            recipe_name=case.float8.recipe, filter_fqns=kept, model_compile_enabled=compiled
        )
        return made.build().convert(model)
    named = sorted(fqn for fqn in linears if not any(part in fqn for part in kept))
    if not named:
        raise ValueError("torchtitan cannot be told to convert nothing: without names it converts every linear")
    return MXFP8LinearConverter.Config(fqns=named, model_compile_enabled=compiled).build().convert(model)


def configured_name(fqn: str) -> str:
    """Return the name by which torchtitan's filter knows a linear of `linears.py`."""
    if fqn == OUTPUT_FQN:
        return "lm_head"
    layer, name = fqn.split(".", 2)[1:]
    return f"layers.{layer}.{_CONFIGURED_AS.get(name, name)}"


def model_config(case: Case) -> Llama3Model.Config | Qwen3Model.Config:
    """Return the model of a case, with a projection each for queries, keys and values, and without RoPE scaling.

    torchtitan's own flavors fuse the three.
    """
    shape, vocab = case.model.shape, case.model.padded_vocab_size
    kind = Qwen3Model if case.model.experts else Llama3Model
    return kind.Config(
        dim=shape.dim,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=shape.dim, param_init=_ANY),
        norm=RMSNorm.Config(normalized_shape=shape.dim, param_init=_ANY),
        lm_head=Linear.Config(in_features=shape.dim, out_features=vocab, param_init=_ANY),
        layers=[_block(case, layer) for layer in range(shape.layers)],
    )


def _block(case: Case, layer: int) -> Llama3TransformerBlock.Config | Qwen3TransformerBlock.Config:
    shape = case.model.shape
    if case.model.has_experts(layer):
        hidden: dict[str, Any] = {"moe": moe_config(case, _ANY)}
    else:
        dense = make_ffn_config(dim=shape.dim, hidden_dim=shape.ffn_dim, w1_param_init=_ANY, w2w3_param_init=_ANY)
        hidden = {"feed_forward": dense}
    kind = Qwen3TransformerBlock if case.model.experts else Llama3TransformerBlock
    return kind.Config(
        attention_norm=RMSNorm.Config(normalized_shape=shape.dim, param_init=_ANY),
        ffn_norm=RMSNorm.Config(normalized_shape=shape.dim, param_init=_ANY),
        attention=make_gqa_config(
            dim=shape.dim,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            wqkv_param_init=_ANY,
            wo_param_init=_ANY,
            inner_attention=FlexAttention.Config(block_size=math.gcd(_BLOCK, case.local_seq_len)),
            rope=ComplexRoPE.Config(dim=shape.head_dim, max_context_length=case.train.seq_len, theta=500_000),
        ),
        **hidden,
    )


def add_names(model: Any) -> None:
    """Let modules be found by the names of `linears.py` first. Nothing else changes: torchtitan's own names still hold.

    In torchtitan the projections of attention lie in a module `qkv_linear`, and the output layer is `lm_head`.
    """
    if getattr(model, "lm_head", None) is not None:  # a stage of a pipeline may have none
        put_first(model._modules, {OUTPUT_FQN: model.lm_head})
    for block in model.layers.values():
        projections = block.attention.qkv_linear
        put_first(block.attention._modules, {name: getattr(projections, name) for name in ("wq", "wk", "wv")})
        if getattr(block, "moe_enabled", False):
            add_seams(block.moe)
