"""What options of other tools mean: looked up in the spellings that the axes declare.

An option states values of facts: of axes, or of what axes follow from, such as the number of ranks.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Iterator, Mapping

from harness.matrix.axes import DECLARED, axis_type, choices
from harness.matrix.axis import Spelling

Value = bool | int | float | str | tuple[str, ...]

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def meaning(key: str, value: object, day: datetime.date) -> Mapping[str, Value] | None:
    """The facts that an option, or a call `name()`, states on this day; {} for a value that says nothing.

    A key is known by its whole name, or by its last part. None for an unknown one.
    """
    plain = plain_key(key)
    last = plain.rpartition(".")[2]
    rows = _by_key().get(plain) or _by_key().get(last) or []
    holding = [
        (axis, row)
        for axis, row in rows
        if row.since <= day < row.until and (plain in row.keys or f"={last}" not in row.keys or plain == last)
    ]
    return read_as(*holding[0], value) if holding else None


def spellings_in_prose() -> Iterator[tuple[str, Spelling]]:
    yield from ((name, row) for name, axis in DECLARED.items() for row in axis.spelled if row.said)


def torchtitan_degrees(mesh: Mapping[str, int]) -> dict[str, int]:
    """The options of torchtitan's section `parallelism` for the degrees of a mesh."""
    return {DECLARED[axis].spelled[0].keys[0].rpartition(".")[2]: degree for axis, degree in mesh.items()}


def plain_key(key: str) -> str:
    """A key as the axes declare it: without `-` in front or inside, in small letters except for a call."""
    return key if key.endswith("()") else key.lstrip("-").replace("-", "_").lower()


@functools.cache
def _by_key() -> dict[str, list[tuple[str, Spelling]]]:
    rows: dict[str, list[tuple[str, Spelling]]] = {}
    for name, axis in DECLARED.items():
        for spelling in axis.spelled:
            for key in spelling.keys:
                rows.setdefault(key.lstrip("="), []).append((name, spelling))
    return rows


def read_as(axis: str, spelling: Spelling, value: object) -> Mapping[str, Value]:
    """The value of the fact that somebody who writes this means; {} where nobody can mean that."""
    fact = spelling.of or axis
    kind = spelling.kind or axis_type(axis)
    text = str(value).strip()
    plain = "true" if text.lower() in _TRUE[:3] else "false" if text.lower() in _FALSE[:3] else text.lower()
    for form in (plain, plain.rpartition(".")[2], "*"):  # also ScalingType.DELAYED
        if form in spelling.values:
            meant = spelling.values[form]
            return {} if meant is None else {fact: meant}  # type: ignore[dict-item]
    if kind is int:
        return {fact: int(text)} if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else {}
    if kind is float:
        return {fact: float(text)} if re.fullmatch(r"\d+(?:\.\d*)?(?:e-?\d+)?", text, re.ASCII) else {}
    if kind is bool:
        known = text.lower() in (*_TRUE, *_FALSE)
        return {fact: text.lower() in _TRUE} if known else {}
    if kind is tuple:
        items = value if isinstance(value, list | tuple) else text.strip("[]").split(",")
        return {fact: tuple(word for item in items if (word := str(item).strip(" \"'")))}
    last = plain.rpartition(".")[2]
    return {fact: last if not spelling.of and last in choices(axis) else text}
