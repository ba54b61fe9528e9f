"""The settings of a report: every line of its configurations and commands, with the dotted name of each.

TOML, YAML and JSON are parsed by their libraries, Python as a syntax tree (`code.py`), commands as words of a shell.
Nothing is executed.
"""

import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import msgspec
import yaml

from harness.plugins.bugs.report import YAML_LOADER, Block
from harness.plugins.bugs.spellings import is_known_variable, printed_lines, shown, tool_started_by

# A flag overrides a configuration, as it does in torchtitan.
Source = Literal["flag", "config"]

UNREAD = "?"  # of a value that only the program knows
MOST = 5_000  # settings of a block
_DEEPEST = 30  # parents of a line
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+|[a-z]\w*_\w*)=(.*)", re.DOTALL)  # of Hydra, behind a command
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NAMED = re.compile(r"\$(?:\{(\w+)(?::-([^{}]*))?\}|(\w+))")
_STARTS = re.compile(r"(?:.*/)?(?:torchrun|python3?|srun|\w+\.(?:sh|py))")
_ENDS = frozenset({"|", "&&", ";", ">", "2>&1", "\\", ")", "&"})
_TABLE = re.compile(r"^\s*([\w-]+) \.{3,} (\S.*)$")  # as Megatron prints its arguments
_LINE = re.compile(r"^\s*(?:- )?[\"']?([A-Za-z][\w.-]*)[\"']?\s*[=:]\s*(\S.*)?$")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a configuration. `names`: what it may be known by, dotted. `words`: the line as it is shown.

    `counted`: a line of a configuration, whether anybody knows it or not; code is one only where its name is known, or
    matters. `broken`: why it cannot be read.
    """

    names: tuple[str, ...]
    value: object
    words: str
    source: Source = "config"
    counted: bool = True
    broken: str = ""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command and its options. `tool`: what it starts, "" for an unknown one. `starts`: it starts a run."""

    tool: str
    starts: bool
    settings: tuple[Setting, ...]


def settings_of_tree(tree: object, prefix: str = "", depth: int = 0) -> Iterator[Setting]:
    """The leaves of what TOML, YAML or JSON has parsed."""
    if isinstance(tree, Mapping) and tree and depth < _DEEPEST:
        for name, value in tree.items():
            yield from settings_of_tree(value, f"{prefix}.{name}" if prefix else str(name), depth + 1)
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree) and depth < _DEEPEST:
        for item in tree:
            yield from settings_of_tree(item, prefix, depth + 1)
    else:
        value = "" if tree in (None, {}, []) else tuple(tree) if isinstance(tree, list) else tree
        yield Setting(names=(prefix,), value=value, words=f"{prefix} = {shown(value)}")


def settings_of_block(block: Block) -> Iterator[Setting]:
    """The settings of TOML, YAML or JSON; each line of a broken one, with the reason."""
    if block.broken:
        for line in block.text.split("\n"):
            match = _LINE.match(line)
            if match:
                yield Setting(names=(match[1],), value=UNREAD, words=line.strip(), broken=block.broken)
        return
    if block.kind == "yaml":
        for tree in yaml.load_all(block.text, Loader=YAML_LOADER):
            yield from settings_of_tree(tree)
    else:
        yield from settings_of_tree(tomllib.loads(block.text) if block.kind == "toml" else json.loads(block.text))


def commands_of(text: str) -> Iterator[Command]:
    """The commands of a shell, or of a log that shows them: a line, or several that `\\` joins, with options in it."""
    joined = re.sub(r"[ \t]*\\\n\s*", " ", text)
    used = set(re.findall(r"\$\{?(\w+)", joined))
    variables: dict[str, str] = {}
    for line in joined.split("\n"):
        yield from _command(line, variables, used)


def printed_settings(text: str) -> Iterator[Setting]:
    """What lines of a log state that tools print word for word."""
    for line in text.split("\n"):
        match = _TABLE.match(line)
        if match:
            yield Setting(names=(match[1],), value=match[2].strip(), words=f"{match[1]} {match[2].strip()}")
        for pattern, key in printed_lines():
            found = pattern.search(line)
            if found:
                yield Setting(names=(key,), value=found[1], words=found[0])


def _command(line: str, variables: dict[str, str], used: Collection[str]) -> Iterator[Command]:
    words = _words(line)
    if not words:
        return
    tool = next((started for word in words if (started := tool_started_by(word))), "")
    settings: list[Setting] = []
    has_flags = any(_FLAG.fullmatch(word) for word in words)
    at = 0
    while at < len(words):
        flag, variable = _FLAG.fullmatch(words[at]), _VARIABLE.fullmatch(words[at])
        override = _OVERRIDE.fullmatch(words[at])
        if flag:
            value, at = _value_of(flag, words, at)
            settings.append(_flag(flag[1], _resolved(value, variables) if isinstance(value, str) else value))
        elif override and (tool or has_flags):
            value = _resolved(override[2], variables)
            settings.append(Setting(names=(override[1],), value=value, words=f"{override[1]}={value}", source="flag"))
        elif variable:
            variables[variable[1]] = _resolved(variable[2].strip("\"'"), variables)
            settings += _variable(variable[1], variables[variable[1]], used=variable[1] in used)
        at += 1
    if settings:
        starts = bool(tool) or any(_STARTS.fullmatch(word) for word in words)
        yield Command(tool=tool, starts=starts, settings=tuple(settings[:MOST]))


def _words(line: str) -> list[str]:
    """The words of a command, without its prompt; [] for a line that sets no option and no variable."""
    if "--" not in line and "=" not in line:
        return []
    text = re.sub(r"^\s*(?:\$ |> |# (?=\S*--)|export )", "", line)
    if "--" not in text and not re.match(r"\s*[A-Za-z_]\w*=\S", text):
        return []
    words = _split(text)
    inner = (_split(word) if word.startswith("--") and " " in word and "=" not in word else [word] for word in words)
    return [
        word.strip("`()[],") if word.startswith(("`", "(")) else word.rstrip("`")
        for word in itertools.chain.from_iterable(inner)
    ]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quotation that does not end
        return text.split()


def _value_of(flag: re.Match[str], words: list[str], at: int) -> tuple[object, int]:
    """The value of a flag, and where it ends: behind `=`, the next word that is no option, or True."""
    if flag[2] is not None:
        return flag[2].strip("\"'"), at
    if at + 1 < len(words) and not words[at + 1].startswith("--") and not _VARIABLE.fullmatch(words[at + 1]):
        following = words[at + 1]
        if (
            not (following.startswith("-") and not re.fullmatch(r"-\d+(?:\.\d+)?", following))
            and following not in _ENDS
        ):
            return following.rstrip(")"), at + 1
    return True, at


def _flag(name: str, value: object) -> Setting:
    section, dot, last = name.rstrip(".").rpartition(".")
    words = f"--{name}" if value is True else f"--{name} {value}"
    if last.startswith(("no-", "no_")):
        return Setting(names=(f"{section}{dot}{last[3:]}",), value="false", words=words, source="flag")
    return Setting(names=(f"{section}{dot}{last}",), value=value, words=words, source="flag")


def _variable(name: str, value: str, *, used: bool) -> list[Setting]:
    """An assignment, whose value may be a secret: only known ones are shown. One that is `used` says nothing itself."""
    if used and not is_known_variable(name):
        return []
    return [Setting(names=(f"${name}",), value=value, words=f"{name} {value.rpartition('/')[2]}", source="flag")]


def _resolved(value: str, variables: Mapping[str, str]) -> str:
    """A value with the variables that are assigned above; UNREAD where one is not."""
    for match in list(_NAMED.finditer(value))[:20]:
        found = variables.get(match[1] or match[3], match[2])
        if found is None:
            return UNREAD
        value = value.replace(match[0], found)
    product = re.fullmatch(r"\$\(\((\d{1,6})\*(\d{1,6})\)\)", value)
    return str(int(product[1]) * int(product[2])) if product else UNREAD if "$" in value else value
