"""How people write what a case has: one table with dates, read from `spellings.toml`.

A key such as `--training.tensor_parallel_degree` stands for a fact: an axis, or something that axes follow from.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from harness.matrix.axes import AXES, axis_type, choices

_TABLE = Path(__file__).with_suffix(".toml")
_KINDS = {int: "count", bool: "flag", tuple: "words"}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

Value = bool | int | str | tuple[str, ...]


class Dated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that holds from the day `since` on, and before the day `until`."""

    since: datetime.date = datetime.date.min
    until: datetime.date = datetime.date.max

    def holds(self, day: datetime.date) -> bool:
        """True on this day."""
        return self.since <= day < self.until


class Option(Dated, frozen=True, kw_only=True):
    """An option of a configuration. `name` is that of torchtitan 0.2.2, `keys` are all others.

    Without `kind` it is read as a value of the axis that it is.
    """

    fact: str
    name: str
    keys: tuple[str, ...] = ()
    kind: Literal["", "count", "flag", "not", "words", "text"] = ""
    values: Mapping[str, str] = {}

    def read(self, value: object) -> Value | None:
        """The value of the fact; None where nobody can mean that. A text without a known meaning stays as it is."""
        text, is_axis = str(value).strip(), self.fact in AXES
        kind = self.kind or _KINDS.get(axis_type(self.fact) if is_axis else str)
        if kind == "count":
            return int(text) if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() else None
        if kind in ("flag", "not"):
            given = None if text.lower() in _FALSE else text.lower() in _TRUE or value is True
            return (given is None) == (kind == "not") if given is not False else None
        if kind == "words":
            items = value if isinstance(value, list | tuple) else text.strip("[]").split(",")
            return tuple(word for item in items if (word := str(item).strip(" \"'")))
        name = text.rpartition(".")[2].lower()  # also of ScalingType.DELAYED
        return name if is_axis and name in choices(self.fact) else self.values.get(name, text)


class Call(Dated, frozen=True, kw_only=True):
    """A call in Python whose dotted name matches `pattern`. The value is its argument, or `value`."""

    fact: str
    pattern: str
    argument: int | None = None
    value: str = ""


class Prose(Dated, frozen=True, kw_only=True):
    """Words of prose. The value is the first group of the pattern, or `value`."""

    fact: str
    pattern: str
    value: str = ""


class NamedModel(Dated, frozen=True, kw_only=True):
    """A model by name: its sizes by axis."""

    pattern: str
    text: str
    axes: Mapping[str, int]


class NamedFile(Dated, frozen=True, kw_only=True):
    """A configuration file of torchtitan by name, and the facts that it sets."""

    pattern: str
    facts: Mapping[str, bool | int | str]


class Default(Dated, frozen=True, kw_only=True):
    """What holds for a fact when a report does not say. `of`: the program that the report is about; "" for any."""

    fact: str
    value: bool | int | str
    text: str
    of: str = ""


class Feature(Dated, frozen=True, kw_only=True):
    """What no case has, and what it would need."""

    name: str
    needs: str
    facts: Mapping[str, tuple[str, ...]] = {}
    calls: str = ""
    words: str = ""


class Spellings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole table."""

    option: tuple[Option, ...]
    call: tuple[Call, ...]
    prose: tuple[Prose, ...]
    model: tuple[NamedModel, ...]
    file: tuple[NamedFile, ...]
    default: tuple[Default, ...]
    feature: tuple[Feature, ...]


_Row = TypeVar("_Row", bound=Dated)


@functools.cache
def spellings() -> Spellings:
    """The table, read once."""
    return msgspec.toml.decode(_TABLE.read_bytes(), type=Spellings)


def on_day(rows: tuple[_Row, ...], day: datetime.date) -> tuple[_Row, ...]:
    """The rows that hold on this day."""
    return tuple(row for row in rows if row.holds(day))


def option_named(key: str, day: datetime.date) -> Option | None:
    """What a dotted key meant on this day: by its whole name, else by its last part; None for an unknown one."""
    plain = plain_key(key)
    rows = on_day(tuple(_by_key().get(plain, ())), day)
    if not rows and "." in plain:
        rows = on_day(tuple(_by_key().get(plain.rpartition(".")[2], ())), day)
    return rows[0] if rows else None


def canonical(key: str) -> str:
    """The name of an option of torchtitan 0.2.2 that this one became; an unknown one as it is."""
    rows = _by_key().get(plain_key(key), ())
    return rows[0].name if rows and "." in key else key


def recipe_named(name: object) -> str:
    """The recipe of an older name, such as `all_axiswise`; any other name as it is."""
    return str(option_of("recipe").read(name))


def option_of(fact: str) -> Option:
    """The option of torchtitan 0.2.2 for a fact."""
    return next(row for row in spellings().option if row.fact == fact)


def torchtitan_degrees(mesh: Mapping[str, int]) -> dict[str, int]:
    """The options of torchtitan's section `parallelism` for the degrees of a mesh."""
    return {option_of(axis).name.rpartition(".")[2]: degree for axis, degree in mesh.items()}


def plain_key(key: str) -> str:
    """A key as the table writes it: without case, `-` or the prefix `--`."""
    return key.lstrip("-").replace("-", "_").lower()


@functools.cache
def _by_key() -> dict[str, list[Option]]:
    rows: dict[str, list[Option]] = {}
    for option in spellings().option:
        for key in (option.name, *option.keys):
            rows.setdefault(key, []).append(option)
    return rows
