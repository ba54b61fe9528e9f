"""Sentences: the text of a finding, filled in from its template and values when a person reads it."""

import contextlib
import re
from collections.abc import Iterable, Mapping
from itertools import groupby

from harness.plural import counted

_PLACE = re.compile(r"\{(\w+)(?::([^{}]*))?\}")
_NUMBER = re.compile(r"\+?(?:\.\d)?[efg]")  # of Python's number formats these alone: a template may come from a file
_NOUN = re.compile(r"n ([^|]+)(?:\|(.+))?")


def filled(template: str, values: Mapping[str, object]) -> str:
    """The template with its values.

    `{name}` stands for a value, `{name:.2g}` for a number in this format, and `{name:n case|cases}` for a count with
    its noun. What is not known stays as it is.
    """
    return _PLACE.sub(lambda place: _text(place, values), template)


def _text(place: re.Match[str], values: Mapping[str, object]) -> str:
    name, spec = place.groups()
    if name not in values:
        return place[0]
    value = values[name]
    if isinstance(value, tuple):
        return format_ranks(value)
    noun = _NOUN.fullmatch(spec or "")
    if noun and isinstance(value, int):
        return counted(value, noun[1], noun[2] or "")
    if spec and isinstance(value, int | float) and _NUMBER.fullmatch(spec):
        with contextlib.suppress(OverflowError):  # of an integer that is no float, as only a foreign file has
            return format(value, spec)
    return str(value)


def format_ranks(ranks: Iterable[int]) -> str:
    """The ranks as text: "rank 3", "ranks 0-3, 6"."""
    return format_numbers("rank", ranks)


def format_numbers(noun: str, given: Iterable[int]) -> str:
    numbers = sorted(set(given))
    if not numbers:
        return f"no {noun}"
    runs = [
        [number for _, number in group] for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{noun if len(numbers) == 1 else f'{noun}s'} {', '.join(parts)}"


def shown(template: str) -> str:
    """The template as people read it without values: "amax reductions are missing along AXIS"."""
    return _PLACE.sub(lambda place: place[1].upper(), re.sub(r"(?<=\w)\{", " {", template))
