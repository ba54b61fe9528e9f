"""What options of other tools mean, by their dotted names, and what programs do where nothing is stated.

The tables are `spellings.toml` and `defaults.toml`, which has defaults and the files of torchtitan by name.
"""

import datetime
import fnmatch
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import InvalidVersion, Version

from harness.matrix.axes import AXES, SCOPE, OutOfScope, axis_type, choices
from harness.matrix.models import MODELS

Value = bool | int | float | str | tuple[str, ...]

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_KINDS: Mapping[str, type] = {"bool": bool, "int": int, "float": float, "str": str, "tuple": tuple}
_NOT_TOOLS = frozenset({"kind", "values", "silent", "since", "until"})
_SCOPE = {feature.name: feature for feature in SCOPE}


def shown(value: object) -> str:
    """Return a value as configurations write it."""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


class Spelling(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table: what the keys of these tools state, between two days."""

    fact: str
    kind: type
    values: Mapping[str, Value] = {}
    silent: tuple[str, ...] = ()
    since: datetime.date = datetime.date.min
    until: datetime.date = datetime.date.max

    def read(self, value: object) -> Mapping[str, Value] | None:
        """Return the fact that this value states; {} for one that says nothing, None for an unknown one."""
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value).strip()
        plain = text.lower()
        truth = "true" if plain in _TRUE[:3] else "false" if plain in _FALSE[:3] else ""
        forms = (plain, plain.rpartition(".")[2], truth)
        if any(form in self.silent for form in forms[:2]):
            return {}
        for form in forms:
            if form in self.values:
                return {self.fact: self.values[form]}
        for pattern, meant in self.values.items():
            if "*" in pattern and fnmatch.fnmatchcase(plain, pattern):
                return {self.fact: meant}
        read = None if self.values and self.fact not in _OPEN else self._converted(value, text)
        return None if read is None else {self.fact: read}

    def _converted(self, value: object, text: str) -> Value | None:
        if self.kind is int:
            return int(text) if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else None
        if self.kind is float:
            number = r"(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?"
            return float(text) if re.fullmatch(number, text, re.ASCII | re.IGNORECASE) else None
        if self.kind is bool:
            known = text.lower() in (*_TRUE, *_FALSE)
            return text.lower() in _TRUE if known else None
        if self.kind is tuple:
            items = value if isinstance(value, list | tuple) else text.strip("[]").split(",")
            return tuple(word for item in items if (word := str(item).strip(" \"'")))
        last = text.lower().rpartition(".")[2]
        return last if self.fact in AXES and last in choices(self.fact) else text


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Keys whose values, by a pattern, ask for what no case has, and names in Python that do."""

    feature: str
    keys: tuple[str, ...] = ()
    values: str = ""
    calls: str = ""


class WithoutEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Options that no case needs, and why."""

    why: str
    keys: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    names: str = ""
    variables: str = ""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the table has for a name. `length`: how many parts of the name it knows."""

    length: int = 0
    spellings: tuple[tuple[str, Spelling], ...] = ()  # each with the tool whose key it is
    why: str = ""  # it has no effect


_LAST_DAY = datetime.date.max - datetime.timedelta(days=1)
_OPEN = frozenset({"recipe", "dtype", "reduce_dtype", "parameter_dtype"})  # whose `values` are only other names


@functools.cache
def table() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "spellings.toml").read_text())


def plain_key(key: str) -> str:
    """A name as the table has it: without `-` in front or inside, in small letters except for calls and variables."""
    if key.endswith("()") or key.startswith("$"):
        return key
    return key.lstrip("-").replace("-", "_").lower()


@functools.lru_cache(maxsize=4096)
def known(path: str, day: datetime.date) -> Known:
    """What the longest known end of a dotted name means on this day; a section that has no effect covers its inside."""
    parts = path.split(".")
    best = Known()
    for at in range(len(parts)):
        end, length = ".".join(parts[at:]), len(parts) - at
        keys = (f"={end}", end) if at == 0 else (end,)
        rows = [row for key in keys for row in _spellings().get(key, ())]
        holding = tuple((tool, row) for tool, row in rows if row.since <= day < row.until)
        if holding:
            best = Known(length=length, spellings=holding)
            break
    for length, why in _no_effect(parts):
        if length > best.length:
            best = Known(length=length, why=why)
    return best


def is_known_call(name: str) -> bool:
    return bool(name) and bool(known(f"{name}()", _LAST_DAY).length)


def is_known_variable(name: str) -> bool:
    return bool(known(f"${name}", _LAST_DAY).spellings)


def has_no_effect(path: str, value: object) -> str:
    """Return why this value of an option has no effect in a case; "" where it may have one."""
    text = str(value).strip().lower()
    parts = path.split(".")
    for at in range(len(parts)):
        for wanted, why in _limited().get(".".join(parts[at:]), ()):
            if fnmatch.fnmatchcase(text, wanted):
                return why
    return ""


@functools.lru_cache(maxsize=4096)
def subject(name: str) -> str:
    """Return what a name is about that must not be passed over, such as "precision"; "" for nothing of the kind."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    words = f"{words.replace('_', ' ')} {name}".lower()
    return next((about for about, pattern in table()["matters"].items() if re.search(pattern, words)), "")


def asked_by_option(paths: Sequence[str], value: object) -> OutOfScope | None:
    values = value if isinstance(value, list | tuple) else str(value).split(",")
    for refusal in _refusals():
        ends = any(path == key or path.endswith(f".{key}") for path in paths for key in refusal.keys)
        if ends and any(re.fullmatch(refusal.values, str(item).strip().lower()) for item in values):
            return _SCOPE[refusal.feature]
    return None


def asked_by_call(name: str) -> OutOfScope | None:
    for refusal in _refusals():
        if refusal.calls and re.search(rf"(?:^|\.)(?:{refusal.calls})(?:\.|$)", name):
            return _SCOPE[refusal.feature]
    return None


def names_experts(model: str) -> bool:
    return bool(re.fullmatch(table()["experts"]["names"], model))


@functools.lru_cache(maxsize=4096)
def tool_started_by(word: str) -> str:
    """Return the tool that this word of a command starts; "" for none."""
    plain = word.rpartition("/")[2]
    launchers: Mapping[str, str] = table()["launchers"]
    for tool, names in launchers.items():
        if any(name in (plain, word) or word.endswith(f"/{name}") for name in names.split()):
            return str(tool)
    return ""


def is_toml_of_torchtitan(path: str) -> bool:
    return any(path == key or path.endswith(f".{key}") for key in table()["toml_of_torchtitan"]["keys"].split())


@functools.cache
def printed_lines() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return the lines that tools print word for word, each with the option whose value it has."""
    return tuple((re.compile(re.escape(line).replace(r"\{\}", r"(\w+)")), key) for line, key in table()["log"].items())


@functools.cache
def _spellings() -> Mapping[str, list[tuple[str, Spelling]]]:
    """By key, the rows that have it, each with the tool whose key it is."""
    by_key: dict[str, list[tuple[str, Spelling]]] = {}
    for fact, row in ((fact, row) for fact, rows in table()["fact"].items() for row in rows):
        kind = _KINDS[row["kind"]] if "kind" in row else axis_type(fact)
        rest = {name: row[name] for name in ("values", "since", "until") if name in row}
        spelling = Spelling(fact=fact, kind=kind, silent=tuple(row.get("silent", "").split()), **rest)
        for tool, keys in row.items():
            for key in keys.split() if tool not in _NOT_TOOLS else ():
                by_key.setdefault(key, []).append((tool, spelling))
    return by_key


@functools.cache
def _refusals() -> tuple[Refusal, ...]:
    return tuple(Refusal(**{**row, "keys": tuple(row.get("keys", "").split())}) for row in table()["refused"])


@functools.cache
def _without_effect() -> tuple[WithoutEffect, ...]:
    lists = ("keys", "apart", "sections")
    rows = table()["without_effect"]
    return tuple(
        msgspec.convert({**row, **{name: row.get(name, "").split() for name in lists}}, WithoutEffect) for row in rows
    )


@functools.cache
def _limited() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """By key, the values that have no effect, and why."""
    by_key: dict[str, tuple[tuple[str, str], ...]] = {}
    for row in _without_effect():
        for key, _, wanted in (key.partition("=") for key in row.keys if "=" in key):
            by_key[key] = (*by_key.get(key, ()), (wanted, row.why))
    return by_key


@functools.cache
def _reasons(field: str) -> Mapping[str, str]:
    """Return the reasons by key, or by section."""
    return {word: row.why for row in _without_effect() for word in getattr(row, field) if "=" not in word}


def _no_effect(parts: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(length, why) of what has no effect and these parts end with, or lie in."""
    keys, apart, sections = _reasons("keys"), _reasons("apart"), _reasons("sections")
    last, matters = parts[-1], bool(subject(".".join(parts)))
    for at, part in enumerate(parts):
        end = ".".join(parts[at:])
        if end in keys:
            yield len(parts) - at, keys[end]
        if at < len(parts) - 1 and part in apart:
            yield len(parts) - at, apart[part]
        if at < len(parts) - 1 and part in sections and not matters:
            yield 1, sections[part]
    for row in _without_effect():
        pattern = row.variables if last.startswith("$") else row.names
        if pattern and re.fullmatch(pattern, last.lstrip("$")) and (last.startswith("$") or not matters):
            yield 1, row.why


FLOAT8_STYLES = datetime.date(2025, 9, 30)  # until then torchtitan used float8 TP styles
LAST_TOML = datetime.date(2026, 2, 22)  # the last day of torchtitan's TOML files
CONVERTED_OUTPUT = datetime.date(2024, 7, 19)  # until then torchtitan converted the output layer, without a filter
FILTERS = datetime.date(2025, 4, 7)  # since then it converts the output layer where no filter names it

_LARGER_DEBUG_MODEL = datetime.date(2025, 6, 1)  # until then it had 8 layers and a vocabulary of 2256


@functools.cache
def _defaults() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "defaults.toml").read_text())


class Era(msgspec.Struct, frozen=True, kw_only=True):
    """The day that decides what options and defaults mean, and where it comes from.

    `sure`: a version, a format that ended, or the user says so; not today, as the version may be older.
    """

    day: datetime.date
    source: str
    sure: bool = False


def era_of_version(version: str) -> Era | None:
    """Return the era of a version of torchtitan; None for one before the first that is known, or for no version."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        return None
    releases = _defaults()["releases"].items()
    known = [(name, day) for name, day in releases if Version(name) <= wanted or wanted.base_version == name]
    return Era(day=known[-1][1], source=f"torchtitan {version}", sure=True) if known else None


def default_of(fact: str, tool: str, day: datetime.date) -> tuple[Value, str] | None:
    """Return the default of a fact, and why."""
    for row in _defaults()["default"]:
        if row["fact"] == fact and tool in row.get("tool", tool).split(" ") and day >= row.get("since", day):
            return row["value"], row["why"].format(tool=tool)
    return None


def facts_of_file(name: str, day: datetime.date) -> Mapping[str, Value]:
    """Return the facts that a configuration file of torchtitan sets; {} for any other."""
    for row in _defaults()["file"]:
        if day >= row.get("since", day) and re.search(row["name"], name, re.IGNORECASE):
            size = sizes_of_model(row["facts"].get("model_size", ""), day)
            return {**row["facts"], "seq_len": MODELS[size[0]].seq_len} if size else row["facts"]
    return {}


def sizes_of_model(name: str, day: datetime.date) -> tuple[str, Mapping[str, int]] | None:
    """Return a known model and the sizes behind a name such as "8B"; None for any other."""
    known = next((known for known, pattern in _defaults()["models"].items() if re.search(pattern, name)), None)
    if known is None:
        return None
    model = MODELS[known]
    sizes = {**msgspec.structs.asdict(model.shape), "vocab_size": model.vocab_size}
    if known == "debugmodel" and day < _LARGER_DEBUG_MODEL:
        sizes |= {"layers": 8, "vocab_size": 2256}
    return known, sizes
