"""Statements: what a report says of one fact, in whose words, and what is left when they contradict each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from harness.matrix.layout import MESH_AXES
from harness.matrix.spellings import Value

# A flag overrides a configuration, as it does in torchtitan. What a shape implies is derived, everything else stated.
Source = Literal["flag", "config", "shape", "title", "prose"]
_DISTINCT = frozenset({*MESH_AXES, "dp", "recipe", "checkpointing", "ac_mode", "ac_option"})


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """A value of a fact, and the words that say so. `comment`: in an answer, not in the report itself."""

    fact: str
    value: Value
    words: str
    source: Source
    comment: bool = False


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What statements agree on, what they contradict each other in, and what was passed over, with the reason."""

    facts: Mapping[str, Statement]
    contradictions: Mapping[str, tuple[Statement, ...]]
    ignored: tuple[str, ...]


def resolve(statements: Iterable[Statement]) -> Resolved:
    """One statement for a fact, or all that contradict each other."""
    by_fact: dict[str, list[Statement]] = {}
    for statement in statements:
        by_fact.setdefault(statement.fact, []).append(statement)
    facts: dict[str, Statement] = {}
    contradictions: dict[str, tuple[Statement, ...]] = {}
    ignored: list[str] = []
    for fact, found in by_fact.items():
        kept, passed = _strongest(fact, found)
        if len({each.value for each in kept}) > 1:
            contradictions[fact] = _one_a_value(kept)
        facts[fact] = kept[0]
        ignored += [_passed(fact, each, why) for each, why in _first_of_each(passed)]
    return Resolved(facts=facts, contradictions=contradictions, ignored=tuple(dict.fromkeys(ignored)))


def shown(value: object) -> str:
    """A value as it is printed."""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _strongest(fact: str, found: Sequence[Statement]) -> tuple[list[Statement], list[tuple[Statement, str]]]:
    """The statements that count, and the others that say something else, each with the reason."""
    kept, passed = _split(found, [each for each in found if each.comment], "an answer; the report says otherwise")
    for why, strong, weak, strict in _PRECEDENCE:
        if (fact not in _DISTINCT or strict) and any(each.source in strong for each in kept):
            kept, more = _split(kept, [each for each in kept if each.source in weak], why)
            passed += more
    return kept, passed


def _first_of_each(passed: Iterable[tuple[Statement, str]]) -> Iterable[tuple[Statement, str]]:
    return {each.value: (each, why) for each, why in reversed(list(passed))}.values()


def _passed(fact: str, each: Statement, why: str) -> str:
    return f"{fact} = {shown(each.value)}: {each.words}: {why}"


def _split(
    found: Sequence[Statement], weak: Sequence[Statement], why: str
) -> tuple[list[Statement], list[tuple[Statement, str]]]:
    """Those that are not weak, or all where nothing else is left; and the weak that say something else."""
    kept = [each for each in found if each not in weak]
    if not kept:
        return list(found), []
    values = {each.value for each in kept}
    return kept, [(each, why) for each in weak if each.value not in values]


# The reason, the sources that count, those that they beat, and whether that holds where a contradiction is told.
_PRECEDENCE: tuple[tuple[str, frozenset[Source], frozenset[Source], bool], ...] = (
    ("a flag overrides the configuration", frozenset({"flag"}), frozenset({"config"}), True),
    ("the title names another", frozenset({"title"}), frozenset({"prose"}), True),
    ("the configuration says otherwise", frozenset({"flag", "config", "shape"}), frozenset({"title", "prose"}), False),
)


def _one_a_value(found: Iterable[Statement]) -> tuple[Statement, ...]:
    first: dict[Value, Statement] = {}
    for each in found:
        first.setdefault(each.value, each)
    return tuple(first.values())
