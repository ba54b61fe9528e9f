"""Cases that people ask about before they have one of their own: models by name, and all layouts of so many ranks."""

import itertools
from collections.abc import Iterator, Mapping

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import axis_values, case_from_axes
from harness.matrix.case import MODEL_PRESETS, Case, ModelShape
from harness.matrix.layout import DP_AXES, OTHERS, REST, ranks_of
from harness.text import counted

_MOST = {"tp": 64, "dp_replicate": 16}  # ranks along every axis but FSDP's, which has the others


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


def training(model: KnownModel, *, tokens: int | None = None, **axes: object) -> Case:
    """Return the case that trains a named model in bfloat16, with the values of other axes (`matrix/axes.py`) given.

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
            fix=f"give a multiple of {length}, or another seq_len.",
        )
    return case_from_axes({"global_batch": sequences * case.layout.dp, **given})


def layouts(case: Case) -> Iterator[Case]:
    """Return the case with every combination of degrees that are powers of two; FSDP has the other ranks."""
    powers = ([1 << power for power in range(most.bit_length())] for most in _MOST.values())
    for chosen in itertools.product(*powers):
        mesh = dict(zip(_MOST, chosen, strict=True))
        mesh[REST], rest = divmod(case.world_size, ranks_of(mesh, OTHERS))
        if not rest and (mesh[REST] > 1 or ranks_of(mesh, DP_AXES) == 1):
            styles = case.float8.tp_styles if mesh["tp"] > 1 else "plain"
            yield case_from_axes({**axis_values(case), **mesh, "tp_styles": styles})
