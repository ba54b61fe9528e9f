"""The bytes saved for the backward pass, and what else is alive: the reference Llama under torch 2.13, torchao 0.18.

Saved are bytes of one rank by dtype, without parameters and tokens. The terms hold for the CPU, where attention saves
query, key, value, output and the logsumexp of every head, and RMSNorm its input, the normalized input and 1/rms.

What surrounds compiled blocks saves as in eager runs. A compiled block that is checkpointed whole saves exactly what
eager saves, and two kinds of scales. The min-cut partitioner chooses what another block saves, within limits:

- It never computes again what checkpointing saves, and with no checkpointing no matmul, attention or collective: their
  outputs are saved where backward reads them. That is the least.
- It saves a result only where this is cheaper than what it is made from, so eager saves at least as much. Except that
  it may do early, in forward, what backward makes of weights alone, and save this: a scale that TP ranks agree on by a
  collective, or a copy of a float8 weight in the order that dgrad reads.

Verified for every recipe, checkpointing mode and dtype, on one rank and with TP, FSDP2 and HSDP, async TP or not.

Alive besides what the model, the optimizer, the data and autograd explain is nothing at the end of a step. Between
forward and backward: the logits, which a name still holds, the states of the random number generator that checkpointing
restores before it computes again, and the weights that FSDP2 does not free after forward. And scalars of the loss. A
compiled block keeps no state of the generator: its graph draws no number.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from harness.matrix.case import Case
from harness.matrix.dims import DIMENSIONS
from harness.matrix.dims.fsdp import Unit, fsdp_units
from harness.matrix.dims.pp import blocks_of_stage, ends_are_one, expert_layers_of, forwards_in_flight, modules_of_stage
from harness.matrix.linears import (
    BLOCK_LINEARS,
    OUTPUT_FQN,
    ROWWISE,
    block_linears,
    is_converted,
    is_recomputed,
    linear_features,
    local_features,
    width_of_logits,
)
from harness.matrix.recipes import GROUP_MULTIPLE, ITEM_BYTES, TENSOR
from harness.matrix.upstream import NONE, SEPARATE_BACKWARD_CASTS, Changes
from harness.registry import OF_DTENSOR, computes_on_plain_shards, is_llama
from harness.trace.counts import Moment

Elements = Counter[str]  # by dtype

NOT_OF_THIS_DEVICE = "the formula is for a CPU: attention and random states save other tensors on a GPU; see `leaks`"


def describes(device: str) -> bool:
    """Return whether the formulas of saved and live memory describe what a run on this device keeps."""
    return device == "cpu"


def undescribed(case: Case, device: str) -> str:
    """Return why they do not apply to a case on a device; empty if they do."""
    if not is_llama(case.target):
        return f"no formula for the model of {case.target}; see `profile`"
    if computes_on_plain_shards(case.target):
        return f"{OF_DTENSOR}: {case.target} saves and keeps other tensors"
    return "" if describes(device) else NOT_OF_THIS_DEVICE


def is_exact(case: Case) -> bool:
    """Return False if the partitioner chooses what some compiled block saves."""
    return case.compile == "none" or all(_is_whole(case, layer) for layer in range(case.model.shape.layers))


def depends_on_tokens(case: Case) -> bool:
    """Return True if a block saves as many rows as other ranks sent; one recomputed whole saves its input alone."""
    return case.layout.ep > 1 and any(not _is_whole(case, layer) for layer in case.model.expert_layers)


@functools.lru_cache(maxsize=256)  # checks ask for every rank and step
def expected_saved(
    case: Case, *, step: int, rank: int, changes: Changes = NONE, rows: tuple[tuple[int, ...], ...] = ()
) -> dict[str, int]:
    """Return the bytes by dtype that `rank` saves between forward and backward of `step` (1-based), where `is_exact`.

    `rows`: that its experts got in every forward, of every block with experts that it holds. Without expert parallelism
    these are its own.
    """
    assert is_exact(case), "the partitioner chooses what some blocks save"
    elements = Counter[str]()
    rows_of = dict(zip(expert_layers_of(case, rank), rows, strict=True)) if rows else {}
    for stage, forwards in forwards_in_flight(case, rank).items():
        parts = [block_elements(case, layer, step) for layer in blocks_of_stage(case, stage) if layer not in rows_of]
        for layer in rows_of.keys() & {*blocks_of_stage(case, stage)}:
            for received in rows_of[layer][:forwards]:
                elements.update(block_elements(case, layer, step, received))
        parts += [head_elements(case, step, rank)] if OUTPUT_FQN in modules_of_stage(case, stage) else []
        if case.compile != "none":
            parts += [_scales(case, layer, step, changes) for layer in blocks_of_stage(case, stage)]
        for part in parts:
            elements.update({dtype: forwards * count for dtype, count in part.items()})
    return {dtype: count * ITEM_BYTES[dtype] for dtype, count in sorted(elements.items()) if count}


def head_elements(case: Case, step: int, rank: int) -> Elements:
    """Return the final norm, the input of the output layer, log-probabilities and the normalizer of the loss.

    With loss parallel a rank saves its shard of the log-probabilities, otherwise all of them. The output layer's weight
    is freed after forward, and its scale saved, with `reshard_after_forward = "always"` alone.
    """
    saved = _norm(case)
    saved[case.wide_dtype] += case.tokens_per_rank * width_of_logits(case, rank) + 1
    saved[case.train.dtype] += case.tokens_per_rank * case.model.shape.dim
    if case.layout.reshard_after_forward == "always" and is_converted(case, OUTPUT_FQN):
        saved["float32"] += _has_scale_of_gather(case, step)
    return saved


def _norm(case: Case) -> Elements:
    """RMSNorm computes in `case.wide_dtype`: input and normalized input, and one number per token."""
    tokens = case.residual_tokens
    return Counter({case.wide_dtype: tokens * (2 * case.model.shape.dim + 1)})


def block_elements(case: Case, layer: int, step: int, rows: int | None = None) -> Elements:
    saved: Elements = Counter()
    if case.train.dtype == "bfloat16":
        # FSDP2 casts the inputs of a unit, so every block has its own copy of the RoPE cache: whole as its input, and
        # behind it the positions of this rank.
        positions = case.train.seq_len if case.checkpointing.wraps(layer) else case.local_seq_len
        saved["bfloat16"] += positions * case.model.shape.head_dim
    if not case.checkpointing.wraps(layer):
        if case.model.has_experts(layer):
            saved += _mixture(case, case.sent_rows if rows is None else rows)
        return saved + _whole_block(case, layer) + gathered_scales(case, layer, step)
    saved[case.train.dtype] += case.residual_tokens * case.model.shape.dim  # the input of the block
    return saved + _selected_outputs(case, layer) if case.checkpointing.mode == "selective_op" else saved


def _whole_block(case: Case, layer: int) -> Elements:
    """Return everything that the backward of one block reads, without checkpointing; of experts, only the shared one.

    Linears save their high-precision input: torchao 0.18 casts it again for wgrad, and no float8 tensor outlives
    forward. Only with float8 TP styles is the input of a linear float8 already, and saved as such.
    """
    tokens, dtype = case.tokens_per_rank, case.train.dtype
    query, key = local_features(case, "attention.wq")[1], local_features(case, "attention.wk")[1]
    hidden = local_features(case, next(name for name in block_linears(case.model, layer) if name.endswith("w1")))[1]
    inputs = {"gathered": 2 * tokens * case.model.shape.dim, "w2": tokens * hidden}
    saved = _norm(case) + _norm(case)
    saved[case.wide_dtype] += tokens * case.model.shape.heads // case.layout.tp  # logsumexp of attention
    saved[dtype] += tokens * (2 * query + 2 * key)  # query, key, value and output; the output is also the input of wo
    for one in DIMENSIONS:
        saved.update(one.saved_by_block(case))
    saved[dtype] += 3 * tokens * hidden  # w1(x), silu(w1(x)), w3(x)
    if case.float8.tp_styles == "float8":
        saved["float8_e4m3fn"] += sum(inputs.values()) + tokens * query
        saved["float32"] += 4  # their scales: inputs of attention, wo, feed-forward, w2
    else:
        saved[dtype] += sum(inputs.values())
        saved[dtype] += tokens * query * (case.train.packing != "none")  # the outputs of documents are copied for wo
    return saved


def _mixture(case: Case, rows: int) -> Elements:
    """Return what the router, the experts and the weighted sum of their results save, where experts got so many rows.

    Scores and weights are computed at least in float32. Rows are saved as they came, by the copy into padded groups,
    and as padded groups; then of SwiGLU what `w1`, silu, `w3` and their product gave. A sigmoid's weights are divided
    by their sum, which saves both.
    """
    model, tokens, chosen = case.model, case.residual_tokens, case.sent_rows
    multiple = case.float8.traits.group_multiple if case.float8.grouped_mm else GROUP_MULTIPLE
    padded = multiple * (-(-rows // multiple) + case.local_experts)
    saved = Counter({case.wide_dtype: tokens * model.experts + chosen})
    if model.router == "sigmoid":
        saved[case.wide_dtype] += chosen + tokens
    saved[case.train.dtype] += (rows + chosen) * model.shape.dim + padded * (model.shape.dim + 4 * model.expert_dim)
    if case.layout.tp > 1:  # the input of the router, which is a part of what the shared expert gets
        saved[case.train.dtype] += tokens * model.shape.dim
    return saved


def gathered_scales(case: Case, layer: int, step: int) -> Elements:
    """Float8 all-gather: FSDP2 frees the gathered weights after forward, but the saved tensors keep their scales.

    A weight that is kept has its scale, which does not count as saved.
    """
    if case.layout.reshard_after_forward == "never" or not _has_scale_of_gather(case, step):
        return Counter()
    return Counter({"float32": len(converted_linears(case, layer))})


def _has_scale_of_gather(case: Case, step: int) -> bool:
    """Return True if a float8 weight gets a scale when it is gathered. A precomputed one belongs to the parameter.

    Step 1 has none that is precomputed.
    """
    return case.float8.fp8_all_gather and not (case.float8.precompute_scale and step > 1)


def _selected_outputs(case: Case, layer: int) -> Elements:
    """Return what `selective_op` saves besides the input: every second matmul, reduce-scatters, and results of `max`.

    Tensorwise scaling calls `max` once per cast; rowwise scaling calls `amax`, which is not in torchtitan's save list.
    """
    tokens, dim = case.tokens_per_rank, case.model.shape.dim
    saved = 0
    for name in BLOCK_LINEARS:
        if not is_recomputed(case, layer, name):
            saved += tokens * local_features(case, name)[1]
    if case.layout.shares_of_sequence > 1:
        saved += 2 * case.residual_tokens * dim
    saved += forward_maxima(case, converted_linears(case, layer))
    return Counter({case.train.dtype: saved})


def forward_maxima(case: Case, linears: Sequence[str]) -> int:
    """Casts with one scale in a forward of a block. Float8 TP styles cast inputs of attention and feed-forward once."""
    block_of = case.float8.traits.block_of
    weights = 0 if case.float8.fp8_all_gather or block_of("w") != TENSOR else len(linears)
    if case.float8.tp_styles == "float8":
        return weights + 2 + sum(name in ROWWISE for name in BLOCK_LINEARS)
    return weights + (len(linears) if block_of("i") == TENSOR else 0)


def converted_linears(case: Case, layer: int) -> list[str]:
    return [name for name in BLOCK_LINEARS if is_converted(case, f"layers.{layer}.{name}")]


# Compiled blocks


class SavedLimits(NamedTuple):
    """The fewest and the most bytes that a rank may save in one step."""

    least: int
    most: int


@functools.lru_cache(maxsize=256)  # checks ask for every rank and step
def saved_limits(case: Case, *, step: int, rank: int, changes: Changes = NONE) -> SavedLimits:
    """Return the limits of all bytes that `rank` saves for the backward pass of `step` (1-based)."""
    least = most = _bytes(head_elements(case, step, rank))
    for layer in range(case.model.shape.layers):
        limits = _block_limits(case, layer, step, changes)
        least, most = least + limits.least, most + limits.most
    return SavedLimits(least, most)


def _block_limits(case: Case, layer: int, step: int, changes: Changes) -> SavedLimits:
    eager, scales = _bytes(block_elements(case, layer, step)), _bytes(_scales(case, layer, step, changes))
    if _is_whole(case, layer):
        return SavedLimits(eager + scales, eager + scales)
    if case.checkpointing.mode == "selective_op":
        chosen = eager - _bytes(_unread_outputs(case, layer))
        most = chosen + scales + _bytes(_operand_scales(case, layer))
        amaxes = forward_maxima(case, converted_linears(case, layer)) * ITEM_BYTES[case.train.dtype]
        return SavedLimits(chosen - amaxes, most)  # backward reads some of them
    return SavedLimits(_bytes(_unavoidable(case)), eager + scales + _bytes(_weight_copies(case, layer)))


def _is_whole(case: Case, layer: int) -> bool:
    """Return True if checkpointing saves nothing but the input of this block."""
    return case.checkpointing.wraps(layer) and case.checkpointing.mode != "selective_op"


def _scales(case: Case, layer: int, step: int, changes: Changes) -> Elements:
    """Scales that a checkpointed block saves too: those of gathered float8 weights, and those that backward casts by.

    Of the latter those that need a collective: the partitioner keeps every collective of its own choice in forward. No
    ranks share a block of MXFP8, so they agree on none of its scales.
    """
    saved = gathered_scales(case, layer, step) if case.checkpointing.wraps(layer) else Counter[str]()
    if case.layout.tp > 1 and not case.float8.traits.block:
        saved["float32"] += sum(_early_scale(case, name, changes) for name in converted_linears(case, layer))
    return saved


def _early_scale(case: Case, name: str, changes: Changes) -> int:
    """Return the elements of the scale that this linear needs in backward, that TP ranks agree on and forward lacks.

    One scale for a tensor: the input of `wo` and `w2` for wgrad, whose shape is not that of forward, and since torch
    2.14 every weight for dgrad. Axiswise: the weight for dgrad, as one scale, or one for each input feature where the
    output features are sharded.
    """
    if case.float8.traits.one_scale_per_tensor:
        of_weight = SEPARATE_BACKWARD_CASTS in changes and not case.gathers_float8
        return int(name in ROWWISE and case.float8.tp_styles != "float8") + int(of_weight)
    if case.float8.traits.block_of("w_gi") == TENSOR:
        return 1
    return 0 if name in ROWWISE else linear_features(case, name)[0]


def _unread_outputs(case: Case, layer: int) -> Elements:
    """Return what eager `selective_op` saves of the last linear, although backward does not read it.

    With TP but no sequence parallelism torch 2.13 saves it too: an all-reduce whose result nothing reads makes use of
    it until the last dead code is removed, after what is saved was decided (`_extract_fwd_bwd_modules`).
    """
    if case.layout.tp > 1 and not case.layout.sequence_parallel:
        return Counter()
    saved = 0
    if not is_recomputed(case, layer, BLOCK_LINEARS[-1]):
        saved += case.tokens_per_rank * local_features(case, BLOCK_LINEARS[-1])[1]
    if case.layout.tp > 1:
        saved += case.residual_tokens * case.model.shape.dim
    return Counter({case.train.dtype: saved})


def _operand_scales(case: Case, layer: int) -> Elements:
    """A scale of both operands of every scaled matmul: `selective_op` saves what is computed inside of a matmul."""
    linears = [local_features(case, name) for name in converted_linears(case, layer)]
    if case.float8.traits.one_scale_per_tensor:
        return Counter({"float32": 2 * len(linears)})
    return Counter({"float32": sum(case.tokens_per_rank + outputs for _, outputs in linears)})


def _weight_copies(case: Case, layer: int) -> Elements:
    """Converted weights of one rank in float8. Seen where they are gathered in float8, and with TP."""
    if case.layout.tp == 1 and not case.float8.fp8_all_gather:
        return Counter()
    sizes = [local_features(case, name) for name in converted_linears(case, layer)]
    return Counter({"float8_e4m3fn": sum(inputs * outputs for inputs, outputs in sizes)})


def _unavoidable(case: Case) -> Elements:
    """Without checkpointing: the block's input, what attention reads and gives, and outputs of `wo`, `w1`, `w3`."""
    tokens, dim = case.tokens_per_rank, case.model.shape.dim
    query, key = local_features(case, "attention.wq")[1], local_features(case, "attention.wk")[1]
    hidden = local_features(case, "feed_forward.w1")[1]
    saved: Elements = Counter({case.train.dtype: case.residual_tokens * dim + tokens * (2 * query + 2 * key)})
    # What scaled matmuls write. The partitioner saves this, and converts it again in backward.
    converts = case.float8.traits.writes_bfloat16 and case.train.dtype == "float32"
    saved["bfloat16" if converts else case.train.dtype] += case.residual_tokens * dim + 2 * tokens * hidden
    saved[case.wide_dtype] += tokens * case.model.shape.heads // case.layout.tp  # logsumexp of attention
    return saved


def _bytes(elements: Elements) -> int:
    return sum(count * ITEM_BYTES[dtype] for dtype, count in elements.items())


# What else is alive

RNG_STATE_BYTES = 5056  # of the CPU generator


class LiveStorage(msgspec.Struct, frozen=True, kw_only=True):
    """A storage that must be alive; `purpose` says what it is."""

    dtype: str
    nbytes: int
    purpose: str


def expected_scalars(case: Case, *, moment: Moment, step: int = 1) -> int:
    """Return the one-element storages: the loss and, before backward, its sum over tokens under loss parallel.

    After a step that clips gradients also their norm, and after one with an evaluation the scale of the output layer,
    which FSDP2 casts and gathers once more than it is read.
    """
    if moment == "step":
        gathered = case.gathers_float8 and _has_scale_of_gather(case, step)
        return (
            1
            + (case.train.max_norm is not None)
            + (case.train.evaluate and gathered and is_converted(case, OUTPUT_FQN))
        )
    return 2 + (case.layout.shares_of_logits > 1)


@functools.lru_cache(maxsize=256)  # checks ask for every rank and step
def expected_live(case: Case, *, rank: int, moment: Moment, step: int = 2) -> tuple[LiveStorage, ...]:
    """Return the storages that are alive on `rank` at this moment of a step."""
    if moment == "step":
        return (*_counts_of_tokens(case), *in_buckets(case, step, moment))
    return (
        *_counts_of_tokens(case),
        *in_buckets(case, step, moment),
        _logits(case, rank),
        *_generator_states(case),
        *(_gathered(case, rank) if case.uses_fsdp else ()),
    )


def _counts_of_tokens(case: Case) -> Iterator[LiveStorage]:
    """Each mixture keeps its token counts of the last forward, which the model adds up after all blocks."""
    for layer in case.model.expert_layers:
        purpose = f"the counts of tokens of layers.{layer}.moe"
        yield LiveStorage(dtype="int64", nbytes=case.model.experts * ITEM_BYTES["int64"], purpose=purpose)


def in_buckets(case: Case, step: int, moment: Moment) -> Iterator[LiveStorage]:
    """Yield what dimensions keep at this moment of a step: DDP its buckets."""
    for one in DIMENSIONS:
        for dtype, elements, purpose in one.alive(case, case.train.age(step), moment):
            yield LiveStorage(dtype=dtype, nbytes=elements * ITEM_BYTES[dtype], purpose=purpose)


def _logits(case: Case, rank: int) -> LiveStorage:
    dtype = case.train.dtype
    nbytes = case.tokens_per_rank * width_of_logits(case, rank) * ITEM_BYTES[dtype]
    return LiveStorage(dtype=dtype, nbytes=nbytes, purpose="the logits")


def gradients(case: Case, rank: int) -> Iterator[LiveStorage]:
    """Yield all gradients. FSDP2 reduces those of a unit into one storage, padded as shards; else each has its own."""
    for unit in fsdp_units(case, rank):
        for fqns, elements in _gradient_storages(case, unit):
            nbytes = elements * ITEM_BYTES[case.parameter_dtype]
            yield LiveStorage(dtype=case.parameter_dtype, nbytes=nbytes, purpose=f"the gradient of {fqns}")


def _gradient_storages(case: Case, unit: Unit) -> list[tuple[str, int]]:
    if case.uses_fsdp:
        return [(unit.name, unit.shard_elements)]
    # TP ranks all compute the gradient of the whole embedding, and use their rows of it
    rows = {} if ends_are_one(case) else {"tok_embeddings": case.model.padded_vocab_size}
    return [(weight.fqn, rows.get(weight.fqn, weight.rows) * weight.columns) for weight in unit.weights]


def _generator_states(case: Case) -> Iterator[LiveStorage]:
    for layer in range(case.model.shape.layers):
        if case.checkpointing.wraps(layer) and case.compile == "none":
            state = f"the generator state of checkpointed layers.{layer}"
            yield LiveStorage(dtype="uint8", nbytes=RNG_STATE_BYTES, purpose=state)


def _gathered(case: Case, rank: int) -> Iterator[LiveStorage]:
    """Yield weights of units that FSDP2 does not free after forward. It gathers padded shards, all of the same size."""
    for unit in fsdp_units(case, rank):
        for weight in () if unit.freed else unit.weights:
            dtype = "float8_e4m3fn" if weight.gathered_in_float8 else case.train.dtype
            elements = unit.shard_of(weight) * unit.ranks
            purpose = f"the gathered weight of {weight.fqn}"
            yield LiveStorage(dtype=dtype, nbytes=elements * ITEM_BYTES[dtype], purpose=purpose)
