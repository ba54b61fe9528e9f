"""Numerics: which bits of a run are promised, by what its collectives run on and what multiplies.

Only the shared-memory backend sums in rank order, whatever the number of ranks. gloo and NCCL sum in the order in which
data goes around; of two addends there is one order only. A GPU chooses a kernel by the shape of the operands, and each
has its own order of accumulation. Where bits are not promised, the modules of the first steps are replayed on one rank.
"""

import msgspec

from harness.matrix.case import Case
from harness.matrix.layout import DP_AXES
from harness.matrix.linears import ROWWISE, linear_features, linear_fqns, linear_name, parameter_count
from harness.matrix.recipes import ITEM_BYTES
from harness.promises import Limit
from harness.registry import REFERENCE, computes_on_plain_shards, is_llama

_ONE_ORDER = 2  # ranks


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """`in_rank_order`: sums over ranks are, of any number. `same_in_parts`: a part of a matmul has the bits of it."""

    in_rank_order: bool = True
    same_in_parts: bool = True

    def has_one_order(self, ranks: int) -> bool:
        """Return True if the sum over a group of so many ranks has the bits of a sum in rank order."""
        return self.in_rank_order or ranks <= _ONE_ORDER


VIRTUAL_DEVICE = Numerics()


def sums_in_order(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> bool:
    """True if the single-rank reference has every sum over ranks, and the norm it clips by, in the same order."""
    layout = case.layout
    if clips_by_a_rounded_norm(case):
        return False
    if layout.tp > 1 or (layout.dp_replicate > 1 < layout.dp_shard and case.train.reduce_dtype != "bfloat16"):
        return False
    return all(numerics.has_one_order(layout.mesh[axis]) for axis in DP_AXES)


def activations_differ(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> bool:
    """True if ranks add up activations, or their gradients, in another order than one rank does: from step 1 on."""
    return case.layout.tp > 1 or not numerics.has_one_order(case.layout.cp)


def averages_gradients(case: Case) -> bool:
    """Return True if ranks may divide their loss by their own tokens alone, and gradients when they add them up."""
    return case.layout.is_ddp or not is_llama(case.target)


def has_plain_shards(case: Case) -> bool:
    """Return True if TP ranks compute on plain tensors, which cannot be put together or compared with one rank's."""
    return case.layout.tp > 1 and computes_on_plain_shards(case.target)


def clips_by_a_rounded_norm(case: Case) -> bool:
    """Return True if ranks sum the norm in an order of their own, so that its rounding is in every gradient."""
    return case.train.max_norm is not None and case.world_size > 1 and case.train.dtype != "float64"


def norm_rounding(case: Case) -> float:
    """Return what the rounding of the norm adds to the distance of a clipped gradient, relative to its norm."""
    return rounding_of_norm(case) if clips_by_a_rounded_norm(case) else 0.0


def rounding_of_norm(case: Case) -> float:
    """Return how far the norm that a target reports may be from the exact one of the same gradients, relative to it."""
    return Limit("norms.bfloat16" if case.parameter_dtype == "bfloat16" else "norms.float32")


def async_tp_gap(case: Case, numerics: Numerics) -> str | None:
    """Return why async TP may give other bits than TP; None if it gives the same, or the case has none of it."""
    if not case.layout.async_tp:
        return None
    if not numerics.same_in_parts:
        return "async TP multiplies in chunks, and a kernel is chosen by their shape: bits of TP and async TP differ"
    if not numerics.has_one_order(case.layout.tp):
        return "async TP sums in rank order, and this backend does not: bits of TP and async TP differ"
    return None


# A run hands what it recorded to its replay in one message, which may have 1 GiB.
RECORDED_BYTES = 640 << 20
# What goes wrong in a module does so from one of the first steps on, or later: the last one shows it, or some between.
FIRST_STEPS, LATER_STEPS = 5, 7


def drifts(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> bool:
    """Return True if ranks sum in another order than one rank does, in a dtype that rounds: trajectories drift apart.

    So they do where code is generated, which rounds elsewhere.
    """
    in_order = sums_in_order(case, numerics) and case.compile != "inductor"
    return not in_order and case.train.dtype != "float64"


def replayed_steps(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> tuple[int, ...]:
    """Return the steps, 1-based, whose modules are recorded and replayed: the first, some later ones, and the last.

    In runs that drift: of large models so many as fit into a message. How large a model is that is not known shows in
    the run (`worker/probes/module_tensors.py`). Blocks with generated code are modules. Executed graphs have a
    counterpart. In float64 parity is exact, and finds what is wrong: the first step of TP ranks tells which of their
    sums it is.
    """
    if case.train.dtype == "float64" and case.layout.tp > 1 and case.compile == "none" and is_llama(case.target):
        return () if has_plain_shards(case) else (1,)
    if not drifts(case, numerics) or case.compile == "graph":
        return ()
    if case.compile == "inductor" and case.target != REFERENCE:
        return ()
    if has_plain_shards(case):
        return ()
    if not is_llama(case.target):
        return () if case.float8.tp_styles == "float8" else _spread_out(case.train.steps, FIRST_STEPS + LATER_STEPS)
    return _spread_out(case.train.steps, min(FIRST_STEPS + LATER_STEPS, RECORDED_BYTES // _recorded_bytes(case)))


def _spread_out(steps: int, at_most: int) -> tuple[int, ...]:
    if steps <= at_most:
        return tuple(range(1, steps + 1))
    later = min(LATER_STEPS, at_most // 2)
    first = at_most - later
    return (*range(1, first + 1), *(first + (steps - first) * place // later for place in range(1, later + 1)))


def _recorded_bytes(case: Case) -> int:
    """Return the bytes of one step over all ranks: operands, results, gradients; parameters and theirs in float32.

    Under TP every rank has all of a sum's terms: of the outputs of row-wise linears, of the input gradients of others.
    """
    names = [linear_name(fqn) for fqn in linear_fqns(case)]
    features = [linear_features(case, name) for name in names]
    summed = sum(sizes[name in ROWWISE] for name, sizes in zip(names, features, strict=True))
    between = (4 * case.model.shape.layers + 3) * case.model.shape.dim  # norms, and the embedding
    width = 2 * (sum(map(sum, features)) + between) + (case.layout.tp - 1) * summed
    return 2 * 4 * parameter_count(case) + ITEM_BYTES[case.train.dtype] * case.train.tokens * width


def gradients_are_followed(case: Case) -> bool:
    """Return True if gradients are compared with those that generated code returns for the parameters that it is given.

    Weights that FSDP2 gathers in float8 are given to it as two tensors, which have no gradient.
    """
    return case.compile == "inductor" and case.target == REFERENCE and not case.float8.fp8_all_gather
