"""A TOML file with the line of every key, for errors that say `file:line`.

tomllib does not report lines, so keys are searched in the text. The search is a heuristic (a key inside a multi-line
string can mislead it) and is used only in error messages.
"""

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import suggestion

KeyPath = tuple[str | int, ...]
T = TypeVar("T", bound=msgspec.Struct)

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\]#]+?)\s*\]")
_KEY = re.compile(r"""^\s*([A-Za-z0-9_."' -]+?)\s*=""")


class TomlFile(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed TOML file, and the text it was parsed from. `where` is its name in errors."""

    where: str
    data: dict[str, Any]
    text: str

    def place(self, *path: str | int) -> str:
        """`file:line` of a key, or of the closest table that contains it."""
        lines = _find_lines(self.text)
        for end in range(len(path), 0, -1):
            if path[:end] in lines:
                return f"{self.where}:{lines[path[:end]]}"
        return self.where

    def error(self, *path: str | int, what: str, fix: str | None = None) -> HarnessError:
        """Return an error about the key at `path`, for the caller to raise."""
        return HarnessError(what, where=self.place(*path), fix=fix)

    def check_keys(self, *path: str | int, table: object, known: Iterable[str]) -> dict[str, Any]:
        """`table` as a dict. Raises HarnessError if it is not a table or has a key outside `known`."""
        if not isinstance(table, dict):
            name = ".".join(part for part in path if isinstance(part, str)) or "the file"
            raise self.error(*path, what=f"{name} must be a table, not {table!r}.")
        names = tuple(known)
        for key in table:
            if key not in names:
                raise self.error(*path, key, what=f"unknown key '{key}'.", fix=suggestion(key, names))
        return table

    def tables(self, name: str) -> list[Any]:
        """Return the top-level `[[name]]` tables. Raises HarnessError if written as `[name]`."""
        tables = self.data.get(name, [])
        if not isinstance(tables, list):
            raise self.error(name, what=f"'{name}' must be a list of tables.", fix=f"write [[{name}]].")
        return tables

    def record(self, kind: type[T], table: object, *path: str | int, fixes: Mapping[str, str] = {}) -> T:
        """Return the struct of a table. `fixes`: by field, for what is no value of it. HarnessError with the line."""
        fields = self.check_keys(*path, table=table, known=kind.__struct_fields__)
        for field in _fields_of(kind):
            text = fields.get(field.name)
            if field.required and field.type is str and not (isinstance(text, str) and text.strip()):
                what = f"'{field.name}' must be a non-empty string."
                raise self.error(*path, field.name, what=what, fix=f'add {field.name} = "...".')
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            match = re.search(r"missing required field `(\w+)`|at `\$\.(\w+)", str(error))
            name = next(filter(None, match.groups()), "") if match else ""
            raise self.error(*path, name, what=f"{error}.", fix=fixes.get(name)) from error

    def records(self, name: str, kind: type[T], *, fixes: Mapping[str, str] = {}) -> tuple[T, ...]:
        """Return the structs of the `[[name]]` tables, which no other key stands beside."""
        self.check_keys(table=self.data, known=(name,))
        return tuple(self.record(kind, table, name, at, fixes=fixes) for at, table in enumerate(self.tables(name)))

    def check_distinct(self, names: Sequence[str], table: str, *key: str, noun: str) -> None:
        """Raise HarnessError at the second of the `[[table]]` tables with equal names, or at its `key`."""
        for index, name in enumerate(names):
            if name in names[:index]:
                what = f"two {noun} are named '{name}'."
                raise self.error(table, index, *key, what=what, fix="rename one of them.")


@functools.cache  # msgspec evaluates the annotations at every call
def _fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def read_toml_file(path: Path) -> TomlFile:
    """Return the file at `path`. Raises HarnessError if it is missing, unreadable or not TOML."""
    return parse_toml(read_toml_text(path), where=str(path))


def read_toml_text(path: Path) -> str:
    """Return the text of the file. Raises HarnessError if it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise HarnessError("no such file.", where=str(path), fix="check the name and the folder.") from error
    except UnicodeDecodeError as error:
        raise HarnessError(f"not UTF-8 text: {error.reason}.", where=str(path), fix="save it as UTF-8.") from error
    except (OSError, ValueError) as error:
        raise HarnessError(f"cannot be read: {error}.", where=str(path)) from error


def parse_toml(text: str, *, where: str) -> TomlFile:
    """Return the TOML in `text`. Raises HarnessError with the line when it is malformed."""
    try:
        data = tomllib.loads(text)
    except RecursionError as error:
        raise HarnessError("nested too deeply.", where=where) from error
    except ValueError as error:  # TOMLDecodeError, or a number with more digits than Python allows
        match = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        line = f":{match[1]}" if match else ""
        what = str(error)[: match.start()] if match else str(error)
        raise HarnessError(f"malformed TOML: {what}.", where=where + line) from error
    return TomlFile(where=where, data=data, text=text)


def _find_lines(text: str) -> dict[KeyPath, int]:
    """Return the 1-based line of every key and table."""
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header = _HEADER.match(line)
        key = _KEY.match(line)
        if header:
            table = _numbered(_keys(header[2]), counts)
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            lines.setdefault(table, number)
        elif key:
            words = _keys(key[1])
            for end in range(1, len(words) + 1):
                lines.setdefault((*table, *words[:end]), number)
    return lines


def _numbered(words: tuple[str, ...], counts: dict[KeyPath, int]) -> KeyPath:
    """`matrix.axes` after the second `[[matrix]]` is `("matrix", 1, "axes")`."""
    path: KeyPath = ()
    for position, word in enumerate(words):
        path = (*path, word)
        if path in counts and position < len(words) - 1:
            path = (*path, counts[path])
    return path


def _keys(dotted: str) -> tuple[str, ...]:
    return tuple(word.strip().strip("\"'") for word in dotted.split("."))
