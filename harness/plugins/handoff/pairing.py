"""Which exported weight is which weight of the source: by name, through stacks of experts and fused weights.

Both sides are cut into units, matrices or vectors: a stack of experts is one for each expert. A unit of one side
is paired with the unit of the same name, with those that it is fused of, or with the one that has it as a part.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.errors import HarnessError
from harness.plugins.handoff.formats import SUFFIXES, Format
from harness.plugins.handoff.numbers import Array, decoded_scale
from harness.plugins.handoff.tensors import Held, Matrix, Scaled, Stack, State, View

_TABLE = tomllib.loads((Path(__file__).parent / "names.toml").read_text("utf-8"))
_RENAMES = [(re.compile(pattern), to) for pattern, to in _TABLE["rename"]]
_IGNORED = [re.compile(pattern) for pattern in _TABLE["ignored"]]
FUSED: Mapping[str, Sequence[str]] = _TABLE["fused"]
_STACK = re.compile(r"(.*\bexperts)\.(\w+_proj)(?:\.weight)?$")
_MOST_EXPERTS = 1 << 16


class Unit(NamedTuple):
    """One matrix or vector of a state, with the scale that it has, if any, and the names of both as they are."""

    name: str  # as both sides call it
    view: View
    scale: View | None = None

    @property
    def given(self) -> str:
        """The name that its state has for it, with the number of the expert in a stack."""
        return f"{self.view.held.name}{''.join(f'[{at}]' for at in self.view.at)}"


class Units(NamedTuple):
    """The units of a state; scales without a weight; and what is no weight."""

    by_name: Mapping[str, Unit]
    stray: Sequence[Held]
    ignored: Sequence[str]


class Pair(NamedTuple):
    """An exported unit, and the units of the source that its rows come from, with the rows of each."""

    name: str
    exported: Unit
    source: tuple[tuple[Unit, int, int], ...]


class Pairs(NamedTuple):
    pairs: Sequence[Pair]
    missing: Sequence[Unit]  # of the source
    extra: Sequence[Unit]  # of the exported state


def renamed(name: str, more: Sequence[tuple[str, str]] = ()) -> str:
    """Return a name as both sides call it. `more`: patterns of the user, which come first."""
    for pattern, to in more:
        name = re.sub(pattern, to, name)
    for known, to in _RENAMES:
        name = known.sub(to, name)
    return name


def units_of(state: State, more: Sequence[tuple[str, str]] = ()) -> Units:
    """Return the units of a state."""
    scales = _scales(state.tensors)
    left = state.tensors.keys() - scales.values()
    ignored = [name for name in state.tensors if name in left and any(each.search(name) for each in _IGNORED)]
    stray = [held for name, held in state.tensors.items() if name in left and _is_scale(name) and name not in ignored]
    left -= {*ignored, *(held.name for held in stray)}
    units: dict[str, Unit] = {}
    for held in (held for name, held in state.tensors.items() if name in left):
        for unit in _units(held, state.tensors.get(scales.get(held.name, "")), more):
            if unit.name in units:
                what = f"{units[unit.name].given} and {unit.given} are both {unit.name}."
                raise HarnessError(what, where=state.origin, fix="give --rename FROM=TO for one of them.")
            units[unit.name] = unit
    return Units(units, stray, ignored)


def _scales(tensors: Mapping[str, Held]) -> dict[str, str]:
    """Return the name of the scale of each weight that has one."""
    found = {}
    for name in tensors:
        flat = name.replace("._weight_qdata", "._weight")
        for scale in (*(f"{flat}{suffix}" for suffix in SUFFIXES), f"{name.removesuffix('.weight')}.scale"):
            if scale in tensors and scale != name and not _is_scale(name):
                found[name] = scale
                break
    return found


def _is_scale(name: str) -> bool:
    return name.endswith((*SUFFIXES, ".scale"))


def _units(held: Held, scale: Held | None, more: Sequence[tuple[str, str]]) -> Iterator[Unit]:
    name = renamed(held.name, more)
    stack = _STACK.fullmatch(name)
    if stack is None or len(held.shape) != 3:
        yield Unit(name, View(held), None if scale is None else View(scale))
        return
    if held.shape[0] > _MOST_EXPERTS:
        raise HarnessError(f"{held.name} has {held.shape[0]:,} experts.", where=held.where, fix="check its shape.")
    for expert in range(held.shape[0]):
        own = None if scale is None else View(scale, (expert,) if scale.shape[:1] == held.shape[:1] else ())
        yield Unit(f"{stack[1]}.{expert}.{stack[2]}.weight", View(held, (expert,)), own)


def paired(source: Units, exported: Units) -> Pairs:
    """Return which unit is which, and what is left of both sides."""
    found = {name: _rows_of(name, unit, source.by_name, exported.by_name) for name, unit in exported.by_name.items()}
    used = {unit.name for rows in found.values() for unit, _, _ in rows}
    pairs = [Pair(name, exported.by_name[name], rows) for name, rows in found.items() if rows]
    missing = [unit for name, unit in source.by_name.items() if name not in used]
    return Pairs(pairs, missing, [exported.by_name[name] for name, rows in found.items() if not rows])


def _rows_of(
    name: str, unit: Unit, source: Mapping[str, Unit], exported: Mapping[str, Unit]
) -> tuple[tuple[Unit, int, int], ...]:
    """Return the units of the source that a unit has the rows of; none where there are none."""
    if name in source:
        return ((source[name], 0, source[name].view.shape[0]),)
    for fused, parts in FUSED.items():
        own = [name.replace(f".{fused}.", f".{part}.") for part in parts]
        if f".{fused}." in name and all(part in source for part in own):
            return tuple((source[part], 0, source[part].view.shape[0]) for part in own)
        for part in (part for part in parts if f".{part}." in name):
            whole = source.get(name.replace(f".{part}.", f".{fused}."))
            before = [exported.get(name.replace(f".{part}.", f".{other}.")) for other in parts[: parts.index(part)]]
            if whole is not None and all(before):
                start = sum(each.view.shape[0] for each in before if each is not None)
                return ((whole, start, start + unit.view.shape[0]),)
    return ()


def check_names(pairs: Pairs, source: State, exported: State) -> None:
    """HarnessError where no name of one side is one of the other."""
    if pairs.pairs:
        return
    first, second = next(iter(source.tensors), "nothing"), next(iter(exported.tensors), "nothing")
    what = f"no name matches one of {source.origin}: {second} here, {first} there."
    raise NothingMatches(
        what, where=exported.origin, fix="give --rename FROM=TO, a regular expression and what to put."
    )


class NothingMatches(HarnessError):
    """Two states have no name in common."""


def matrix_of(rows: Iterable[tuple[Unit, int, int]], block: Format | None) -> Matrix:
    """Return what rows of units stand for, dequantized where these have scales."""
    views: list[View | Scaled] = []
    for unit, start, stop in rows:
        if unit.scale is None or block is None or not block.dtype:
            views.append(unit.view.cut(start, stop))
        else:
            scales = scale_grid(unit, block)
            down = start // (block.block[0] or unit.view.shape[0] or 1)
            views.append(Scaled(unit.view.cut(start, stop), scales[down:], block.block))
    return views[0] if len(views) == 1 else Stack(tuple(views))


def scale_grid(unit: Unit, block: Format) -> Array:
    """Return what the data of each block are multiplied with. ValueError where there are more or fewer scales."""
    assert unit.scale is not None
    down, across = block.blocks(*unit.view.shape)
    values = decoded_scale(unit.scale.rows(0, unit.scale.shape[0]), unit.scale.held.dtype)
    if values.shape == (down, across) or (1 in (down, across) and values.size == down * across):
        with np.errstate(divide="ignore"):
            return np.asarray((1 / values if block.divides else values).reshape(down, across))
    raise ValueError(f"{values.shape[0]}x{values.shape[1]}")


def same_values(first: View, second: View) -> bool:
    """Return True where two views have the same values, as tied weights have."""
    if first.shape != second.shape:
        return False
    step = max(1, (1 << 20) // max(first.shape[1], 1))
    starts = range(0, first.shape[0], step)
    return all(np.array_equal(first.values(at, at + step), second.values(at, at + step)) for at in starts)
