"""What a case must keep for its backward pass: pure arithmetic of the reference Llama under torch 2.13, torchao 0.18.

Bytes of one rank by dtype, parameters and tokens left out; eager runs. The terms hold for the CPU, where attention
saves query, key, value, output and one log-sum per head, and RMSNorm its input, the normalized input and 1/rms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from harness.spec.case import Case, Checkpointing
from harness.spec.gemms import BLOCK_LINEARS, ROWWISE, is_checkpointed, is_converted, is_recomputed, shard_sizes
from harness.spec.traffic import ITEM_BYTES, local_features, residual_tokens, wide_dtype

Elements = Counter[str]  # by dtype


def expected_saved(case: Case, *, step: int, rank: int) -> dict[str, int]:
    """Bytes by dtype that `rank` keeps between forward and backward of `step` (1-based)."""
    assert case.compile == "none", "there is no formula for compiled runs"
    elements = _head(case, rank)
    for layer in range(case.model.shape.layers):
        elements += _block(case, layer, step)
    return {dtype: count * ITEM_BYTES[dtype] for dtype, count in sorted(elements.items())}


def expected_order(saved_bytes: Mapping[Checkpointing, int]) -> tuple[tuple[Checkpointing, Checkpointing], ...]:
    """Pairs of runs of one case, but for checkpointing, that are in the wrong order: the first must keep less.

    `full` < `selective_op` < `none`, `full` < `selective_layer` < `none`. With `every` = 1 `selective_layer` is `full`
    under another name; which of the two selective modes keeps less depends on the model.
    """
    wrong = []
    for less, more in ((a, b) for a in saved_bytes for b in saved_bytes):
        smaller, larger = _rank(less), _rank(more)
        ordered = saved_bytes[less] < saved_bytes[more]
        if smaller < larger and not ordered:
            wrong.append((less, more))
    return tuple(wrong)


def _rank(checkpointing: Checkpointing) -> int:
    if checkpointing.mode == "none":
        return 2
    everything = checkpointing.mode == "full" or (checkpointing.mode, checkpointing.every) == ("selective_layer", 1)
    return 0 if everything else 1


def _head(case: Case, rank: int) -> Elements:
    """The last norm, the input of the output layer, log-probabilities and the loss' normalizer.

    With loss parallel a rank keeps its share of the log-probabilities, otherwise all of them.
    """
    padded, tp = case.model.padded_vocab_size, case.layout.tp
    vocab = shard_sizes(padded, tp)[rank % tp] if case.layout.loss_parallel else padded
    kept = _norm(case)
    kept[wide_dtype(case)] += case.tokens_per_rank * vocab + 1
    kept[case.train.dtype] += case.tokens_per_rank * case.model.shape.dim
    return kept


def _norm(case: Case) -> Elements:
    """RMSNorm works in `wide_dtype`: input and normalized input, and one number per token."""
    tokens = residual_tokens(case)
    return Counter({wide_dtype(case): tokens * (2 * case.model.shape.dim + 1)})


def _block(case: Case, layer: int, step: int) -> Elements:
    kept: Elements = Counter()
    if case.train.dtype == "bfloat16":  # FSDP2 casts the inputs of a unit, so every block has its own cosines and sines
        kept["bfloat16"] += case.train.seq_len * case.model.shape.head_dim
    if not is_checkpointed(case, layer):
        return kept + _whole_block(case) + _gathered_scales(case, layer, step)
    kept[case.train.dtype] += residual_tokens(case) * case.model.shape.dim  # the input of the block
    return kept + _chosen_outputs(case, layer) if case.checkpointing.mode == "selective_op" else kept


def _whole_block(case: Case) -> Elements:
    """Everything that backward of one block reads, without checkpointing.

    Linears keep their high-precision input: torchao 0.18 casts it again for wgrad, and no float8 tensor outlives
    forward. Only float8 TP styles hand a linear an input that is float8 already, which then is what it keeps.
    """
    tokens, dtype = case.tokens_per_rank, case.train.dtype
    query, key = local_features(case, "attention.wq")[1], local_features(case, "attention.wk")[1]
    hidden = local_features(case, "feed_forward.w1")[1]
    inputs = {"gathered": 2 * tokens * case.model.shape.dim, "w2": tokens * hidden}
    kept = _norm(case) + _norm(case)
    kept[wide_dtype(case)] += tokens * case.model.shape.heads // case.layout.tp  # log-sums of attention
    kept[dtype] += tokens * (2 * query + 2 * key)  # query, key, value and output; the output is also the input of wo
    kept[dtype] += 3 * tokens * hidden  # w1(x), silu(w1(x)), w3(x)
    if case.float8.tp_styles == "float8":
        kept["float8_e4m3fn"] += sum(inputs.values()) + tokens * query
        kept["float32"] += 4  # their scales: into attention, wo, feed-forward, w2
    else:
        kept[dtype] += sum(inputs.values())
    return kept


def _gathered_scales(case: Case, layer: int, step: int) -> Elements:
    """float8 all-gather: FSDP2 frees the gathered weights after forward, their scales stay with the saved tensor.

    A precomputed scale belongs to the parameter and is not counted with activations; step 1 has none.
    """
    if not case.float8.fp8_all_gather or (case.float8.precompute_scale and step > 1):
        return Counter()
    return Counter({"float32": len(_converted(case, layer))})


def _chosen_outputs(case: Case, layer: int) -> Elements:
    """What `selective_op` keeps besides the input: every second matmul, reduce-scatters, and results of `max`.

    Tensorwise scaling calls `max` once per cast; rowwise scaling calls `amax`, which is not on torchtitan's list.
    """
    tokens, dim = case.tokens_per_rank, case.model.shape.dim
    kept = 0
    for position, name in enumerate(BLOCK_LINEARS, start=1):
        if not is_recomputed(case, layer, position):
            kept += tokens * local_features(case, name)[1]
    if case.layout.tp > 1 and case.layout.sequence_parallel:
        kept += 2 * residual_tokens(case) * dim
    if case.float8.recipe == "tensorwise":
        kept += _forward_casts(case, _converted(case, layer))
    return Counter({case.train.dtype: kept})


def _forward_casts(case: Case, linears: Sequence[str]) -> int:
    """Casts in one forward of a block. Float8 styles cast what enters attention and feed-forward once for all."""
    weights = 0 if case.float8.fp8_all_gather else len(linears)
    if case.float8.tp_styles == "float8":
        return weights + 2 + len(ROWWISE)
    return weights + len(linears)


def _converted(case: Case, layer: int) -> list[str]:
    return [name for name in BLOCK_LINEARS if is_converted(case, f"layers.{layer}.{name}")]
