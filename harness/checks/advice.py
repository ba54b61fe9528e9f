"""What each rule of a finding means, its usual causes and what to do: `advice.toml` here and in plug-ins."""

import functools
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from harness.registry import plugins


class Advice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Advice about rules with the same causes. `rules`: their names, with wildcards; the first match counts."""

    rules: tuple[str, ...]
    meaning: str
    causes: str
    action: str


@functools.cache
def advice() -> tuple[Advice, ...]:
    """Return all advice in the order of the files, those of plug-ins last."""
    folders = (Path(__file__).parent, *(plugin.folder for plugin in plugins() if plugin.folder is not None))
    files = (folder / "advice.toml" for folder in folders)
    tables = (table for file in files if file.exists() for table in tomllib.loads(file.read_text("utf-8"))["advice"])
    return tuple(msgspec.convert(table, Advice) for table in tables)


def advice_of(rule: str) -> Advice | None:
    """Return the advice about a rule; None for a rule of a plug-in that brings none."""
    return next((each for each in advice() if any(fnmatchcase(rule, name) for name in each.rules)), None)
