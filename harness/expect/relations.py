"""Relations: pairs of cases that must compute the same numbers, and how closely.

Every promise was verified on the virtual device; `tests/worker/test_metamorphic.py` keeps it verified. Not promised:
that the float8 all-gather changes nothing in bfloat16 (it casts the float32 master weight, a linear without it casts
the bfloat16 copy), that bits survive another order of summation, and anything about the float8 all-gather where FSDP2
is combined with TP: torchao 0.18 computes dynamic scales per TP rank but precomputed scales over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from harness.matrix.case import Case, Checkpointing, Checks, Layout
from harness.matrix.layout import SHARD_AXES, ranks_of
from harness.matrix.linears import converted_fqns, linear_features, linear_name
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics, async_tp_gap, sums_in_order
from harness.matrix.replayed import replayed_steps
from harness.matrix.rules import exclusions, expected_refusal
from harness.matrix.targets import is_llama

# bitwise: every loss, gradient norm, gradient and final parameter, on every rank. exact: the same numbers up to the
# rounding of sums in float64.
Promise = Literal["bitwise", "exact"]


class Relation(msgspec.Struct, frozen=True, kw_only=True):
    """`partner` computes what the case computes. `name` is the option that differs, or several joined by `+`.

    `steps`: the promise covers this many steps only; None: all of them.
    """

    name: str
    partner: Case
    promise: Promise
    reason: str
    steps: int | None = None


def relations(case: Case) -> tuple[Relation, ...]:
    """Every relation of a case to a partner that differs in one option; none for a case that must not train."""
    found = (_relation(option, case) for option in _OPTIONS) if _trains(case) else ()
    return tuple(relation for relation in found if relation is not None)


def partner(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> Relation | None:
    """The one relation to check in a matrix; None where parity leaves no room for rounding, or no option is neutral.

    The partner lacks every option that must not change a bit, all removed at once: bitwise equality is transitive.
    None too where async TP keeps no bits: what it fuses, and so the order of sums, depends on the other options.
    """
    if _parity_is_sharp(case, numerics) or not _trains(case) or async_tp_gap(case, numerics) is not None:
        return None
    removed: list[Relation] = []
    for option in _BITWISE:
        relation = _relation(option, removed[-1].partner if removed else case)
        if relation is not None and relation.steps is None:
            removed.append(relation)
    if not removed:
        return None
    return Relation(
        name="+".join(relation.name for relation in removed),
        partner=removed[-1].partner,
        promise="bitwise",
        reason="; ".join(relation.reason for relation in removed),
    )


def stands_for_modules(case: Case, relation: Relation | None, numerics: Numerics = VIRTUAL_DEVICE) -> bool:
    """True when local parity judges the partner in place of a compiled case, whose modules cannot be recorded.

    Every bit of the partner is promised to be that of the case. `relation`: the one to this partner.
    """
    if case.compile == "none" or relation is None or not is_llama(case.target):
        return False
    return relation.promise == "bitwise" and relation.steps is None and replayed_steps(relation.partner, numerics) > 0


class _Option(NamedTuple):
    """An option that must not change results: the cases that have it, and the partner of such a case."""

    name: str
    applies: Callable[[Case], bool]
    partner: Callable[[Case], Case]
    reason: str


def _relation(option: _Option, case: Case) -> Relation | None:
    if case.compile == "inductor" and option.name != "inductor":
        return None  # generated code may round differently whatever option changes its graph
    exact = option not in _BITWISE
    if not option.applies(case) or (exact and case.train.dtype != "float64"):
        return None  # in lower precision another order of sums changes a float8 value within a step or two
    other = option.partner(msgspec.structs.replace(case, checks=Checks()))
    if not _trains(other):
        return None
    first_step_only = option.name == "precompute_scale" and _scale_is_inconsistent(case)
    return Relation(
        name=option.name,
        partner=other,
        promise="exact" if exact else "bitwise",
        reason=option.reason,
        steps=1 if first_step_only else None,
    )


def _trains(case: Case) -> bool:
    return not exclusions(case) and expected_refusal(case) is None


def _parity_is_sharp(case: Case, numerics: Numerics) -> bool:
    """True when parity leaves no room for rounding: no wrong number could hide in its tolerance."""
    return (case.train.dtype == "float64" or sums_in_order(case, numerics)) and not _scale_is_inconsistent(case)


def _scale_is_inconsistent(case: Case) -> bool:
    """True where torchao 0.18 gives a weight one scale or one per TP rank, depending on when it is computed."""
    return case.float8.fp8_all_gather and case.layout.tp > 1


def _with_layout(**changes: object) -> Callable[[Case], Case]:
    return lambda case: msgspec.structs.replace(case, layout=msgspec.structs.replace(case.layout, **changes))


def _with_float8(**changes: object) -> Callable[[Case], Case]:
    return lambda case: msgspec.structs.replace(case, float8=msgspec.structs.replace(case.float8, **changes))


def _eager(case: Case) -> Case:
    return msgspec.structs.replace(_with_layout(async_tp=False)(case), compile="none")


def _without_replicas(case: Case) -> Case:
    return _with_layout(dp_replicate=1, dp_shard=case.layout.dp)(case)


def _replicas_can_be_shards(case: Case) -> bool:
    """True for HSDP, except where torch cannot gather the resulting uneven shards in float8."""
    gatherable = not case.float8.fp8_all_gather or _shards_evenly(case, _without_replicas(case).layout)
    return case.layout.dp_replicate > 1 and gatherable


def _shards_evenly(case: Case, layout: Layout) -> bool:
    """True when every rank holds the same number of rows of every converted weight."""
    if not is_llama(case.target):
        return False  # it is not known how many there are
    rows = (linear_features(case, linear_name(fqn))[1] for fqn in converted_fqns(case))
    return all(count % ranks_of(layout.mesh, SHARD_AXES) == 0 for count in rows)


_BITWISE = (
    _Option(
        name="async_tp",
        applies=lambda case: case.layout.async_tp and case.compile == "graph",
        partner=_with_layout(async_tp=False),
        reason="a fused operator multiplies the same rows and sums the same partial results in rank order",
    ),
    _Option(
        name="compile",
        applies=lambda case: case.compile == "graph" and not case.layout.async_tp,
        partner=_eager,
        reason="the graph is executed operator by operator, undecomposed",
    ),
    _Option(
        name="checkpointing",
        applies=lambda case: case.checkpointing.mode != "none",
        partner=lambda case: msgspec.structs.replace(case, checkpointing=Checkpointing()),
        reason="recomputation repeats the same arithmetic on the same bits",
    ),
    _Option(
        name="evaluate",
        applies=lambda case: case.train.evaluate,
        partner=lambda case: msgspec.structs.replace(case, train=msgspec.structs.replace(case.train, evaluate=False)),
        reason="an evaluation changes nothing that training reads",
    ),
    _Option(
        name="resume",
        applies=lambda case: case.train.resume != "none",
        partner=lambda case: msgspec.structs.replace(case, train=msgspec.structs.replace(case.train, resume="none")),
        reason="a state that is saved and loaded has the same bits",
    ),
    _Option(
        name="tp_styles",
        applies=lambda case: case.float8.tp_styles == "float8",
        partner=_with_float8(tp_styles="plain"),
        reason="a cast with the scale of the logical tensor is the same before and after an all-gather",
    ),
    _Option(
        name="pad_inner_dim",
        applies=lambda case: case.float8.pad_inner_dim,
        partner=_with_float8(pad_inner_dim=False),
        reason="where every matmul is aligned there is nothing to pad",
    ),
    _Option(
        name="fp8_all_gather",
        applies=lambda case: (
            case.float8.fp8_all_gather and not _scale_is_inconsistent(case) and case.train.dtype != "bfloat16"
        ),
        partner=_with_float8(fp8_all_gather=False, precompute_scale=False),
        reason="the gathered shards carry the scale of the full weight, so it does not matter where they are cast",
    ),
    _Option(
        name="reshard_after_forward",
        applies=lambda case: case.layout.reshard_after_forward != "default",
        partner=_with_layout(reshard_after_forward="default"),
        reason="a weight that is gathered again has the same bits",
    ),
    _Option(
        name="precompute_scale",
        applies=lambda case: case.float8.precompute_scale,
        partner=_with_float8(precompute_scale=False),
        reason="the amax of a weight is the same right after its update and right before its use; in the first step no "
        "scale is precomputed",
    ),
)
_EXACT = (
    _Option(
        name="inductor",
        applies=lambda case: case.compile == "inductor",
        partner=_eager,
        reason="in float64 generated code only reorders sums; in lower precision it keeps float32 intermediates",
    ),
    _Option(
        name="tp",
        applies=lambda case: case.layout.tp % 2 == 0 and case.layout.tp >= 4 and not _scale_is_inconsistent(case),
        partner=lambda case: _with_layout(tp=case.layout.tp // 2)(case),
        reason="DTensor scales by the logical tensor, so only the order of sums differs",
    ),
    _Option(
        name="dp_replicate",
        applies=_replicas_can_be_shards,
        partner=_without_replicas,
        reason="the same slices of the batch are summed, in two stages or in one",
    ),
    _Option(
        name="sequence_parallel",
        applies=lambda case: not case.layout.sequence_parallel,
        partner=_with_layout(sequence_parallel=True),
        reason="it shards what is computed between TP blocks and changes no scale",
    ),
    _Option(
        name="loss_parallel",
        applies=lambda case: not case.layout.loss_parallel,
        partner=_with_layout(loss_parallel=True),
        reason="it shards the softmax over the vocabulary",
    ),
)
_OPTIONS = (*_BITWISE, *_EXACT)
