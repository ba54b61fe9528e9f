"""What statements agree on, and what programs do where nothing is stated: defaults, and files of torchtitan by name."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping

import msgspec
from packaging.version import InvalidVersion, Version

from harness.matrix.models import MODELS
from harness.plugins.bugs.reading import Statement
from harness.plugins.bugs.spellings import Value

FLOAT8_STYLES = datetime.date(2025, 9, 30)  # until then torchtitan used float8 TP styles
LAST_TOML = datetime.date(2026, 2, 22)  # the last day of torchtitan's TOML files
_PYTHON = datetime.date(2026, 2, 23)  # since then it is configured in Python
CONVERTED_OUTPUT = datetime.date(2024, 7, 19)  # until then torchtitan converted the output layer, without a filter
FILTERS = datetime.date(2025, 4, 7)  # since then it converts the output layer where no filter names it

_SELECTIVE: Mapping[str, Value] = {"checkpointing": "selective", "ac_option": "2"}
_FULL: Mapping[str, Value] = {"tp": 8, "checkpointing": "full"}
_FLOAT8_405B: Mapping[str, Value] = {
    **dict.fromkeys(("float8", "fp8_all_gather", "precompute_scale", "async_tp"), True),
    "compile": "graph",
}
_FLOAT8_405B_PYTHON: Mapping[str, Value] = {"float8": True, "async_tp": True, "compile": "graph"}
# What torchtitan's configuration files set, by a pattern of their names, with the day that each holds from.
_FILES: tuple[tuple[str, datetime.date, Mapping[str, Value]], ...] = (
    (r"debug_?model", _PYTHON, {"model_size": "debugmodel", "local_batch": 8, "checkpointing": "selective_op"}),
    (r"llama3_8b", _PYTHON, {"model_size": "8B", "local_batch": 1, "checkpointing": "selective_op"}),
    (r"debug_?model", datetime.date.min, {"model_size": "debugmodel", "local_batch": 8, **_SELECTIVE}),
    (r"llama3_8b", datetime.date.min, {"model_size": "8B", "local_batch": 1, **_SELECTIVE, "ac_option": "op"}),
    (r"llama3_70b", datetime.date.min, {"model_size": "70B", "local_batch": 8, **_FULL}),
    (r"llama3_405b", _PYTHON, {"model_size": "405B", "local_batch": 2, **_FULL, **_FLOAT8_405B_PYTHON}),
    (r"llama3_405b", datetime.date(2024, 12, 1), {"model_size": "405B", "local_batch": 2, **_FULL, **_FLOAT8_405B}),
    (r"llama3_405b", datetime.date.min, {"model_size": "405B", "local_batch": 1, **_FULL}),
)
# What a program does when nothing is said, with the day that it does so from; the program "" is any other.
_DEFAULTS: tuple[tuple[str, str, datetime.date, Value, str], ...] = (
    ("torchtitan", "recipe", datetime.date(2026, 4, 27), "rowwise", "an unnamed recipe of torchtitan since 2026-04-27"),
    ("torchtitan", "recipe", datetime.date.min, "tensorwise", "an unnamed recipe of torchtitan until 2026-04-27"),
    ("", "recipe", datetime.date.min, "tensorwise", "an unnamed recipe of torchao"),
    ("torchtitan", "ranks", datetime.date.min, 8, "NGPU of run_train.sh and run_llama_train.sh"),
    ("torchtitan", "checkpointing", _PYTHON, "selective_op", "activation_checkpoint of torchtitan's Trainer.Config"),
    ("torchtitan", "checkpointing", datetime.date.min, "selective", "activation_checkpoint.mode of torchtitan"),
    ("torchtitan", "ac_option", datetime.date.min, "2", "selective_ac_option of torchtitan"),
    (
        "accelerate",
        "pad_inner_dim",
        datetime.date(2025, 11, 10),
        True,
        "fp8_config of accelerate with backend AO since 2025-11",
    ),
    *(
        (tool, "sequence_parallel", datetime.date.min, False, f"{tool} shards no positions unless it is asked to")
        for tool in ("megatron", "automodel", "accelerate", "transformers", "axolotl")
    ),
)
# When versions of torchtitan came out: its options and defaults are of that day.
_RELEASES: Mapping[str, datetime.date] = {
    "0.1.0": datetime.date(2025, 6, 17),
    "0.2.0": datetime.date(2025, 10, 17),
    "0.2.1": datetime.date(2025, 12, 26),
    "0.2.2": datetime.date(2026, 2, 20),
    "0.3.0": datetime.date(2026, 8, 18),
}
_MODELS = {
    r"(?i)debug_?\s*model": "debugmodel",
    r"(?i)(llama.*|^|_)8b": "llama3-8b",
    r"(?i)(llama.*|^|_)70b": "llama3-70b",
    r"(?i)(llama.*|^|_)405b": "llama3-405b",
}
_LARGER_DEBUG_MODEL = datetime.date(2025, 6, 1)  # until then it had 8 layers and a vocabulary of 2256


class Era(msgspec.Struct, frozen=True, kw_only=True):
    """The day that decides what options and defaults mean, and where it comes from.

    `sure`: a version, a format that ended, or the user says so; not the date of a report, whose version may be older.
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
    known = [(name, day) for name, day in _RELEASES.items() if Version(name) <= wanted or wanted.base_version == name]
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


def shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def default_of(fact: str, program: str, day: datetime.date) -> tuple[Value, str] | None:
    """The default of a fact, and why."""
    for of, name, since, value, text in _DEFAULTS:
        if name == fact and of in ("", program) and day >= since:
            return value, text
    return None


def facts_of_file(name: str, day: datetime.date) -> Mapping[str, Value]:
    """The facts that a configuration file of torchtitan sets; {} for any other."""
    for pattern, since, facts in _FILES:
        if day >= since and re.search(pattern, name, re.IGNORECASE):
            size = sizes_of_model(str(facts["model_size"]), day)
            return {**facts, "seq_len": MODELS[size[0]].seq_len} if size else facts
    return {}


def sizes_of_model(name: str, day: datetime.date) -> tuple[str, Mapping[str, int]] | None:
    """A known model and the sizes behind a name such as "8B"; None for any other."""
    known = next((known for pattern, known in _MODELS.items() if re.search(pattern, name)), None)
    if known is None:
        return None
    model = MODELS[known]
    sizes = {**msgspec.structs.asdict(model.shape), "vocab_size": model.vocab_size}
    if known == "debugmodel" and day < _LARGER_DEBUG_MODEL:
        sizes |= {"layers": 8, "vocab_size": 2256}
    return known, sizes
