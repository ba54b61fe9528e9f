"""Local parity: how far a module of a parallel run may be from its replay on one rank.

The replay repeats a module on the operands that it really had, so nothing accumulates, and computes every part that TP
ranks add up as its rank does: on the virtual device every bit is the same. Elsewhere a result differs by the rounding
of its own arithmetic. Limits are multiples of the unit roundoff, not measured tolerances: every part that was rounded
before it was summed over ranks, the sum, and the replay's own result contribute one rounding each, and their errors add
up as independent ones do. `tests/worker/test_clean_runs.py` keeps clean runs within all limits.
"""

import math
from typing import NamedTuple

from harness.expect.model import Model
from harness.matrix.case import Case
from harness.matrix.linears import OUTPUT_FQN, ROWWISE, converted_fqns, linear_fqns, linear_name
from harness.matrix.numerics import norm_rounding
from harness.registry import REFERENCE
from harness.trace.model import ModuleDistance

# The largest relative error of a result that is rounded to this dtype. A matmul in bfloat16 is rounded once; one in
# float32 after every addition: eight roundings' worth, four were measured.
UNIT = {"bfloat16": 2.0**-9, "float32": 8 * 2.0**-24}

# Independent roundings are at most one unit each, and 0.6 units in the mean; measured sums are at half of this limit.
MARGIN = 2.0

EXACT = 0.0
LOG = 2.0**-20  # of the logarithm of a probability from 8 to 16 in float32: its last bit
# In float32 it may be off by this many of them: without AVX2 the exponentials of a shard are added up in fewer lanes,
# so their sum is off too. 1.6 was measured (8 of 14 cases above 1). With AVX-512 the gradient of logits in bfloat16 was
# 2.1 times as far off as one of these bits in the mean makes it.
LOG_BITS = 3
FLOAT64 = 2.0**-40  # sums of thousands of addends: 7e-17 was measured
# Of a parameter in float32: a fused optimizer computes the end of a shard by another loop, and SGD without AVX2
# rounded one of 256 elements otherwise (2 of 35 cases of SGD; none of 35 with AVX2).
LAST_BIT = 2.0**-23

# What a block computes in code that inductor generates, which is replayed eagerly as a whole: roundings elsewhere,
# float8 values of each of its seven linears that differ by one, and partial sums of ranks. The largest of clean runs:
# 0.014 and 0.023 in the residual stream, 0.092 in a gradient. What linears multiply is held to less (`compiled.py`).
GENERATED = {"output": 0.03, "grad_output": 0.05, "grad": 0.2}


class Bits(NamedTuple):
    """What a run has in common with its replay, bit for bit.

    `same`: equal operations on equal operands, and a scaled matmul whatever part of its result or of its sum a rank
    computes, as on the virtual device. `summed`: sums over TP ranks, because they are in rank order. `reduced`: sums of
    gradients over data-parallel ranks. `shared`: those of keys and values over ranks that share a sequence.
    """

    same: bool = True
    summed: bool = True
    reduced: bool = True
    shared: bool = True


_READ_BY_OTHERS = ("attention.wk", "attention.wv")  # linears whose outputs other ranks of context parallelism read

# How far a result is off where the last bit of some gradient decides between two neighbouring float8 values, which in
# e5m2 are a quarter apart: 0.009 is the most that clean runs showed (5 of 60).
NEIGHBOUR = 0.05


def allowed_distance(case: Case, distance: ModuleDistance, *, bits: Bits, model: Model | None = None) -> float:
    """Return the largest relative distance of this tensor to its replay, which rounding explains.

    `model`: of one that is not known. Between its linears, whatever it consists of, roundings of all sums over TP
    ranks may come together, because no tensor is replaced there.
    """
    if case.train.dtype == "float64" or distance.kind == "param":
        return FLOAT64 if case.train.dtype == "float64" else _of_update(case, bits)
    if case.compile == "inductor" and distance.kind in GENERATED and _is_of_block(distance):
        return GENERATED[distance.kind]
    clipped = norm_rounding(case) if distance.kind == "grad" else 0.0
    if model is not None:
        return _of_unknown_model(case, distance, model, bits) + clipped
    if not bits.same and _is_behind_unrecorded_cast(case, distance):
        return NEIGHBOUR
    if distance.kind == "grad":
        return _gradient(case, distance, bits) + clipped
    shared = bits.shared or not _is_read_by_others(distance)
    repeated = bits.same and shared and (bits.summed or distance.parts > 1 or _is_repeated_exactly(case, distance))
    return _of_loss(case, distance) if repeated else _of_module(case, distance)


def _of_update(case: Case, bits: Bits) -> float:
    """Return the optimizer's arithmetic is the same, whatever ranks hold."""
    exact = bits.same and case.target == REFERENCE and case.train.optimizer != "sgd"
    return EXACT if exact else LAST_BIT


def _of_module(case: Case, distance: ModuleDistance) -> float:
    dtype = distance.dtype
    if _is_converted(case, distance.fqn) and distance.parts > 1 and case.float8.traits.writes_bfloat16:
        dtype = "bfloat16"  # its matmuls round to bfloat16 what is summed afterwards
    if distance.parts > 1:
        return _rounding(dtype, spread=distance.spread, parts=distance.parts)
    summed = case.layout.cp if _is_read_by_others(distance) else 1
    return _rounding(dtype, spread=1.0, parts=case.layout.tp * summed)  # what modules before it summed over TP ranks


def _is_read_by_others(distance: ModuleDistance) -> bool:
    """Return True for gradients of keys and values, which ranks of context parallelism add up."""
    return distance.kind == "grad_output" and distance.fqn.endswith(_READ_BY_OTHERS)


def _of_loss(case: Case, distance: ModuleDistance) -> float:
    """Of what is repeated exactly, but for a loss whose sums over a sharded vocabulary are in float32.

    They move the logarithm of every probability by its last bits, and so each of them, and the gradient of each logit
    but that of the label (`tail`), by that share of itself. In bfloat16 few are rounded to a neighbour, a share `s`
    away, with probability LOG_BITS * LOG / s: that adds LOG_BITS * LOG * s to the square of the distance.
    """
    is_loss = distance.fqn == OUTPUT_FQN and distance.kind == "grad_output"
    if not is_loss or case.layout.tp == 1 or not case.layout.loss_parallel:
        return EXACT
    if distance.dtype == "float32":
        return LOG_BITS * LOG * math.sqrt(distance.tail)
    return MARGIN * math.sqrt(LOG_BITS * LOG * 2 * UNIT[distance.dtype] * distance.tail)


def _of_unknown_model(case: Case, distance: ModuleDistance, model: Model, bits: Bits) -> float:
    tp, dp = case.layout.tp, case.layout.dp
    divides_exactly = dp & (dp - 1) == 0  # where the loss is divided by it on one side and gradients on the other
    same, by_itself = bits.same and divides_exactly, _is_scaled_matmul(distance, model, bits)
    if same and by_itself and (distance.kind != "grad" or dp == 1):
        return EXACT
    if tp == 1 or (same and by_itself):
        reduced = _rounding(case.train.reduce_dtype, spread=max(1.0, distance.spread), parts=dp)
        summed = max(reduced, _rounding(case.parameter_dtype))
        return summed if distance.kind == "grad" else EXACT if same else _rounding(case.train.dtype)
    rounded = distance.parts > 1 and distance.fqn in model.converted and case.float8.traits.writes_bfloat16
    sums = tp * max(1, sum(model.calls.values()))
    dtype = "bfloat16" if rounded else case.train.dtype
    return _rounding(dtype, spread=max(1.0, distance.spread), parts=distance.parts + sums)


def _is_scaled_matmul(distance: ModuleDistance, model: Model, bits: Bits) -> bool:
    """True for what a converted linear computes from its recorded operands alone, but for the sum over dp ranks."""
    if distance.kind in ("output", "grad_input"):
        return distance.fqn in model.converted
    linear = distance.fqn.removesuffix(".weight")
    return distance.kind == "grad" and bits.summed and linear != distance.fqn and linear in model.converted


def _gradient(case: Case, distance: ModuleDistance, bits: Bits) -> float:
    """Of a parameter: rounded to the dtype of the run on every TP rank, then summed over dp ranks."""
    layout, train, module = case.layout, case.train, distance.fqn.removesuffix(".weight")
    if layout.cp > 1 and layout.tp > 1 and train.dtype == "bfloat16" and module.endswith("norm"):
        # the replay rounds the sum over TP ranks of every piece; ranks add up microbatches, or the FSDP2 group, first
        return _rounding(train.dtype, spread=max(1.0, distance.spread), parts=layout.tp * train.accumulation)
    if bits.same and bits.summed and bits.reduced:
        return EXACT
    reduced = _rounding(train.reduce_dtype, spread=1.0, parts=layout.dp * layout.tp)
    summed = max(reduced, _rounding(case.parameter_dtype))
    if (bits.same and bits.summed) or train.dtype == "float32" or layout.tp == 1 or _is_converted(case, module):
        return summed
    return _rounding(train.dtype, spread=max(1.0, distance.spread), parts=layout.tp)


def _is_of_block(distance: ModuleDistance) -> bool:
    """Return True for what a block computes: its output, the gradient of its input, gradients of its parameters."""
    return distance.fqn.startswith("layers.") or (distance.fqn == "tok_embeddings" and distance.kind == "grad_output")


def _is_behind_unrecorded_cast(case: Case, distance: ModuleDistance) -> bool:
    """Return True in float32 with float8 TP styles, for what is computed from gradients that are cast between modules.

    These gradients are sums that the replay repeats up to their last bit. In bfloat16 that bit is rounded away.
    """
    if case.float8.tp_styles != "float8" or case.train.dtype != "float32":
        return False
    if distance.kind == "grad":
        return _is_converted(case, distance.fqn.removesuffix(".weight"))
    return distance.kind == "grad_output" and distance.fqn.endswith("_norm")


def _is_repeated_exactly(case: Case, distance: ModuleDistance) -> bool:
    """True for what depends on nothing that was summed over ranks, and on no matmul that sums as its shape decides.

    That is one scaled matmul; a norm or an embedding; what lies between two modules without the residual stream
    (attention, which computes every head by itself, and the activation), in forward and in backward.
    """
    if distance.parts > 1:
        return False
    is_linear = distance.fqn in linear_fqns(case)
    if distance.kind in ("output", "grad_input"):
        return not is_linear or _is_converted(case, distance.fqn)
    if distance.kind == "input":
        return is_linear
    return is_linear and distance.fqn != OUTPUT_FQN and linear_name(distance.fqn) not in ROWWISE


def _is_converted(case: Case, fqn: str) -> bool:
    return fqn in converted_fqns(case)


def _rounding(dtype: str, *, spread: float = 1.0, parts: int = 1) -> float:
    return MARGIN * UNIT[dtype] * math.sqrt(spread**2 + parts)
