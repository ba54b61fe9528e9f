"""Smaller cases: what can be taken from a case, one axis at a time, the largest part first.

An axis is taken to its smallest value, to its default, and then half of the way. Where a rule excludes what is left,
the options that it names go to their defaults as well: without TP there are no TP styles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.errors import HarnessError
from harness.matrix.axes import AXES, DECLARED, axis_values, case_from_axes, shown_value
from harness.matrix.axis import Changes
from harness.matrix.case import Case
from harness.matrix.layout import DP_AXES, ranks_of
from harness.matrix.rules import exclusions, expected_refusal

# Every axis, in the order in which it is tried: what costs most first. Of sizes, the least that there can be.
_SMALLEST: Mapping[str, int] = {name: axis.smallest for name, axis in DECLARED.items() if axis.smallest is not None}
OPTIONS = tuple(name for name, axis in DECLARED.items() if axis.smallest is None and axis.shrinks)
GROUPS: tuple[tuple[str, ...], ...] = (
    tuple(name for name in _SMALLEST if DECLARED[name].changes is Changes.TRAINING),
    tuple(name for name in _SMALLEST if DECLARED[name].changes is Changes.LAYOUT),
    OPTIONS,
)
_GRID = 64  # a size that keeps its remainder by this keeps what alignment makes of it


class Smaller(NamedTuple):
    """A smaller case, and the axes that were changed for it with their new values."""

    case: Case
    changes: Mapping[str, object]

    @property
    def text(self) -> str:
        """What was changed: `tp 1, async_tp false`."""
        return ", ".join(f"{name} {shown_value(value)}" for name, value in self.changes.items())


def smaller_cases(case: Case, *, steps: int = 1) -> Iterator[Smaller]:
    """Every smaller case by one axis, the smallest value first. `steps`: the least that is needed."""
    for name in (*_SMALLEST, *OPTIONS):
        for value in _values(case, name, steps):
            found = with_changes(case, {name: value})
            if found is not None:
                yield found


def smaller_groups(case: Case, *, steps: int = 1) -> Iterator[Smaller]:
    """Cases with all axes of a group at their smallest values: where one shows the same, much is saved."""
    for group in ((*_SMALLEST, *OPTIONS), *GROUPS):
        changes = {name: each[0] for name in group if (each := _values(case, name, steps))}
        found = with_changes(case, changes) if len(changes) > 1 else None
        if found is not None:
            yield found


def with_changes(case: Case, changes: Mapping[str, object]) -> Smaller | None:
    """The case with these values, and whatever else a rule then asks for. None where there is no such case.

    A case that torch must refuse is none either, unless the first must be refused too.
    """
    values = axis_values(case) | dict(changes)
    found = _allowed(_with_heads(values), frozenset(changes))
    if found is None or found == case or (expected_refusal(found) is None) != (expected_refusal(case) is None):
        return None
    now, before = axis_values(found), axis_values(case)
    return Smaller(found, {name: now[name] for name in AXES if now[name] != before[name]})


def _values(case: Case, name: str, steps: int) -> Sequence[object]:
    """The simpler values of an axis of a case, the simplest first."""
    value = axis_values(case)[name]
    if name in _SMALLEST:
        return _sizes(value, steps if name == "steps" else _smallest(case, name))
    simplest = DECLARED[name].simplest or axis_values(Case())[name]
    if (name, value) in (("recipe", "bf16"), ("dtype", "float64")):  # simpler already; the sharpest comparison
        return ()
    return () if value == simplest else (simplest,)


def _smallest(case: Case, name: str) -> int:
    """The least size with which the ranks of a case have what they need: 16 rows each, a head, a sequence."""
    tp = case.layout.tp
    least = {"global_batch": case.layout.dp, "heads": tp, "kv_heads": tp}
    rows = 16 * tp if name in ("dim", "ffn_dim", "vocab_size", "seq_len") else 1
    return max(_SMALLEST[name], least.get(name, 1), rows)


def _sizes(value: object, smallest: int) -> Sequence[int]:
    """Sizes below a value: the smallest, then towards it; where that is possible with the same remainder."""
    assert isinstance(value, int)
    parts = sorted({max(smallest, value // part) for part in (16, 8, 4, 2)} | {smallest})
    aligned = [part - part % _GRID + value % _GRID for part in parts if part >= _GRID]
    return [size for size in dict.fromkeys(sorted({*parts, *aligned})) if smallest <= size < value]


def _with_heads(values: Mapping[str, object]) -> dict[str, object]:
    """The values with a number of heads that fits, where another dim, tp or number of heads needs one."""
    found = dict(values)
    dim, heads, tp = (int(str(found[name])) for name in ("dim", "heads", "tp"))
    if dim % heads or (dim // heads) % 2 or heads % tp:
        found["heads"] = heads = tp if dim % tp == 0 and (dim // tp) % 2 == 0 else heads
    kv_heads = int(str(found["kv_heads"]))
    if heads % kv_heads or kv_heads % tp:
        found["kv_heads"] = heads
    return found


def _allowed(values: Mapping[str, object], fixed: frozenset[str]) -> Case | None:
    """The case of these values; options that rules name are set to their defaults until none excludes it."""
    default = axis_values(Case())
    found = dict(values)
    for _ in range(len(AXES)):
        try:
            case = case_from_axes(found)
        except HarnessError:
            return None
        rules = exclusions(case)
        if not rules:
            return case
        now = axis_values(case)
        names = [each for each in rules[0].axes if each in OPTIONS and each not in fixed and now[each] != default[each]]
        batch = ranks_of(now, DP_AXES)
        if rules[0].name == "batch_divides_dp" and "global_batch" not in fixed:
            found["global_batch"] = max(batch, int(str(now["global_batch"])) // batch * batch)
        elif rules[0].name == "replicate_needs_shard" and "dp_replicate" not in fixed:
            found["dp_replicate"] = 1
        elif names:
            found[names[0]] = default[names[0]]
        else:
            return None
    return None
