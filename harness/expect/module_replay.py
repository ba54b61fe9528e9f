"""Local parity: how far a module of a parallel run may be from its replay on one rank.

The replay repeats a module on the operands that it really had, so nothing accumulates, and computes every part that TP
ranks add up as its rank does: on the virtual device every bit is the same. Elsewhere a result differs by the rounding
of its own arithmetic: every part that was rounded before it was summed over ranks, the sum, and the replay's own result
contribute one rounding each, and their errors add up as independent ones do.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from harness.expect.model import Model
from harness.matrix.case import Case
from harness.matrix.linears import OUTPUT_FQN, ROWWISE, converted_fqns, linear_fqns, linear_name
from harness.matrix.numerics import norm_rounding
from harness.promises import Limit
from harness.registry import REFERENCE
from harness.trace.graphs import GeneratedResult, GradientDistance
from harness.trace.model import ModuleDistance

EXACT = 0.0


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


_OF_BLOCKS = ("output", "grad_output", "grad")
_READ_BY_OTHERS = ("attention.wk", "attention.wv")  # linears whose outputs other ranks of context parallelism read


def allowed_distance(
    case: Case, distance: ModuleDistance, *, bits: Bits, model: Model | None = None, sums: int = 1
) -> float:
    """Return the largest relative distance of this tensor to its replay, which rounding explains.

    `model`: of one that is not known. `sums`: those over TP ranks behind the tensor that was recorded before it.
    """
    if case.train.dtype == "float64" or distance.kind == "param":
        return Limit("modules.float64") if case.train.dtype == "float64" else _of_update(case, bits)
    if case.compile == "inductor" and distance.kind in _OF_BLOCKS and _is_of_block(distance):
        return Limit(f"blocks.{distance.kind}_{case.train.dtype}")
    if distance.kind != "grad":
        return _between(case, distance, bits) if model is None else _of_unknown_model(case, distance, model, bits, sums)
    if model is not None:
        return _clipped(case, _of_unknown_gradient(case, distance, model, bits))
    if not bits.same and _is_behind_unrecorded_cast(case, distance):
        return Limit("modules.next_to_a_cast")
    return _clipped(case, _gradient(case, distance, bits))


def sums_before(tensors: Sequence[ModuleDistance], converted: Collection[str]) -> Iterator[int]:
    """Yield for each tensor, in the order of execution, how many sums over TP ranks are formed just before it.

    They are those of outputs and of input gradients that ranks add up. The loss behind the last module counts as one,
    and so does a product in high precision, whose kernel sums as the shapes of a rank decide.
    """
    linears = {tensor.fqn for tensor in tensors if tensor.kind == "grad_input"} - {*converted}
    sums, was_forward = 0, True
    for tensor in tensors:
        is_forward = tensor.kind in ("input", "output")
        if is_forward != was_forward:
            sums = 0 if is_forward else 1
        yield max(sums, tensor.kind in ("output", "grad_input") and tensor.fqn in linears)
        sums, was_forward = (sums + 1 if tensor.parts > 1 else 0), is_forward


def _between(case: Case, distance: ModuleDistance, bits: Bits) -> float:
    """Return the limit of what a Llama's modules get, compute and hand back."""
    if not bits.same and _is_behind_unrecorded_cast(case, distance):
        return Limit("modules.next_to_a_cast")
    shared = bits.shared or not _is_read_by_others(distance)
    repeated = bits.same and shared and (bits.summed or distance.parts > 1 or _is_repeated_exactly(case, distance))
    return _of_loss(case, distance) if repeated else _of_module(case, distance)


def _clipped(case: Case, limit: float) -> float:
    """Return the limit of a gradient, which clipping multiplies by a rounded norm."""
    norm = norm_rounding(case)
    return limit.plus(norm) if norm and isinstance(limit, Limit) else max(limit, norm)


def _of_update(case: Case, bits: Bits) -> float:
    """Return the limit of a parameter: the optimizer's arithmetic is the same, whatever ranks hold."""
    exact = bits.same and case.target == REFERENCE and case.train.optimizer != "sgd"
    return EXACT if exact else Limit("parity.last_bit")


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
    """Of what is repeated exactly, except a loss whose sums over a sharded vocabulary are in float32.

    They move the logarithm of every probability by its last bits, and so each of them, and the gradient of each logit
    but that of the label (`tail`), by that share of itself. In bfloat16 few are rounded to a neighbor, a share `s`
    away, with probability share / s: that adds share * s to the square of the distance.
    """
    is_loss = distance.fqn == OUTPUT_FQN and distance.kind == "grad_output"
    if not is_loss or case.layout.shares_of_logits == 1:
        return EXACT
    share = Limit("modules.last_bits_of_logarithm")
    if distance.dtype == "float32":
        return Limit(share.name, math.sqrt(distance.tail))
    return Limit(share.name, math.sqrt(4 * _rounding(distance.dtype, spread=0) * distance.tail / share))


def _of_unknown_model(case: Case, distance: ModuleDistance, model: Model, bits: Bits, sums: int) -> float:
    """Return the limit of what modules of any model get, compute and hand back.

    On the virtual device it is exact what one module computes, and what lies between two of them without a sum over TP
    ranks. Elsewhere roundings of all these sums may come together, because the residual stream's gradient is replaced
    at no module.
    """
    tp, dp = case.layout.tp, case.layout.dp
    same = bits.same and dp & (dp - 1) == 0  # the loss is divided by it on one side and gradients on the other
    by_itself = distance.kind in ("output", "grad_input") and distance.fqn in model.converted
    if same and (tp == 1 or by_itself or (bits.summed and not sums)):
        return EXACT
    if tp == 1:
        return _rounding(case.train.dtype)
    rounded = distance.parts > 1 and distance.fqn in model.converted and case.float8.traits.writes_bfloat16
    sums = sums if same and bits.summed else sum(model.calls.values())
    dtype = "bfloat16" if rounded else case.train.dtype
    return _rounding(dtype, spread=max(1.0, distance.spread), parts=distance.parts + tp * max(1, sums))


def _of_unknown_gradient(case: Case, distance: ModuleDistance, model: Model, bits: Bits) -> float:
    """Return the limit of the gradient of a parameter of any model, which TP ranks add up microbatch by microbatch."""
    tp, dp = case.layout.tp, case.layout.dp
    same, linear = bits.same and dp & (dp - 1) == 0, distance.fqn.removesuffix(".weight")
    by_itself = bits.summed and linear != distance.fqn and linear in model.converted
    if same and by_itself and dp == 1:
        return EXACT
    if tp == 1 or (same and by_itself):
        reduced = _rounding(case.train.reduce_dtype, spread=max(1.0, distance.spread), parts=dp)
        return max(reduced, _rounding(case.parameter_dtype))
    sums = max(model.calls.values(), default=1) if same and bits.summed else sum(model.calls.values())
    return _rounding(case.train.dtype, spread=max(1.0, distance.spread), parts=distance.parts + tp * max(1, sums))


def _gradient(case: Case, distance: ModuleDistance, bits: Bits) -> float:
    """Of a parameter: rounded to the dtype of the run on every TP rank, then summed over dp ranks."""
    layout, train, module = case.layout, case.train, distance.fqn.removesuffix(".weight")
    is_norm = train.dtype == "bfloat16" and module.endswith("norm")
    if layout.cp > 1 and layout.tp > 1 and train.accumulation > 1 and is_norm:
        # the replay rounds the sum over TP ranks of every piece; ranks add up microbatches first
        return _rounding(train.dtype, spread=max(1.0, distance.spread), parts=layout.tp * train.accumulation)
    if bits.same and bits.summed and bits.reduced:
        return _rounding(case.parameter_dtype) if _is_summed_by_columns(case, distance) else EXACT
    reduced = _rounding(train.reduce_dtype, spread=1.0, parts=layout.dp * layout.tp)
    summed = max(reduced, _rounding(case.parameter_dtype))
    if (bits.same and bits.summed) or train.dtype == "float32" or layout.tp == 1 or _is_converted(case, module):
        return summed
    return _rounding(train.dtype, spread=max(1.0, distance.spread), parts=layout.tp)


def _is_summed_by_columns(case: Case, distance: ModuleDistance) -> bool:
    """Return True for the bias of a converted linear of which TP ranks have columns: how many decides how a CPU sums.

    The replay multiplies for all ranks at once. In high precision it does so for each of them.
    """
    linear, is_bias = distance.fqn.removesuffix(".bias"), distance.fqn.endswith(".bias")
    return is_bias and case.layout.tp > 1 and _is_converted(case, linear) and linear_name(linear) not in ROWWISE


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


def _rounding(dtype: str, *, spread: float = 1.0, parts: int = 1) -> Limit:
    return Limit(f"modules.{dtype}", math.sqrt(spread**2 + parts))


# Compiled blocks: how far generated code may be from its graph. Inductor fuses operators and keeps float32 between them
# where the graph rounds. So a tensor in bfloat16 differs in its last bits, and what is cast from it to float8 now and
# then by one float8 value. Where inductor is asked to round as the graph does (`emulate_precision_casts`, rowwise),
# only sums in float32 differ, by their order.


def rounding(case: Case) -> Limit:
    """Return how far a tensor that is rounded to what the case computes in may be off, relative to its norm."""
    return Limit(_unit(case).name, Limit("code.units"))


def _unit(case: Case, *, emulated: bool = False) -> Limit:
    if case.train.dtype == "float64":
        return Limit("code.scale")  # scales are float32 whatever the case computes in
    return Limit("code.unit_float32" if emulated else f"code.unit_{case.train.dtype}")


def allowed_in_code(case: Case, result: GeneratedResult, *, emulated: bool) -> Limit:
    """Return the largest distance of this tensor that rounding explains. `emulated`: the code rounds as its graph does.

    A value that is off by a share `r` of itself is rounded to a neighbor, a share `s` away, with probability r / s,
    which adds r * s to the square of the distance. The code adds up terms that the graph rounds first: `cancelled`.
    """
    if result.tensor.startswith("scale") and case.float8.traits.power_of_two_scales:
        return Limit("code.moved_rows")
    share = _unit(case, emulated=emulated)
    step = _step(result.dtype)
    if step is not None and share < step:
        return Limit(step.name, Limit("code.units") * math.sqrt(share / 2 / step))
    rows_move = case.float8.traits.power_of_two_scales and not emulated
    return Limit(share.name, Limit("code.units") * result.cancelled * (2 if rows_move else 1))


def _step(dtype: str) -> Limit | None:
    """Return the largest relative distance between neighboring values of a dtype."""
    if dtype.startswith("float8"):
        return Limit(f"code.step_{dtype}")
    return Limit("code.unit_bfloat16") if dtype == "bfloat16" else None


def allowed_row(case: Case, result: GeneratedResult, limit: Limit) -> float:
    """Return the largest distance of one row, where `limit` is the tensor's.

    Where the amax of a row is next to a power of two, its scale, and so its float8 data, may be twice or half as large,
    and products of such a row are rounded differently.
    """
    of_row = Limit("code.row", limit)
    if not case.float8.traits.power_of_two_scales:
        return of_row
    moves = result.tensor.startswith("scale") or result.dtype.startswith("float8")
    return 1.0 if moves else max(of_row, Limit("code.step_float8_e5m2"))


def reduced_distance(case: Case, distance: GradientDistance) -> float:
    """Return how far a gradient may be from the one that generated code returned, relative to its norm.

    On one rank it is the same tensor. FSDP2 rounds it to `reduce_dtype` in every sum, and to the dtype of parameters. A
    sum over TP ranks is rounded to the dtype of the case.
    """
    if distance.summed_over_tp:
        return rounding(case)
    if case.layout.dp == 1:
        return 0.0
    is_rounded = "bfloat16" in (case.train.reduce_dtype, case.parameter_dtype)
    return Limit("code.unit_bfloat16" if is_rounded else "code.scale", Limit("code.units"))
