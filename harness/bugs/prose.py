"""What the prose of a report says, clause by clause. What a clause says of a run that works is no statement."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

import msgspec

from harness.bugs.report import Report, clean_words
from harness.bugs.statements import Source, Statement
from harness.matrix.spellings import Prose, Value, on_day, spellings

_CLAUSE = re.compile(
    r"[.;!?](?=\s|$)|\n|,?\s+(?:but|while|whereas|however)\s|,\s+(?=(?:crash|fail|pass|work|break)\w*\s)"
)
# A run that works, or that the bug is compared with.
_CONTROL = re.compile(
    r"\b(?:works?|worked|working|pass(?:es|ed)?|fine|smooth\w*|succeeds?|no issues?|not an issue|control|baselines?"
    r"|compared (?:with|to)"
    r"|did(?:n't| not) (?:encounter|repro\w*|happen)|does(?:n't| not) (?:repro\w*|happen|crash|fail|occur))\b",
    re.IGNORECASE,
)
_BROKEN = re.compile(r"\b(?:not work|n't work|no longer|un(?:able|expected)|only works|stop\w* work)", re.IGNORECASE)
_NEGATED = re.compile(
    r"\b(?:no|not|without|w/o|disabl\w+|turn(?:ed|ing)? off|instead of|rather than)\s+"
    r"(?:(?:us\w+|with|any|enabl\w+|the|apply\w+|hav\w+)\s+)?$",
    re.I,
)
_AFTER = re.compile(r"^\s*(?:=\s*|is |was )?(?:false|off|disabled)\b", re.IGNORECASE)
_PRINTED = frozenset({"vocab_size", "dim", "layers", "heads", "kv_heads"})  # that programs print, also in traces


class Clause(msgspec.Struct, frozen=True, kw_only=True):
    """A clause of prose. `control`: it is about a run that works."""

    text: str
    source: Source
    comment: bool
    control: bool


def clauses(report: Report) -> tuple[Clause, ...]:
    """The title and every clause of prose, in the order of the report."""
    found = [Clause(text=report.title, source="title", comment=False, control=False)]
    for piece in report.pieces:
        if piece.kind != "prose":
            continue
        for text in _CLAUSE.split(piece.text):
            if text.strip() and clean_words(re.sub(r"^\s*#+\s*", "", text)) != report.title:
                control = bool(_CONTROL.search(text)) and not _BROKEN.search(text)
                found.append(Clause(text=text, source="prose", comment=piece.comment, control=control))
    return tuple(found)


def stated_by_prose(report: Report, day: datetime.date) -> tuple[tuple[Statement, ...], tuple[str, ...]]:
    """What prose states, and what was passed over because it is about a run that works."""
    stated: list[Statement] = []
    passed: list[str] = []
    rows = on_day(spellings().prose, day)
    for clause in clauses(report):
        found = [each for row in rows for each in _found(row, clause)]
        if clause.control:
            passed += [f"{clean_words(clause.text)}: what works, or is compared with"] if _specific(found) else []
        else:
            stated += found
    printed = report.texts("trace", "command")[:200_000]
    for row in rows:
        if row.fact in _PRINTED:
            stated += _found(row, Clause(text=printed, source="prose", comment=False, control=False))
    return tuple(stated), tuple(dict.fromkeys(passed))


def is_negated(text: str, start: int, end: int) -> bool:
    """True when what stands at these characters is said not to be there."""
    return bool(_NEGATED.search(text[max(0, start - 40) : start]) or _AFTER.match(text[end : end + 20]))


def _specific(found: list[Statement]) -> bool:
    """True where a clause states more than that it is about float8 and FSDP."""
    return any(each.fact not in ("float8", "fsdp", "tp_used", "model_size") for each in found)


def _found(row: Prose, clause: Clause) -> Iterator[Statement]:
    for match in re.finditer(row.pattern, clause.text, re.IGNORECASE):
        value = _value(match[1] if match.re.groups else row.value)
        if is_negated(clause.text, match.start(), match.end()):
            if value is not True:
                if row.fact == "checkpointing":
                    yield _statement("checkpointing", "none", clause, match)
                continue
            value = False
        yield _statement(row.fact, value, clause, match)


def _statement(fact: str, value: Value, clause: Clause, match: re.Match[str]) -> Statement:
    """The statement, in the words around it."""
    start = max(clause.text.rfind(" ", 0, max(0, match.start() - 30)) + 1, 0)
    end = clause.text.find(" ", match.end() + 20)
    words = clause.text if len(clause.text) < 90 else clause.text[start : None if end < 0 else end]
    return Statement(fact=fact, value=value, words=clean_words(words), source=clause.source, comment=clause.comment)


def _value(text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isascii() and text.isdigit() else text
