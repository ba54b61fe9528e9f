"""Required cells: what a candidate must have shown before it is released.

Owns the format of `cases/required.toml`, which `gate --required` reads:

    [[required]]
    name = "TP in bfloat16"           # short, unique
    select = "tp>1 dtype=bfloat16"    # a selector, or id = "...", one case
    at_least = 3                      # so many of these cases must be good; 1 if not given
    max_age_days = 7                  # optional: of a run that is not older
    reason = "..."                    # one sentence: why it is required
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness.matrix.entries import Entry, check_entry, check_texts
from harness.matrix.tomlfile import TomlFile, read_toml_file


class Required(Entry, frozen=True, kw_only=True):
    """One entry: at least so many good cases of it, of a run that is not older than so many days."""

    name: str
    reason: str
    at_least: int = 1
    max_age_days: float | None = None


def read_required(path: Path) -> tuple[Required, ...]:
    """The entries of a file, in order. Raises HarnessError with the line for anything invalid."""
    toml = read_toml_file(path)
    toml.check_keys(table=toml.data, known=("required",))
    entries = tuple(_entry(toml, table, index) for index, table in enumerate(toml.tables("required")))
    toml.check_distinct([entry.name for entry in entries], "required", "name", noun="entries")
    return entries


def _entry(toml: TomlFile, table: object, index: int) -> Required:
    fields = toml.check_keys("required", index, table=table, known=Required.__struct_fields__)
    check_texts(toml, fields, ("name", "reason"), "required", index)
    check_entry(toml, fields, "required", index)
    for name in ("at_least", "max_age_days"):
        if name in fields and not (isinstance(fields[name], int | float) and fields[name] > 0):
            raise toml.error("required", index, name, what=f"'{name}' must be a number above 0.")
    try:
        return msgspec.convert(fields, Required)
    except msgspec.ValidationError as error:
        raise toml.error("required", index, what=f"{error}.") from error
