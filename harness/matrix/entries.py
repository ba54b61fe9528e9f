"""Entries of record files that name cases: by `id`, or by `select`, a selector. One of the two, never both."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.selector import parse_selector
from harness.matrix.tomlfile import TomlFile


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What says which cases it is about."""

    id: str = ""
    select: str = ""

    def covers(self, case: Case) -> bool:
        """True for the cases it is about."""
        return case_id(case) == self.id if self.id else parse_selector(self.select).matches(case)

    @property
    def which(self) -> str:
        """The id or the selector, as in the file."""
        return self.id or self.select


def check_entry(toml: TomlFile, fields: dict[str, Any], *path: str | int) -> None:
    """Raise HarnessError with the line where an entry names no cases, or cases that cannot be."""
    given = [name for name in ("id", "select") if isinstance(fields.get(name), str) and fields[name].strip()]
    if len(given) != 1:
        what = "an entry has either 'id', one case, or 'select', an expression."
        raise toml.error(*path, what=what, fix='write id = "tp2-rowwise-v2048-b16", or select = "tp>1".')
    (name,) = given
    try:
        _ = parse_case_id(fields[name]) if name == "id" else parse_selector(fields[name])
    except HarnessError as error:
        raise toml.error(*path, name, what=error.what, fix=error.fix) from error


def check_texts(toml: TomlFile, fields: dict[str, Any], names: tuple[str, ...], *path: str | int) -> None:
    """Raise HarnessError with the line where one of these fields is missing or says nothing."""
    for name in names:
        if not isinstance(fields.get(name), str) or not fields[name].strip():
            what = f"'{name}' must be a non-empty string."
            raise toml.error(*path, name, what=what, fix=f'add {name} = "...".')
