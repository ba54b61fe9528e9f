"""Relations: pairs of cases that must compute the same numbers, and how closely.

Every promise was verified on the virtual device; `tests/worker/test_metamorphic.py` keeps it verified. Not promised:
that the float8 all-gather changes nothing in bfloat16 (it casts the float32 master weight, a linear without it casts
the bfloat16 copy), that bits survive another order of summation, and anything about the float8 all-gather where FSDP2
is combined with TP: torchao 0.18 computes dynamic scales per TP rank but precomputed scales over all ranks.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec

from harness.matrix.axes import AXES, DECLARED, DEFAULTS, changed
from harness.matrix.case import Case, Checks, Layout
from harness.matrix.layout import SHARD_AXES, ranks_of
from harness.matrix.linears import converted_fqns, linear_features, linear_name
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics, async_tp_gap, drifts, replayed_steps, sums_in_order
from harness.matrix.rules import exclusions, expected_refusal
from harness.registry import is_llama

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
    """Return every relation of a case to a partner that differs in one option; none for a case that must not train."""
    candidates = (_relation(option, case) for option in _OPTIONS) if _trains(case) else ()
    return tuple(relation for relation in candidates if relation is not None)


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
    """Return True when local parity judges the partner in place of a compiled case, whose modules cannot be recorded.

    Every bit of the partner is promised to equal the case's. `relation`: the one to this partner.
    """
    if case.compile == "none" or relation is None or not is_llama(case.target):
        return False
    other = relation.partner
    is_whole = relation.promise == "bitwise" and relation.steps is None
    return is_whole and drifts(other, numerics) and bool(replayed_steps(other, numerics))


class _Option(NamedTuple):
    """An option that must not change results: the cases that have it, and the partner of such a case."""

    name: str
    promise: Promise
    applies: Callable[[Case], bool]
    partner: Callable[[Case], Case]
    reason: str


def _relation(option: _Option, case: Case) -> Relation | None:
    if case.compile == "inductor" and option.name != "inductor":
        return None  # generated code may round differently whatever option changes its graph
    if not option.applies(case) or (option.promise == "exact" and case.train.dtype != "float64"):
        return None  # in lower precision another order of sums changes a float8 value within a step or two
    other = option.partner(msgspec.structs.replace(case, checks=Checks()))
    if not _trains(other):
        return None
    first_step_only = option.name == "precompute_scale" and _scale_is_inconsistent(case)
    return Relation(
        name=option.name,
        partner=other,
        promise=option.promise,
        reason=option.reason,
        steps=1 if first_step_only else None,
    )


def _trains(case: Case) -> bool:
    return not exclusions(case) and expected_refusal(case) is None


def _parity_is_sharp(case: Case, numerics: Numerics) -> bool:
    """Return True when parity leaves no room for rounding: no wrong number could hide in its tolerance."""
    return (case.train.dtype == "float64" or sums_in_order(case, numerics)) and not _scale_is_inconsistent(case)


def _scale_is_inconsistent(case: Case) -> bool:
    """Return True where torchao 0.18 gives a weight one scale or one per TP rank, depending on when it is computed."""
    return case.float8.fp8_all_gather and case.layout.tp > 1


def _without_replicas(case: Case) -> Case:
    return changed(case, {"dp_replicate": 1, "dp_shard": case.layout.dp})


def _replicas_can_be_shards(case: Case) -> bool:
    """Return True for HSDP, except where torch cannot gather the resulting uneven shards in float8."""
    gatherable = not case.float8.fp8_all_gather or _shards_evenly(case, _without_replicas(case).layout)
    return case.layout.dp_replicate > 1 and gatherable


def _shards_evenly(case: Case, layout: Layout) -> bool:
    """Return True when every rank holds the same number of rows of every converted weight."""
    if not is_llama(case.target):
        return False  # it is not known how many there are
    rows = (linear_features(case, linear_name(fqn))[1] for fqn in converted_fqns(case))
    return all(count % ranks_of(layout.mesh, SHARD_AXES) == 0 for count in rows)


# When the default of an axis changes no bit, where that is not always so.
_APPLIES: Mapping[str, Callable[[Case], bool]] = {
    "async_tp": lambda case: case.compile == "graph",
    "compile": lambda case: case.compile == "graph" and not case.layout.async_tp,
    "fp8_all_gather": lambda case: not _scale_is_inconsistent(case) and case.train.dtype != "bfloat16",
}
_ALSO_RESET = {"fp8_all_gather": ("precompute_scale",)}
# The names of partners, which results store, have them in this order. One that is not in it comes last.
_ORDER = ("async_tp", "compile", "checkpointing", "evaluate", "resume", "tp_styles", "pad_inner_dim", "fp8_all_gather")


def _at_default(name: str, promise: Promise, reason: str) -> _Option:
    applies, defaults = _APPLIES.get(name), {axis: DEFAULTS[axis] for axis in (name, *_ALSO_RESET.get(name, ()))}
    differs = operator.attrgetter(".".join(AXES[name]))
    return _Option(
        name=name,
        promise=promise,
        applies=lambda case: differs(case) != DEFAULTS[name] and (applies is None or applies(case)),
        partner=lambda case: changed(case, defaults),
        reason=reason,
    )


_NEUTRAL = sorted(
    (name for name, axis in DECLARED.items() if axis.same_bits), key=lambda name: (*_ORDER, name).index(name)
)
_BITWISE = tuple(_at_default(name, "bitwise", DECLARED[name].same_bits) for name in _NEUTRAL)
_OPTIONS = (
    *_BITWISE,
    _Option(
        name="inductor",
        promise="exact",
        applies=lambda case: case.compile == "inductor",
        partner=lambda case: changed(case, {"compile": "none", "async_tp": False}),
        reason="in float64 generated code only reorders sums; in lower precision it keeps float32 intermediates",
    ),
    _Option(
        name="tp",
        promise="exact",
        applies=lambda case: case.layout.tp % 2 == 0 and case.layout.tp >= 4 and not _scale_is_inconsistent(case),
        partner=lambda case: changed(case, {"tp": case.layout.tp // 2}),
        reason="DTensor scales by the logical tensor, so only the order of sums differs",
    ),
    _Option(
        name="dp_replicate",
        promise="exact",
        applies=_replicas_can_be_shards,
        partner=_without_replicas,
        reason="the same slices of the batch are summed, in two stages or in one",
    ),
    *(_at_default(name, "exact", axis.same_sums) for name, axis in DECLARED.items() if axis.same_sums),
)
