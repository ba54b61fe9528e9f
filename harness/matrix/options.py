"""Options as torchtitan is given them, by dotted name: from TOML and from flags."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.errors import HarnessError


def options_of_toml(text: str) -> dict[str, Any]:
    """The values of a TOML text by dotted name. ValueError for what is no TOML."""
    try:
        return dict(_flat(tomllib.loads(text)))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def options_of_flags(text: str, *, where: str) -> dict[str, Any]:
    """The values of flags such as `--compile.enable --training.seq_len=2048`. HarnessError for a word without flag."""
    return read_flags(shlex.split(text), where=where)


def read_flags(given: Sequence[str], *, where: str) -> dict[str, Any]:
    """The values of flags, as a shell has split them."""
    values: dict[str, Any] = {}
    words = [part for word in given for part in (word.split("=", 1) if word[:2] == "--" else [word])]
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            values[name] = True
        elif name:
            values[name] = option_value(word)
        else:
            fix = 'write "--section.option value …".'
            raise HarnessError(f"'{word}' belongs to no flag.", where=where, fix=fix)
    for name in list(values):
        section, dot, last = name.rpartition(".")
        if last.startswith("no_"):
            values[f"{section}{dot}{last[3:]}"] = not values.pop(name)
    return values


def option_value(word: str) -> Any:
    """A flag's value as TOML would have it: lists are separated by commas."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word.split(",") if "," in word else word


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
