"""Selectors: short expressions that pick cases by axis values and ids, as in `--select "tp=4,8 recipe!=bf16"`.

Terms are separated by spaces and all must hold: `axis=value[,value...]`, `axis!=value[,value...]`, `axis>=number` (also
`>`, `<=`, `<`), `id~glob`, and a bare word, which is a part of the id. `DERIVED` values can be used like axes.
`target=torchtitan` holds for `torchtitan.llama3` too.
"""

import fnmatch
import functools
import math
import operator
import re
from collections.abc import Callable

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import AXES, DECLARED, axis_type, read_value, suggestion
from harness.matrix.case import Case, ModelShape
from harness.matrix.caseid import case_id
from harness.matrix.layout import DP_AXES, MESH_AXES
from harness.matrix.recipes import TRAITS

_TERM = re.compile(r"([A-Za-z_0-9]+)(!=|>=|<=|=|>|<|~)(.*)", re.DOTALL)


# Numbers, and answers, that follow from axes and can be used like one.
DERIVED: dict[str, Callable[[Case], int]] = {
    "world_size": lambda case: case.world_size,
    "local_batch": lambda case: case.local_batch,
    "block": lambda case: TRAITS[case.float8.recipe].block,
}
_READERS: dict[str, Callable[[Case], object]] = {
    **{name: operator.attrgetter(".".join(path)) for name, path in AXES.items()},
    **{name: operator.attrgetter(f"model.shape.{name}") for name in ModelShape.__struct_fields__},
    **DERIVED,
}


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One condition. `axis` is None for a condition on the id, whose only value is a glob."""

    axis: str | None
    operator: str
    values: tuple[object, ...]

    def matches(self, case: Case) -> bool:
        if self.axis is None:
            return fnmatch.fnmatchcase(case_id(case), str(self.values[0]))
        if self.axis == "target":
            return (self.operator == "=") is any(f"{case.target}.".startswith(f"{name}.") for name in self.values)
        return _OPERATORS[self.operator](_READERS[self.axis](case), self.values)


class Selector(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed expression; without terms it matches every case."""

    text: str
    terms: tuple[Term, ...]

    def matches(self, case: Case) -> bool:
        for term in self.terms:  # noqa: SIM110  the rules of a matrix ask a million times, and `all` takes twice as long
            if not term.matches(case):
                return False
        return True


# By axis, the other axes without which its value means nothing.
_DEPENDS_ON: dict[str, tuple[str, ...]] = {
    **{name: axis.needs for name, axis in DECLARED.items()},
    "world_size": MESH_AXES,
    "local_batch": ("global_batch", *DP_AXES, "cp"),
    "block": ("recipe",),
}


def axes_read(selector: Selector) -> tuple[str, ...]:
    """Return the axes that decide whether a selector matches. HarnessError if it asks for the id, that is for all."""
    axes: dict[str, None] = {}
    for term in selector.terms:
        if term.axis is None:
            raise HarnessError("it asks for a part of the id.", where=selector.text, fix="ask for axis values only.")
        axes |= dict.fromkeys((*((term.axis,) if term.axis in AXES else ()), *_DEPENDS_ON[term.axis]))
    return tuple(axes)


@functools.lru_cache(maxsize=1024)
def parse_selector(text: str) -> Selector:
    """Parse a selector. Raises HarnessError with a suggestion for an unknown axis or an invalid value."""
    return Selector(text=text, terms=tuple(_term(word, text) for word in text.split()))


def _term(word: str, text: str) -> Term:
    match = _TERM.fullmatch(word)
    if match is None:
        return _id_part(word, text)
    axis, operator, value = match.groups()
    if axis == "id" and operator == "~":
        return Term(axis=None, operator="~", values=(value,))
    try:
        return _axis_term(axis, operator, value)
    except HarnessError as error:
        raise HarnessError(error.what, where=f"selector '{text}'", fix=error.fix) from error


def _id_part(word: str, text: str) -> Term:
    if re.fullmatch(r"[A-Za-z0-9._+-]+", word) is None:
        raise HarnessError(
            f"'{word}' is neither a condition nor part of an id.",
            where=f"selector '{text}'",
            fix="write axis=value, axis!=value, axis>=number, id~glob or a part of an id.",
        )
    return Term(axis=None, operator="~", values=(f"*{word}*",))


def _axis_term(axis: str, operator: str, value: str) -> Term:
    if axis not in AXES and axis not in DERIVED:
        fix = "write id~GLOB." if axis == "id" else suggestion(axis, ("id", *AXES, *DERIVED))
        raise HarnessError(f"unknown axis '{axis}'.", fix=fix)
    if operator == "~":
        raise HarnessError("~ only works with id.", fix=f"write id~{value} or {axis}={value}.")
    ordered = operator not in ("=", "!=")
    if ordered and axis not in DERIVED and axis_type(axis) not in (int, float):
        raise HarnessError(f"axis '{axis}' has no order.", fix=f"use {axis}= or {axis}!=.")
    values = (_limit(axis, value),) if ordered else tuple(_value(axis, part) for part in value.split(","))
    return Term(axis=axis, operator=operator, values=values)


def _limit(axis: str, text: str) -> float:
    """Return the number to compare with, which need not be a valid value of the axis."""
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise HarnessError(f"axis '{axis}' cannot be compared with '{text}'.", fix="write a finite number.")
    return limit


def _value(axis: str, text: str) -> object:
    """Return the value of an axis that `text` stands for, or of what is derived from axes."""
    if axis not in DERIVED:
        return read_value(axis, text)
    try:
        return text == "true" if text in ("true", "false") else int(text)
    except ValueError as error:
        raise HarnessError(f"axis '{axis}' cannot be '{text}'.", fix="write a number (int).") from error


def _compare(operator: Callable[[float, float], bool]) -> Callable[[object, tuple[object, ...]], bool]:
    return lambda actual, values: isinstance(actual, int | float) and operator(actual, float(str(values[0])))


_OPERATORS: dict[str, Callable[[object, tuple[object, ...]], bool]] = {
    "=": lambda actual, values: actual in values,
    "!=": lambda actual, values: actual not in values,
    ">=": _compare(lambda actual, limit: actual >= limit),
    "<=": _compare(lambda actual, limit: actual <= limit),
    ">": _compare(lambda actual, limit: actual > limit),
    "<": _compare(lambda actual, limit: actual < limit),
}
