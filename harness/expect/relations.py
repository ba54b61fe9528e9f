"""Relations: pairs of cases that must compute the same numbers, and how closely.

Every promise was verified on the virtual device; `tests/worker/test_metamorphic.py` keeps it verified. Not promised:
that the float8 all-gather changes nothing in bfloat16 (it casts the float32 master weight, a linear without it casts
the bfloat16 copy), that bits survive another order of summation, and anything about the float8 all-gather where FSDP2
is combined with TP: torchao 0.18 computes dynamic scales per TP rank but precomputed scales over all ranks.
"""

import operator
from collections.abc import Callable, Mapping

import msgspec

from harness.matrix.axes import AXES, DECLARED, DEFAULTS, changed
from harness.matrix.case import Case, Checks
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics, async_tp_gap, drifts, replayed_steps, sums_in_order
from harness.matrix.rules import exclusions, expected_refusal
from harness.registry import is_llama


class Relation(msgspec.Struct, frozen=True, kw_only=True):
    """`partner` has every loss, gradient norm, gradient and final parameter of the case, bit for bit on every rank.

    `name` is the option that differs, or several joined by `+`.
    """

    name: str
    partner: Case


def relations(case: Case) -> tuple[Relation, ...]:
    """Return every relation of a case to a counterpart without one option; none for a case that must not train."""
    found = (_without(name, case) for name in _NEUTRAL) if _trains(case) else ()
    return tuple(relation for relation in found if relation is not None)


def partner(case: Case, numerics: Numerics = VIRTUAL_DEVICE) -> Relation | None:
    """Return one relation to check in a matrix; None if parity leaves no room for rounding, or no option is neutral.

    The counterpart lacks every option that must not change a bit, all removed at once: bitwise equality is transitive.
    None too where async TP keeps no bits: what it fuses, and so the order of sums, depends on the other options.
    """
    if _parity_is_sharp(case, numerics) or not _trains(case) or async_tp_gap(case, numerics) is not None:
        return None
    removed: list[Relation] = []
    for name in _NEUTRAL:
        relation = _without(name, removed[-1].partner if removed else case)
        removed += [] if relation is None else [relation]
    if not removed:
        return None
    return Relation(name="+".join(relation.name for relation in removed), partner=removed[-1].partner)


def stands_for_modules(case: Case, relation: Relation | None, numerics: Numerics = VIRTUAL_DEVICE) -> bool:
    """Return True if the per-module replay checks the counterpart instead of a compiled case, whose modules cannot
    be recorded.

    `relation`: the one to this counterpart.
    """
    if case.compile == "none" or relation is None or not is_llama(case.target):
        return False
    return drifts(relation.partner, numerics) and bool(replayed_steps(relation.partner, numerics))


def _without(name: str, case: Case) -> Relation | None:
    """Return the relation to the case with the default of an axis; None if it has that, or where bits may differ."""
    if case.compile == "inductor" or _VALUES[name](case) == DEFAULTS[name]:
        return None  # generated code may round differently whatever option changes its graph
    if name in _APPLIES and not _APPLIES[name](case):
        return None
    defaults = {axis: DEFAULTS[axis] for axis in (name, *_ALSO_RESET.get(name, ()))}
    other = changed(msgspec.structs.replace(case, checks=Checks()), defaults)
    return Relation(name=name, partner=other) if _trains(other) else None


def _trains(case: Case) -> bool:
    return not exclusions(case) and expected_refusal(case) is None


def _parity_is_sharp(case: Case, numerics: Numerics) -> bool:
    """Return True if parity leaves no room for rounding: no wrong number could hide in its tolerance."""
    return (case.train.dtype == "float64" or sums_in_order(case, numerics)) and not _scale_is_inconsistent(case)


def _scale_is_inconsistent(case: Case) -> bool:
    """Return True if torchao 0.18 gives a weight one scale or one per TP rank, depending on when it is computed."""
    return case.float8.fp8_all_gather and case.layout.tp > 1


# When the default of an axis changes no bit, where that is not always so.
_APPLIES: Mapping[str, Callable[[Case], bool]] = {
    "async_tp": lambda case: case.compile == "graph",
    "compile": lambda case: case.compile == "graph" and not case.layout.async_tp,
    "precompute_scale": lambda case: not _scale_is_inconsistent(case),
    "fp8_all_gather": lambda case: not _scale_is_inconsistent(case) and case.train.dtype != "bfloat16",
}
_ALSO_RESET = {"fp8_all_gather": ("precompute_scale",)}
# The names of counterparts, which results store, have them in this order. One that is not in it comes last.
_ORDER = ("async_tp", "compile", "checkpointing", "evaluate", "resume", "tp_styles", "pad_inner_dim", "fp8_all_gather")
_NEUTRAL = sorted(
    (name for name, axis in DECLARED.items() if axis.same_bits), key=lambda name: (*_ORDER, name).index(name)
)
_VALUES = {name: operator.attrgetter(".".join(AXES[name])) for name in _NEUTRAL}
