"""What the options in a report say: flags of commands, TOML, lines such as `key: value`, and Python calls."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator

from harness.bugs.python_code import PythonCall, attributes, inline_calls, python_calls
from harness.bugs.report import Piece, Report, clean_words
from harness.bugs.statements import Source, Statement
from harness.matrix.options import option_value, options_of_toml
from harness.matrix.spellings import Option, Value, on_day, option_named, plain_key, spellings

# Last parts of keys that mean something only below their section, and names that any function has.
_GENERIC = frozenset({"enable", "mode", "name", "components", "backend", "dtype", "dim", "config", "adapter", "fp8"})
_FLAG = re.compile(r"""(?<![\w-])--([A-Za-z][\w.-]*)(?:(?:=|[ \t]+)("[^"\n]*"|'[^'\n]*'|(?!-)[^\s`]+))?""")
_VARIABLE = re.compile(r"\b(NGPU|CONFIG_FILE|CONFIG|MODULE|WORLD_SIZE)=[\"']?([\w./ -]*?)[\"']?(?=\s|$)")
_LINE = re.compile(r"^(\s*)(?:[-*+] +)?[\"']?([\w.-]+)[\"']?\s*[:=]\s*(.*?)\s*,?\s*(?:#.*|\s\(.*\))?$")
_SECTION = re.compile(r"^\s*\[([\w.]+)\]\s*$")
_MAX_OPTIONS = 5_000
_MAX_DEPTH = 12  # of parents


def stated_by_options(report: Report, day: datetime.date) -> Iterator[Statement]:
    """What every option in a report states; keys mean what they meant on this day."""
    for piece in report.pieces:
        if piece.comment:
            continue  # what somebody else ran
        if piece.kind in ("command", "prose", "trace", "dump"):
            yield from _flags(piece, day)
        if piece.kind in ("lines", "dump", "toml", "trace"):
            yield from _settings(piece, day)
        yield from _calls(piece, day)


def calls_of(report: Report) -> tuple[PythonCall, ...]:
    """Every Python call in a report."""
    return tuple(call for piece in report.pieces if not piece.comment for call in _calls_in(piece))


def names_of(report: Report) -> frozenset[str]:
    """The dotted names of all calls and attributes in the Python code of a report."""
    code = "\n".join(piece.text for piece in report.pieces if piece.kind == "python" and not piece.comment)
    return frozenset(call.name for call in calls_of(report)) | attributes(code)


def _calls_in(piece: Piece) -> tuple[PythonCall, ...]:
    if piece.kind == "python":
        return python_calls(piece.text)
    return inline_calls(piece.text) if piece.kind == "prose" else ()


def _flags(piece: Piece, day: datetime.date) -> Iterator[Statement]:
    text = re.sub(r"\\\n\s*", " ", piece.text)
    if piece.kind == "command":
        for name, value in _VARIABLE.findall(text)[:_MAX_OPTIONS]:
            plain, last = {"MODULE": "", "WORLD_SIZE": "world_size"}.get(name, name.lower()), value.rpartition("/")[2]
            yield from _stated(plain, last, f"{name} {last}", "flag", day)
    for found in list(_FLAG.finditer(text))[:_MAX_OPTIONS]:
        key, value = found[1], (found[2] or "").strip("\"'")
        section, dot, last = key.rpartition(".")
        if last.startswith(("no-", "no_")):
            key, value = f"{section}{dot}{last[3:]}", "false"
        yield from _stated(key, option_value(value) if value else True, found[0].strip(), "flag", day)


def _settings(piece: Piece, day: datetime.date) -> Iterator[Statement]:
    try:
        values = options_of_toml(piece.text) if piece.kind == "toml" else None
    except ValueError:
        values = None
    if values is None:
        yield from _lines(piece, day)
        return
    for key, value in list(values.items())[:_MAX_OPTIONS]:
        yield from _stated(key, value, f"{key} = {value}", "config", day)


def _lines(piece: Piece, day: datetime.date) -> Iterator[Statement]:
    """`key = value` and `key: value`, below `[section]` or an indented parent."""
    section, parents = "", [(-1, "")]
    for line in piece.text.split("\n")[: 4 * _MAX_OPTIONS]:
        header, found = _SECTION.match(line), _LINE.match(line)
        if header:
            section, parents = f"{header[1]}.", [(-1, "")]
        elif found:
            indent = len(found[1])
            while parents[-1][0] >= indent:
                parents.pop()
            key = f"{parents[-1][1]}{found[2]}"
            if not found[3] and len(parents) <= _MAX_DEPTH:
                parents.append((indent, f"{key}."))
            elif found[3]:
                value = found[3].strip("\"'")
                yield from _stated(f"{section}{key}", option_value(value), line.strip(), "config", day)


def _calls(piece: Piece, day: datetime.date) -> Iterator[Statement]:
    for call in _calls_in(piece)[:_MAX_OPTIONS]:
        for key, value in call.keywords.items():
            if isinstance(value, bool | int | str | tuple):
                yield from _stated(key, value, f"{key.rpartition('.')[2]}={value}", "config", day)
        for row in on_day(spellings().call, day):
            if re.fullmatch(row.pattern, call.name):
                value = row.value
                if row.argument is not None:
                    value = str(call.arguments[row.argument]) if len(call.arguments) > row.argument else call.name
                yield from _as_fact(row.fact, value, call.words)


def _stated(key: str, value: object, words: str, source: Source, day: datetime.date) -> Iterator[Statement]:
    option = _option(key, source, day)
    read = None if option is None else option.read(value)
    if option is not None and read is not None:
        yield Statement(fact=option.fact, value=_plain(read), words=clean_words(words), source=source)


def _option(key: str, source: Source, day: datetime.date) -> Option | None:
    plain = plain_key(key)
    whole = option_named(plain, day)
    if whole is None or plain in (whole.name, *whole.keys):
        return whole if plain not in _GENERIC or source == "config" or plain == "config" else None
    return None if plain.rpartition(".")[2] in _GENERIC else whole


def _as_fact(fact: str, value: str, words: str) -> Iterator[Statement]:
    """The value that a call states of a fact, parsed as that of the option of the same fact."""
    option = next((each for each in spellings().option if each.fact == fact), None)
    read: Value | None = value if option is None else option.read(value)
    if read is not None:
        yield Statement(fact=fact, value=_plain(read), words=clean_words(words), source="config")


def _plain(value: Value) -> Value:
    if value in ("true", "false"):
        return value == "true"
    return clean_words(value) if isinstance(value, str) else value
