"""The bytes that compiled blocks save for backward: arithmetic for torch 2.13's min-cut partitioner and torchao 0.18.

What surrounds the blocks saves as in eager (`saved_memory.py`). A block that is checkpointed whole saves exactly what
eager saves, and two kinds of scales. The partitioner chooses what another block saves, within limits:

- It never computes again what checkpointing saves, and with no checkpointing no matmul, attention or collective: their
  outputs are saved where backward reads them. That is the least.
- It saves a result only where this is cheaper than what it is made from, so eager saves at least as much. Except that
  it may do early, in forward, what backward makes of weights alone, and save this: a scale that TP ranks agree on by a
  collective, or a copy of a float8 weight in the order that dgrad reads.

Verified for every recipe, checkpointing mode and dtype, on one rank and with TP, FSDP2 and HSDP, async TP or not.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from harness.expect.matmuls import is_recomputed
from harness.expect.saved_memory import (
    Elements,
    block_elements,
    converted_linears,
    forward_maxima,
    gathered_scales,
    head_elements,
)
from harness.expect.traffic import residual_tokens
from harness.expect.upstream import NONE, SEPARATE_BACKWARD_CASTS, Changes
from harness.matrix.case import Case
from harness.matrix.linears import BLOCK_LINEARS, ROWWISE, linear_features, local_features
from harness.matrix.recipes import ITEM_BYTES

_LAST = BLOCK_LINEARS[-1]


class SavedLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The fewest and the most bytes that a rank may save in one step."""

    least: int
    most: int


def is_exact(case: Case) -> bool:
    """True where every compiled block is checkpointed whole, so that nothing is left to the partitioner."""
    return all(_is_whole(case, layer) for layer in range(case.model.shape.layers))


def expected_saved(case: Case, *, step: int, rank: int, changes: Changes = NONE) -> dict[str, int]:
    """Bytes by dtype that `rank` saves for the backward pass of `step` (1-based), where `is_exact`."""
    assert is_exact(case), "the partitioner chooses what some blocks save"
    elements = head_elements(case, step, rank)
    for layer in range(case.model.shape.layers):
        elements += block_elements(case, layer, step) + _scales(case, layer, step, changes)
    return {dtype: count * ITEM_BYTES[dtype] for dtype, count in sorted(elements.items())}


def saved_limits(case: Case, *, step: int, rank: int, changes: Changes = NONE) -> SavedLimits:
    """The limits of all bytes that `rank` saves for the backward pass of `step` (1-based)."""
    least = most = _bytes(head_elements(case, step, rank))
    for layer in range(case.model.shape.layers):
        limits = _block_limits(case, layer, step, changes)
        least, most = least + limits.least, most + limits.most
    return SavedLimits(least=least, most=most)


def _block_limits(case: Case, layer: int, step: int, changes: Changes) -> SavedLimits:
    eager, scales = _bytes(block_elements(case, layer, step)), _bytes(_scales(case, layer, step, changes))
    if _is_whole(case, layer):
        return SavedLimits(least=eager + scales, most=eager + scales)
    if case.checkpointing.mode == "selective_op":
        chosen = eager - _bytes(_unread_outputs(case, layer))
        return SavedLimits(
            least=chosen - _bytes(_amaxes(case, layer)), most=chosen + scales + _bytes(_operand_scales(case, layer))
        )
    copies = _bytes(_weight_copies(case, layer))
    return SavedLimits(least=_bytes(_unavoidable(case)), most=eager + scales + copies)


def _is_whole(case: Case, layer: int) -> bool:
    """True when checkpointing saves nothing but the input of this block."""
    return case.checkpointing.wraps(layer) and case.checkpointing.mode != "selective_op"


def _scales(case: Case, layer: int, step: int, changes: Changes) -> Elements:
    """Scales that a checkpointed block saves too: those of gathered float8 weights, and those that backward casts by.

    Of the latter those that need a collective: the partitioner keeps every collective of its own choice in forward.
    """
    saved = gathered_scales(case, layer, step) if case.checkpointing.wraps(layer) else Counter[str]()
    if case.layout.tp > 1:
        saved["float32"] += sum(_early_scale(case, name, changes) for name in converted_linears(case, layer))
    return saved


def _early_scale(case: Case, name: str, changes: Changes) -> int:
    """Elements of the scale that backward needs of this linear, TP ranks agree on and forward does not have.

    One scale for a tensor: the input of `wo` and `w2` for wgrad, whose shape is not that of forward, and since torch
    2.14 every weight for dgrad. Axiswise: the
    weight for dgrad, as one scale, or one for each input feature where the output features are sharded.
    """
    if case.float8.traits.one_scale_per_tensor:
        of_weight = SEPARATE_BACKWARD_CASTS in changes and not case.gathers_float8
        return int(name in ROWWISE and case.float8.tp_styles != "float8") + int(of_weight)
    if case.float8.traits.one_scale_per_weight_in_dgrad:
        return 1
    return 0 if name in ROWWISE else linear_features(case, name)[0]


def _unread_outputs(case: Case, layer: int) -> Elements:
    """What eager `selective_op` saves of the last linear, although backward does not read it.

    With TP but no sequence parallelism torch 2.13 saves it too: an all-reduce whose result nothing reads makes use of
    it until the last dead code is removed, after what is saved was decided (`_extract_fwd_bwd_modules`).
    """
    if case.layout.tp > 1 and not case.layout.sequence_parallel:
        return Counter()
    saved = 0
    if not is_recomputed(case, layer, _LAST):
        saved += case.tokens_per_rank * local_features(case, _LAST)[1]
    if case.layout.tp > 1:
        saved += residual_tokens(case) * case.model.shape.dim
    return Counter({case.train.dtype: saved})


def _amaxes(case: Case, layer: int) -> Elements:
    """The results of `max` that eager `selective_op` saves; backward reads some of them."""
    return Counter({case.train.dtype: forward_maxima(case, converted_linears(case, layer))})


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
    saved: Elements = Counter({case.train.dtype: residual_tokens(case) * dim + tokens * (2 * query + 2 * key)})
    saved[_written(case)] += residual_tokens(case) * dim + 2 * tokens * hidden
    saved[case.wide_dtype] += tokens * case.model.shape.heads // case.layout.tp  # logsumexp of attention
    return saved


def _written(case: Case) -> str:
    """What scaled matmuls write. The partitioner saves this, and converts it again in backward."""
    converts = case.float8.traits.writes_bfloat16 and case.train.dtype == "float32"
    return "bfloat16" if converts else case.train.dtype


def _bytes(elements: Elements) -> int:
    return sum(count * ITEM_BYTES[dtype] for dtype, count in elements.items())
