"""Models by name, and cases that train them: what people ask about before they have a case of their own."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import case_from_axes
from harness.matrix.case import MODEL_PRESETS, Case, ModelShape
from harness.matrix.caseid import case_id
from harness.matrix.targets import is_llama
from harness.plural import counted


class KnownModel(msgspec.Struct, frozen=True):
    """A model: its sizes, its vocabulary, the sequence length that it is trained with, and axes of its own."""

    shape: ModelShape
    vocab_size: int
    seq_len: int
    axes: Mapping[str, object] = {}


# As torchtitan 0.2.2 has them: torchtitan/models/llama3 and its train_configs. FFN sizes follow SwiGLU's rule: 2/3 of 4
# dim, times ffn_dim_multiplier (1.3, 1.3, 1.2), up to a multiple of multiple_of (1024, 4096, 4096; of debugmodel 256).
MODELS: Mapping[str, KnownModel] = {
    "debugmodel": KnownModel(MODEL_PRESETS["debug"], 2048, 2048),
    "llama3-8b": KnownModel(ModelShape(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336), 128256, 8192),
    "llama3-70b": KnownModel(ModelShape(dim=8192, layers=80, heads=64, kv_heads=8, ffn_dim=28672), 128256, 8192),
    "llama3-405b": KnownModel(ModelShape(dim=16384, layers=126, heads=128, kv_heads=8, ffn_dim=53248), 128256, 8192),
    # Sizes of arXiv:2412.19437: experts of 2048 hidden features. In place of its latent attention is the attention of a
    # Llama with as many heads; the first block, one for its three, is as wide as two experts.
    "deepseek-v3": KnownModel(
        ModelShape(dim=7168, layers=61, heads=128, kv_heads=128, ffn_dim=4096),
        129280,
        4096,
        {"experts": 256, "top_k": 8, "router": "sigmoid", "balance": True},
    ),
}


def named_model(name: str) -> KnownModel:
    """The model of this name. Raises `HarnessError` that lists all names."""
    if name not in MODELS:
        raise HarnessError(f"there is no model {name!r}.", where="--model", fix=f"give one of {', '.join(MODELS)}.")
    return MODELS[name]


def require_formulas(case: Case) -> None:
    """HarnessError for a target whose model is not known before it is built, and for a pipeline."""
    if not is_llama(case.target):
        fix = "give --model NAME, or a case of the reference or of torchtitan."
        raise HarnessError(f"there is no formula for the model of {case.target}.", where=case_id(case), fix=fix)
    if case.layout.pp > 1:
        what = "this prediction is of ranks that hold the whole model, and a stage of a pipeline holds a part."
        raise HarnessError(what, where=case_id(case), fix="leave pp out, or see `predict cost`.")


def training(model: KnownModel, *, tokens: int | None = None, **axes: object) -> Case:
    """The case that trains a named model in bfloat16, with the values of other axes (`matrix/axes.py`) given.

    `tokens` are those of a data-parallel rank and step, one sequence where neither they nor `global_batch` are given.
    Raises `HarnessError` where the tokens are not whole sequences, and for values that no case can have.
    """
    sizes = {name: getattr(model.shape, name) for name in ModelShape.__struct_fields__}
    own = {"vocab_size": model.vocab_size, "seq_len": model.seq_len, "dtype": "bfloat16", **model.axes}
    given = {**sizes, **own, **axes}
    case = case_from_axes(given)
    length = case.train.seq_len
    sequences, rest = divmod(length if tokens is None else tokens, length)
    if rest or not sequences:
        raise HarnessError(
            f"{counted(tokens or 0, 'token')} of a rank are not whole sequences of {length}.",
            where="--tokens",
            fix=f"give a multiple of {length}, or another --seq-len.",
        )
    return case_from_axes({"global_batch": sequences * case.layout.dp, **given})
