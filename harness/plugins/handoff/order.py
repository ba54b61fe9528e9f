"""Whose weights a tensor holds that are not its own: another weight's, or its own rows or columns in other order."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from harness.plugins.handoff.numbers import Array
from harness.plugins.handoff.tensors import Matrix

_LIKE = 0.9  # cosine; float8 alone leaves more than 0.999, a scale that is off within a block about this
_ENOUGH = 0.9  # of the rows must have one that is like them
_SAMPLED = 512  # rows that are looked for
_AMONG = 1 << 15  # rows that they are looked for in
_ACROSS = 64  # values of a row that are compared
_OTHERS = 4096  # weights that are looked at
_HEADS = (256, 192, 128, 96, 80, 64, 32, 16, 8)


class Other(NamedTuple):
    """Another weight of the source that may be the one."""

    name: str
    matrix: Matrix


def holds(found: Matrix, source: Matrix, others: Iterable[Other]) -> str:
    """Return what a weight holds instead of the source; empty where nothing explains it."""
    rows = _spaced(found.shape[0], 16)
    mine = _rows(found, rows)
    if not np.isfinite(mine).all() or not mine.any():
        return ""
    nearest = max(_LIKE, _cosine(mine, _rows(source, rows)))  # norms are all alike
    for other in itertools.islice(others, _OTHERS):
        if other.matrix.shape == found.shape and _cosine(mine, _rows(other.matrix, rows)) > nearest:
            return f"the weights of {other.name}"
    if min(found.shape) < 2 or found.shape[0] > _AMONG or found.shape != source.shape:
        return ""
    return _permuted(found, source)


def is_like(found: Matrix, source: Matrix) -> bool:
    """Return False where a weight has so little in common with the source that it was not made of it."""
    rows = _spaced(found.shape[0], 16)
    return _cosine(np.nan_to_num(_rows(found, rows)), _rows(source, rows)) > _LIKE / 2


def _cosine(first: Array, second: Array) -> float:
    norm = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float((first * second).sum()) / norm if norm else 0.0


def _spaced(count: int, most: int) -> Array:
    """Return so many numbers below a count, evenly spaced; all of them where they are few."""
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).astype(int))


def _rows(matrix: Matrix, rows: Iterable[int]) -> Array:
    return np.concatenate([matrix.values(int(row), int(row) + 1) for row in rows])


def _permuted(found: Matrix, source: Matrix) -> str:
    """Return in which order the rows, the columns, or both of a weight are."""
    columns = _spaced(found.shape[1], _ACROSS)
    sampled = _spaced(found.shape[0], _SAMPLED)
    of_rows = _matches(_rows(found, sampled)[:, columns], _all_rows(source)[:, columns])
    if of_rows is not None:
        return "" if np.array_equal(of_rows, sampled) else _words("row", found.shape[0], sampled, of_rows)
    some = _spaced(found.shape[0], _ACROSS)
    wide, theirs = _rows(found, some).T, _rows(source, some).T
    if len(theirs) > _AMONG:
        return ""
    across = _spaced(found.shape[1], _SAMPLED)
    of_columns = _matches(wide[across], theirs)
    if of_columns is not None and not np.array_equal(of_columns, across):
        return _words("column", found.shape[1], across, of_columns)
    if found.shape[0] == found.shape[1] and _cosine(_rows(found, some), _all_rows(source)[:, some].T) > _LIKE:
        return "its own transpose"
    return ""


def _all_rows(matrix: Matrix) -> Array:
    return matrix.values(0, matrix.shape[0])


def _matches(mine: Array, theirs: Array) -> Array | None:
    """Return for each row of the first the row of the second that is like it; None where too few have one."""
    norms = [np.linalg.norm(rows, axis=1, keepdims=True) for rows in (mine, theirs)]
    with np.errstate(invalid="ignore", divide="ignore"):
        unit, other = (np.nan_to_num(rows / norm) for rows, norm in zip((mine, theirs), norms, strict=True))
    if mine.shape[1] < 8:
        return None  # so few values are alike by chance
    likeness = unit @ other.T
    best: Array = likeness.argmax(axis=1)
    alike = likeness[np.arange(len(best)), best] > _LIKE
    if alike.mean() < _ENOUGH or len(np.unique(best)) < _ENOUGH * len(best):
        return None
    return best


def _words(what: str, count: int, places: Array, of: Array) -> str:
    """Return a permutation in words: by its name, or by the first run of rows that are others."""
    for words, where in _named(count):
        if (where(places) == of).mean() > _ENOUGH:
            return f"its own {what}s {words}"
    wrong = np.flatnonzero(places != of)
    begin = int(wrong[0])
    end = begin
    while end + 1 < len(of) and of[end + 1] - of[end] == places[end + 1] - places[end]:
        end += 1
    first, last = (int(places[at]) for at in (begin, end))
    return f"its own {what}s in another order: {what}s {int(of[begin])}-{int(of[end])} where {first}-{last} belong"


def _named(count: int) -> Sequence[tuple[str, Callable[[Array], Array]]]:
    """Return permutations that have a name: for a place, which row is there."""
    half = count // 2
    named: list[tuple[str, Callable[[Array], Array]]] = [
        ("with both halves swapped, as gate and up", lambda at: (at + half) % count),
        ("with both halves interleaved, as gate and up", lambda at: at % 2 * half + at // 2),
        ("taken apart into even and odd ones, as gate and up", lambda at: at % max(half, 1) * 2 + at // max(half, 1)),
        ("in reverse", lambda at: count - 1 - at),
    ]
    for head in (head for head in _HEADS if count % head == 0 and head < count):
        words = f"in the other convention of rotary embeddings, heads of {head}"
        named.append((words, lambda at, d=head: at // d * d + at % d % 2 * (d // 2) + at % d // 2))  # type: ignore[misc]
        named.append((words, lambda at, d=head: at // d * d + at % (d // 2) * 2 + at % d // (d // 2)))  # type: ignore[misc]
    return named
