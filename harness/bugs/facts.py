"""What statements agree on, and what programs do where nothing is stated: defaults, and files of torchtitan by name."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from harness.bugs.reading import Source, Statement
from harness.matrix.layout import MESH_AXES
from harness.matrix.spellings import Value
from harness.performance.models import MODELS

FLOAT8_STYLES = datetime.date(2025, 9, 30)  # until then torchtitan used float8 TP styles
LAST_TOML = datetime.date(2026, 2, 22)  # the last day of torchtitan's TOML files
CONVERTED_OUTPUT = datetime.date(2024, 7, 19)  # until then torchtitan converted the output layer, without a filter

_SELECTIVE: Mapping[str, Value] = {"checkpointing": "selective", "ac_option": "2"}
_FULL: Mapping[str, Value] = {"tp": 8, "checkpointing": "full"}
_FLOAT8_405B: Mapping[str, Value] = {
    **dict.fromkeys(("float8", "fp8_all_gather", "precompute_scale", "async_tp"), True),
    "compile": "graph",
}
# What torchtitan's configuration files set, by a pattern of their names, with the day that each holds from.
_FILES: tuple[tuple[str, datetime.date, Mapping[str, Value]], ...] = (
    (r"debug_?model", datetime.date.min, {"model_size": "debugmodel", "local_batch": 8, **_SELECTIVE}),
    (r"llama3_8b", datetime.date.min, {"model_size": "8B", "local_batch": 1, **_SELECTIVE, "ac_option": "op"}),
    (r"llama3_70b", datetime.date.min, {"model_size": "70B", "local_batch": 8, **_FULL}),
    (r"llama3_405b", datetime.date(2024, 12, 1), {"model_size": "405B", "local_batch": 2, **_FULL, **_FLOAT8_405B}),
    (r"llama3_405b", datetime.date.min, {"model_size": "405B", "local_batch": 1, **_FULL}),
)
# What a program does when nothing is said, with the day that it does so from; the program "" is any other.
_DEFAULTS: tuple[tuple[str, str, datetime.date, Value, str], ...] = (
    ("torchtitan", "recipe", datetime.date(2026, 4, 27), "rowwise", "an unnamed recipe of torchtitan since 2026-04-27"),
    ("torchtitan", "recipe", datetime.date.min, "tensorwise", "an unnamed recipe of torchtitan until 2026-04-27"),
    ("", "recipe", datetime.date.min, "tensorwise", "an unnamed recipe of torchao"),
    ("torchtitan", "ranks", datetime.date.min, 8, "NGPU of run_train.sh and run_llama_train.sh"),
    ("torchtitan", "checkpointing", datetime.date.min, "selective", "activation_checkpoint.mode of torchtitan"),
    ("torchtitan", "ac_option", datetime.date.min, "2", "selective_ac_option of torchtitan"),
    (
        "accelerate",
        "pad_inner_dim",
        datetime.date(2025, 11, 10),
        True,
        "fp8_config of accelerate with backend AO since 2025-11",
    ),
)
_MODELS = {
    r"(?i)debug_?\s*model": "debugmodel",
    r"(?i)(llama.*|^|_)8b": "llama3-8b",
    r"(?i)(llama.*|^|_)70b": "llama3-70b",
    r"(?i)(llama.*|^|_)405b": "llama3-405b",
}
_LARGER_DEBUG_MODEL = datetime.date(2025, 6, 1)  # until then it had 8 layers and a vocabulary of 2256

_DISTINCT = frozenset({*MESH_AXES, "dp", "recipe", "checkpointing", "ac_option"})
# The reason, the sources that count, those that they beat, and whether it holds despite a contradiction.
_PRECEDENCE: tuple[tuple[str, frozenset[Source], frozenset[Source], bool], ...] = (
    ("a flag overrides the configuration", frozenset({"flag"}), frozenset({"config"}), True),
    ("the title names another", frozenset({"title"}), frozenset({"prose"}), True),
    ("the configuration says otherwise", frozenset({"flag", "config", "shape"}), frozenset({"title", "prose"}), False),
)


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What statements agree on, what they contradict each other in, and what was passed over, with the reason."""

    facts: Mapping[str, Statement]
    contradictions: Mapping[str, tuple[Statement, ...]]
    ignored: tuple[str, ...]


def resolve(statements: Iterable[Statement]) -> Resolved:
    by_fact: dict[str, list[Statement]] = {}
    for statement in statements:
        by_fact.setdefault(statement.fact, []).append(statement)
    facts: dict[str, Statement] = {}
    contradictions: dict[str, tuple[Statement, ...]] = {}
    ignored: dict[str, None] = {}
    for fact, fact_statements in by_fact.items():
        kept, passed = _strongest(fact, fact_statements)
        first = {kept_statement.value: kept_statement for kept_statement in reversed(kept)}
        if len(first) > 1:
            contradictions[fact] = tuple(
                kept_statement for kept_statement in kept if first[kept_statement.value] is kept_statement
            )
        facts[fact] = kept[0]
        for other, why in {other.value: (other, why) for other, why in reversed(passed)}.values():
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


def _strongest(fact: str, statements: Sequence[Statement]) -> tuple[list[Statement], list[tuple[Statement, str]]]:
    """The statements that count, and the others that say something else, each with the reason."""
    kept, passed = list(statements), list[tuple[Statement, str]]()
    for why, strong, weak, strict in _PRECEDENCE:
        if (fact not in _DISTINCT or strict) and any(statement.source in strong for statement in kept):
            kept, more = _split(kept, [statement for statement in kept if statement.source in weak], why)
            passed += more
    return kept, passed


def _split(
    statements: Sequence[Statement], weak: Sequence[Statement], why: str
) -> tuple[list[Statement], list[tuple[Statement, str]]]:
    """Those that are not weak, or all where nothing else is left; and the weak that say something else."""
    kept = [statement for statement in statements if statement not in weak]
    if not kept:
        return list(statements), []
    values = {statement.value for statement in kept}
    return kept, [(statement, why) for statement in weak if statement.value not in values]
