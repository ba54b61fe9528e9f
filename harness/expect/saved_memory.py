"""The bytes saved for the backward pass: arithmetic for the reference Llama under torch 2.13 and torchao 0.18.

Bytes of one rank by dtype, without parameters and tokens, in eager runs. The terms hold for the CPU, where attention
saves query, key, value, output and the logsumexp of every head, and RMSNorm its input, the normalized input and 1/rms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.expect.matmuls import is_recomputed
from harness.expect.traffic import residual_tokens
from harness.expect.trainer_traits import traits_of
from harness.matrix.case import Case
from harness.matrix.linears import BLOCK_LINEARS, OUTPUT_FQN, ROWWISE, is_converted, local_features, shard_sizes
from harness.matrix.recipes import ITEM_BYTES

Elements = Counter[str]  # by dtype

NOT_OF_THIS_DEVICE = "the formula is that of a CPU: what attention and random states keep on a GPU differs; see `leaks`"


def describes(device: str) -> bool:
    """Whether the formulas of saved and live memory describe what a run on this device keeps."""
    return device == "cpu"


def expected_saved(case: Case, *, step: int, rank: int) -> dict[str, int]:
    """Bytes by dtype that `rank` saves between forward and backward of `step` (1-based)."""
    assert case.compile == "none", "compiled blocks save what `compiled_memory.py` says"
    elements = head_elements(case, step, rank)
    for layer in range(case.model.shape.layers):
        elements += block_elements(case, layer, step)
    return {dtype: count * ITEM_BYTES[dtype] for dtype, count in sorted(elements.items())}


def head_elements(case: Case, step: int, rank: int) -> Elements:
    """The final norm, the input of the output layer, log-probabilities and the normalizer of the loss.

    With loss parallel a rank saves its shard of the log-probabilities, otherwise all of them. The output layer's weight
    is freed after forward, and its scale saved, with `reshard_after_forward = "always"` alone.
    """
    padded, tp = case.model.padded_vocab_size, case.layout.tp
    vocab = shard_sizes(padded, tp)[rank % tp] if case.layout.loss_parallel else padded
    saved = _norm(case)
    saved[case.wide_dtype] += case.tokens_per_rank * vocab + 1
    saved[case.train.dtype] += case.tokens_per_rank * case.model.shape.dim
    if case.layout.reshard_after_forward == "always" and is_converted(case, OUTPUT_FQN):
        saved["float32"] += _has_scale_of_gather(case, step)
    counted = traits_of(case).counts_tokens_in
    if counted and case.layout.dp == 1:  # a sum over ranks makes it a Python number
        saved[counted] += 1
    return saved


def _norm(case: Case) -> Elements:
    """RMSNorm computes in `case.wide_dtype`: input and normalized input, and one number per token."""
    tokens = residual_tokens(case)
    return Counter({case.wide_dtype: tokens * (2 * case.model.shape.dim + 1)})


def block_elements(case: Case, layer: int, step: int) -> Elements:
    """What one block saves, with the checkpointing of the case."""
    saved: Elements = Counter()
    if case.train.dtype == "bfloat16" and traits_of(case).casts_rope:
        # FSDP2 casts the inputs of a unit, so every block has its own copy of the RoPE cache
        saved["bfloat16"] += case.train.seq_len * case.model.shape.head_dim
    if not case.checkpointing.wraps(layer):
        return saved + _whole_block(case) + gathered_scales(case, layer, step)
    saved[case.train.dtype] += residual_tokens(case) * case.model.shape.dim  # the input of the block
    return saved + _selected_outputs(case, layer) if case.checkpointing.mode == "selective_op" else saved


def _whole_block(case: Case) -> Elements:
    """Everything that backward of one block reads, without checkpointing.

    Linears save their high-precision input: torchao 0.18 casts it again for wgrad, and no float8 tensor outlives
    forward. Only with float8 TP styles is the input of a linear float8 already, and saved as such.
    """
    tokens, dtype = case.tokens_per_rank, case.train.dtype
    query, key = local_features(case, "attention.wq")[1], local_features(case, "attention.wk")[1]
    hidden = local_features(case, "feed_forward.w1")[1]
    inputs = {"gathered": 2 * tokens * case.model.shape.dim, "w2": tokens * hidden}
    saved = _norm(case) + _norm(case)
    saved[case.wide_dtype] += tokens * case.model.shape.heads // case.layout.tp  # logsumexp of attention
    saved[dtype] += tokens * (2 * query + 2 * key)  # query, key, value and output; the output is also the input of wo
    saved[dtype] += 3 * tokens * hidden  # w1(x), silu(w1(x)), w3(x)
    if case.float8.tp_styles == "float8":
        saved["float8_e4m3fn"] += sum(inputs.values()) + tokens * query
        saved["float32"] += 4  # their scales: inputs of attention, wo, feed-forward, w2
    else:
        saved[dtype] += sum(inputs.values())
    return saved


def gathered_scales(case: Case, layer: int, step: int) -> Elements:
    """Float8 all-gather: FSDP2 frees the gathered weights after forward, but the saved tensors keep their scales.

    A weight that is kept has its scale, which does not count as saved.
    """
    if case.layout.reshard_after_forward == "never" or not _has_scale_of_gather(case, step):
        return Counter()
    return Counter({"float32": len(converted_linears(case, layer))})


def _has_scale_of_gather(case: Case, step: int) -> bool:
    """True where a float8 weight gets a scale when it is gathered. A precomputed one belongs to the parameter.

    Step 1 has none that is precomputed.
    """
    return case.float8.fp8_all_gather and not (case.float8.precompute_scale and step > 1)


def _selected_outputs(case: Case, layer: int) -> Elements:
    """What `selective_op` saves besides the input: every second matmul, reduce-scatters, and results of `max`.

    Tensorwise scaling calls `max` once per cast; rowwise scaling calls `amax`, which is not in torchtitan's save list.
    """
    tokens, dim = case.tokens_per_rank, case.model.shape.dim
    saved = 0
    for name in BLOCK_LINEARS:
        if not is_recomputed(case, layer, name):
            saved += tokens * local_features(case, name)[1]
    if case.layout.tp > 1 and case.layout.sequence_parallel:
        saved += 2 * residual_tokens(case) * dim
    saved += forward_maxima(case, converted_linears(case, layer))
    return Counter({case.train.dtype: saved})


def forward_maxima(case: Case, linears: Sequence[str]) -> int:
    """Casts with one scale in a forward of a block. Float8 TP styles cast inputs of attention and feed-forward once."""
    scaling = case.float8.traits.scaling
    weights = 0 if case.float8.fp8_all_gather or scaling.get("w") != "ten" else len(linears)
    if case.float8.tp_styles == "float8":
        return weights + 2 + len(ROWWISE)
    return weights + (len(linears) if scaling.get("i") == "ten" else 0)


def converted_linears(case: Case, layer: int) -> list[str]:
    """The linears of a block that are converted, by their name in it."""
    return [name for name in BLOCK_LINEARS if is_converted(case, f"layers.{layer}.{name}")]
