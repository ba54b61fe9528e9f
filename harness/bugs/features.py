"""What a report needs and no case has: refused by name, with what it would need.

A word alone refuses nothing: it must be an option, a call, or stand in the title or a sentence that says what was run.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence

from harness.bugs.configurations import names_of
from harness.bugs.prose import Clause, clauses, is_negated
from harness.bugs.report import Report, clean_words
from harness.bugs.statements import Statement
from harness.matrix.spellings import Feature, on_day, spellings

_RUN = re.compile(
    r"\b(?:us(?:e|es|ed|ing)|with|run(?:s|ning)?|ran|train(?:s|ed|ing)?|enabl\w+|combin\w+|tr(?:y|ied|ying)|debugging)\b",
    re.IGNORECASE,
)
_HEDGED = re.compile(
    r"\b(?:like|other|also|unlike|compar\w+|would|could|should|might|support(?:s|ed)?|instead|rather|similar|e\.g|plan\w*"
    r"|future|such as|fun fact|built to|if you)\b",
    re.IGNORECASE,
)


def refused_features(report: Report, statements: Sequence[Statement], day: datetime.date) -> Mapping[str, str]:
    """By name, what the report needs and no case has, with the words that say so."""
    # With options or calls of torchao's float8 in the report, prose about other software is no request for it.
    is_torchao = any(each.fact in ("float8", "recipe") and each.source in ("flag", "config") for each in statements)
    names = names_of(report)
    found: dict[str, str] = {}
    for feature in on_day(spellings().feature, day):
        words = _by_facts(feature, statements) or _by_names(feature, names) or _by_prose(feature, report, is_torchao)
        if words:
            found[feature.name] = f"it would need {feature.needs} ({words})"
    return found


def _by_facts(feature: Feature, statements: Sequence[Statement]) -> str:
    for each in statements:
        wanted = feature.facts.get(each.fact, ())
        values = each.value if isinstance(each.value, tuple) else (each.value,)
        above = "2+" in wanted and isinstance(each.value, int) and each.value > 1
        if above or any(str(value) in wanted for value in values):
            return each.words
    return ""


def _by_names(feature: Feature, names: frozenset[str]) -> str:
    return clean_words(next((name for name in sorted(names) if re.fullmatch(feature.calls, name)), ""))


def _by_prose(feature: Feature, report: Report, is_torchao: bool) -> str:
    if not feature.words:
        return ""
    for clause in clauses(report):
        match = re.search(feature.words, clause.text)
        if match and _asks(clause, match, is_torchao):
            return clean_words(clause.text)
    return ""


def _asks(clause: Clause, match: re.Match[str], is_torchao: bool) -> bool:
    """True when the clause says that this was run."""
    if is_negated(clause.text, match.start(), match.end()):
        return False
    if clause.source == "title":
        return True
    told = _RUN.search(clause.text) and not _HEDGED.search(clause.text)
    return bool(told) and not (clause.control or clause.comment or is_torchao)
