"""What statements agree on, and what programs do where nothing is stated: defaults, and files of torchtitan by name."""

import datetime
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import InvalidVersion, Version

from harness.matrix.models import MODELS
from harness.plugins.bugs.reading import Statement
from harness.plugins.bugs.spellings import Value, shown

FLOAT8_STYLES = datetime.date(2025, 9, 30)  # until then torchtitan used float8 TP styles
LAST_TOML = datetime.date(2026, 2, 22)  # the last day of torchtitan's TOML files
CONVERTED_OUTPUT = datetime.date(2024, 7, 19)  # until then torchtitan converted the output layer, without a filter
FILTERS = datetime.date(2025, 4, 7)  # since then it converts the output layer where no filter names it

_LARGER_DEBUG_MODEL = datetime.date(2025, 6, 1)  # until then it had 8 layers and a vocabulary of 2256


@functools.cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "defaults.toml").read_text())


class Era(msgspec.Struct, frozen=True, kw_only=True):
    """The day that decides what options and defaults mean, and where it comes from.

    `sure`: a version, a format that ended, or the user says so; not today, as the version may be older.
    """

    day: datetime.date
    source: str
    sure: bool = False


def era_of_version(version: str) -> Era | None:
    """The era of a version of torchtitan; None for one before the first that is known, or for no version."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        return None
    releases = _table()["releases"].items()
    known = [(name, day) for name, day in releases if Version(name) <= wanted or wanted.base_version == name]
    return Era(day=known[-1][1], source=f"torchtitan {version}", sure=True) if known else None


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What statements agree on, what they contradict each other in, and what was passed over, with the reason."""

    facts: Mapping[str, Statement]
    contradictions: Mapping[str, tuple[Statement, ...]]
    ignored: tuple[str, ...]


def resolve(statements: Iterable[Statement]) -> Resolved:
    """What statements agree on: flags override a configuration, and two values of the same rank contradict."""
    by_fact: dict[str, list[Statement]] = {}
    for statement in statements:
        by_fact.setdefault(statement.fact, []).append(statement)
    facts: dict[str, Statement] = {}
    contradictions: dict[str, tuple[Statement, ...]] = {}
    ignored: dict[str, None] = {}
    for fact, stated in by_fact.items():
        kept = [statement for statement in stated if statement.source == "flag"] or stated
        first = {statement.value: statement for statement in reversed(kept)}
        if len(first) > 1:
            contradictions[fact] = tuple(statement for statement in kept if first[statement.value] is statement)
        facts[fact] = kept[0]
        for other in stated:
            if other.value not in first:
                why = "a flag overrides the configuration"
                ignored[f"{fact} = {shown(other.value)}: {other.words}: {why}"] = None
    return Resolved(facts=facts, contradictions=contradictions, ignored=tuple(ignored))


def default_of(fact: str, tool: str, day: datetime.date) -> tuple[Value, str] | None:
    """The default of a fact, and why."""
    for row in _table()["default"]:
        if row["fact"] == fact and tool in row.get("tool", tool).split(" ") and day >= row.get("since", day):
            return row["value"], row["why"].format(tool=tool)
    return None


def facts_of_file(name: str, day: datetime.date) -> Mapping[str, Value]:
    """The facts that a configuration file of torchtitan sets; {} for any other."""
    for row in _table()["file"]:
        if day >= row.get("since", day) and re.search(row["name"], name, re.IGNORECASE):
            size = sizes_of_model(row["facts"]["model_size"], day)
            return {**row["facts"], "seq_len": MODELS[size[0]].seq_len} if size else row["facts"]
    return {}


def sizes_of_model(name: str, day: datetime.date) -> tuple[str, Mapping[str, int]] | None:
    """A known model and the sizes behind a name such as "8B"; None for any other."""
    known = next((known for known, pattern in _table()["models"].items() if re.search(pattern, name)), None)
    if known is None:
        return None
    model = MODELS[known]
    sizes = {**msgspec.structs.asdict(model.shape), "vocab_size": model.vocab_size}
    if known == "debugmodel" and day < _LARGER_DEBUG_MODEL:
        sizes |= {"layers": 8, "vocab_size": 2256}
    return known, sizes
