"""What a report says of the cast of every operand: calls of `Float8LinearConfig`, and `cast_configs` in logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from harness.bugs.configurations import calls_of
from harness.bugs.report import Report, clean_words
from harness.bugs.statements import Statement
from harness.matrix.recipes import OPERAND_FIELDS, Operand

ROUNDED = "round_scales_to_power_of_2"
_LOGGED = re.compile(r"\bcast_configs=((?:(?:i|w|go)(?:_g[iw])?:(?:dyn|dis)_(?:ten|axs)_e\dm\d,?){1,6})")
_OWNERS: Mapping[Operand, Operand] = {
    "i_gw": "i",
    "w_gi": "w",
    "go_gw": "go",
}  # the operands that default to their config
_SETTINGS = {"DISABLED": "dis", "AXISWISE": "axs", "TENSORWISE": "ten"}
_DTYPES = {"float8_e4m3fn": "e4m3", "e4m3_dtype": "e4m3", "float8_e5m2": "e5m2", "e5m2_dtype": "e5m2"}


def stated_by_casts(report: Report) -> Iterator[Statement]:
    """Statements of the recipe nearest to the configs of the operands, and of the casts that differ from it."""
    stated: dict[str, object] = {}
    rounded = False
    for call in calls_of(report):
        stated |= {key: value for key, value in call.keywords.items() if key.startswith("cast_config_")}
        rounded = rounded or call.keywords.get(ROUNDED) is True
    own = {operand: _own(stated, field) for operand, field in OPERAND_FIELDS.items()}
    if any(own.values()):
        casts = {operand: own[operand] or own[_OWNERS.get(operand, operand)] for operand in own}
        words = ", ".join(
            f"{key}={str(value).rpartition('.')[2]}" for key, value in stated.items() if value is not None
        )
        yield from _statements(casts, words, rounded=rounded)
    for found in _LOGGED.finditer(report.text):
        logged = dict(part.split(":") for part in found[1].strip(",").split(","))
        logs = {operand: _logged(logged.get(operand, "")) for operand in OPERAND_FIELDS}
        casts = {operand: logs[operand] or logs[_OWNERS.get(operand, operand)] for operand in logs}
        yield from _statements(casts, found[0], rounded=True)


def _own(stated: Mapping[str, object], field: str) -> tuple[str, ...]:
    """The settings that a CastConfig of this field has: `axs`, `dis`, a dtype."""
    names = [str(value).rpartition(".")[2] for key, value in stated.items() if key.startswith(f"{field}.")]
    return tuple((_SETTINGS | _DTYPES)[name] for name in names if name in _SETTINGS | _DTYPES)


def _logged(text: str) -> tuple[str, ...]:
    return ("dis",) if text.startswith("dis") else tuple(text.split("_")[1:])


def _statements(casts: Mapping[Operand, tuple[str, ...]], words: str, *, rounded: bool) -> Iterator[Statement]:
    """A statement for every operand; settings that the recipe implies have no spelling in a case."""
    rows = any("axs" in settings for settings in casts.values())
    told = [f"{operand}:{next((each for each in casts[operand] if len(each) == 3), 'ten')}" for operand in casts]
    told.append(f"go:{next((each for each in casts['go'] if len(each) == 4), 'e5m2')}")
    for fact, value in (("recipe", "rowwise" if rows else "tensorwise"), ("casts", tuple(told))):
        yield Statement(fact=fact, value=value, words=clean_words(words), source="config")
    if rows and not rounded:
        yield Statement(fact=ROUNDED, value=False, words=clean_words(words), source="config")
