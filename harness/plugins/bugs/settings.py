"""The settings of a report: every line of its configurations and commands, with the dotted name of each.

TOML, YAML and JSON are parsed by their libraries, Python as a syntax tree, commands as words of a shell. Nothing is
executed. In Python they are keywords of calls, assigned attributes, dicts, and the calls themselves. A call or a dict
that is assigned to a name, an attribute or a keyword is known by that: `compile=CompileConfig(…)` and
`config.compile = CompileConfig(…)` are both `compile`, and so is a name that is given later.
"""

import ast
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec
import yaml

from harness.plugins.bugs.report import YAML_LOADER, Block
from harness.plugins.bugs.spellings import is_known_call, is_known_variable, printed_lines, shown, tool_started_by

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
    """Yield the leaves of what TOML, YAML or JSON has parsed."""
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
    """Yield the settings of TOML, YAML or JSON; each line of a broken one, with the reason."""
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
    """Yield what lines of a log state that tools print word for word."""
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
    """Return the words of a command, without its prompt; [] for a line that sets no option and no variable."""
    if "--" not in line and "=" not in line:
        return []
    text = re.sub(r"^\s*(?:\$ |> |# (?=\S*--)|export )", "", line)
    if "--" not in text and not re.match(r"\s*[A-Za-z_]\w*=\S", text):
        return []
    words = _split(text)
    inner = (_split(word) if word.startswith("--") and " " in word and "=" not in word else [word] for word in words)
    flat = itertools.chain.from_iterable(inner)
    return [word.strip("`()[],") if word.startswith(("`", "(")) else word.rstrip("`") for word in flat]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quotation that does not end
        return text.split()


def _value_of(flag: re.Match[str], words: list[str], at: int) -> tuple[object, int]:
    """Return the value of a flag, and where it ends: behind `=`, the next word that is no option, or True."""
    if flag[2] is not None:
        return flag[2].strip("\"'"), at
    if at + 1 < len(words) and not words[at + 1].startswith("--") and not _VARIABLE.fullmatch(words[at + 1]):
        following = words[at + 1]
        is_value = not following.startswith("-") or re.fullmatch(r"-\d+(?:\.\d+)?", following)
        if is_value and following not in _ENDS:
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
    """Return a value with the variables that are assigned above; UNREAD where one is not."""
    for match in list(_NAMED.finditer(value))[:20]:
        found = variables.get(match[1] or match[3], match[2])
        if found is None:
            return UNREAD
        value = value.replace(match[0], found)
    product = re.fullmatch(r"\$\(\((\d{1,6})\*(\d{1,6})\)\)", value)
    return str(int(product[1]) * int(product[2])) if product else UNREAD if "$" in value else value


_LARGEST = 10**6  # features of a linear
_OBJECTS = frozenset({"args", "self", "cfg", "config", "job_config"})  # whose attributes only the program knows
_PARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class Code(NamedTuple):
    """What a syntax tree says: its settings, what it calls and names, and functions that make a configuration."""

    settings: tuple[Setting, ...]
    calls: tuple[str, ...]  # dotted, in their order
    names: tuple[str, ...]  # of attributes and imports
    configurations: tuple[str, ...]


def read_code(tree: ast.Module) -> Code:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    reader = _Reader(nodes)
    settings = tuple(setting for node in nodes[: 20 * MOST] for setting in reader.settings(node))
    calls = tuple(dotted(node.func) for node in nodes if isinstance(node, ast.Call))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    configurations = [node.name for node in functions if node.returns and dotted(node.returns) == "Trainer.Config"]
    return Code(settings[:MOST], calls, tuple(_names(nodes)), tuple(configurations))


def dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id] if isinstance(node, ast.Name) else parts))


class _Reader:
    """Resolves names that are assigned once, and knows by what a call or a dict is known."""

    def __init__(self, nodes: list[ast.expr | ast.stmt]) -> None:
        assigned: dict[str, list[ast.expr]] = {}
        for node in nodes:
            for name, value in _assigned(node):
                assigned.setdefault(name, []).append(value)
        self._values = {name: values[0] for name, values in assigned.items() if len(values) == 1}
        self._defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        targets = [node.targets[0] for node in nodes if isinstance(node, ast.Assign)]
        self._changed = {dotted(target).partition(".")[0] for target in targets if isinstance(target, ast.Attribute)}
        self._known_by: dict[ast.expr, str] = {}
        self._stacked = False  # the first linear was read
        for node in nodes:
            self._bind(node)

    def _bind(self, node: ast.expr | ast.stmt) -> None:
        """Note by what a call or a dict is known."""
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(word.arg or "", word.value) for word in node.keywords]
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            pairs = [(_path(node.targets[0]), node.value)]
        elif isinstance(node, ast.Dict):
            pairs = [(key.value, value) for key, value in zip(node.keys, node.values, strict=True) if _is_text(key)]  # type: ignore[union-attr]
        for name, value in pairs:
            self._known_by.setdefault(self._node(value), name) if name else None

    def settings(self, node: ast.expr | ast.stmt) -> Iterator[Setting]:
        if isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.Dict):
            yield from self._dict(node)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            path, root = _path(node.targets[0]), dotted(node.targets[0]).partition(".")[0]
            if path:
                yield from self._one((path,), node.value, counted=root != "self")
            elif root in self._changed and isinstance(node.value, ast.Call):  # a configuration that is changed below
                yield from self._one((root,), node.value, counted=True)
            elif isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant):
                yield from self._one((root,), node.value, counted=False)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield from self._one((node.target.id,), node.value, counted=False)

    def _call(self, node: ast.Call) -> Iterator[Setting]:
        name = dotted(node.func)
        words = " ".join(ast.unparse(node).split())[:200]
        last = name.rpartition(".")[2]
        if last == "init_device_mesh":
            yield from self._mesh(node, words)
            return
        if name and last not in self._defined:
            given: object = True if node.args else last
            if node.args and not _is_object(node.args[0], self._values):
                given = self.value(node.args[0])
            by = self._known_by.get(node)
            calls = (f"{name}()", *([f"{by}.{name}()"] if by else []))
            # A method of a class makes a configuration or a model, and a class is known by its keywords.
            yield Setting(names=calls, value=given, words=words, counted=last[:1].islower() and _says_itself(name))
        if last == "Linear" and not self._stacked:
            self._stacked = True
            yield from self._linear(node, words)
        counted = last[:1].isupper() or last == "dict"  # a class, as `TrainingArguments` and `SelectiveAC.Config`
        prefixes = dict.fromkeys(filter(None, (self._known_by.get(node, ""), _section(name))))
        for word in node.keywords:
            if word.arg is not None:
                keys = tuple(f"{prefix}.{word.arg}" for prefix in prefixes) or (word.arg,)
                yield from self._one(keys, word.value, counted=counted)

    def _linear(self, node: ast.Call, words: str) -> Iterator[Setting]:
        """Yield the features of the first linear, of which a bare stack consists."""
        sizes = [self.value(argument) for argument in node.args[:2]]
        if len(sizes) == 2 and all(isinstance(size, int) and 1 <= size <= _LARGEST for size in sizes):
            yield Setting(names=("linear.features",), value=f"{sizes[0]}x{sizes[1]}", words=words)

    def _dict(self, node: ast.Dict) -> Iterator[Setting]:
        prefix = self._known_by.get(node, "")
        for key, value in zip(node.keys, node.values, strict=True):
            if _is_text(key):
                name = key.value  # type: ignore[union-attr]
                yield from self._one((f"{prefix}.{name}" if prefix else name,), value, counted=False)

    def _one(self, names: tuple[str, ...], node: ast.expr, *, counted: bool) -> Iterator[Setting]:
        """Yield a setting, unless its value is a call or a dict, whose own settings are read by its name."""
        found = self._node(node)
        if isinstance(found, ast.Dict) or (isinstance(found, ast.Call) and _says_itself(dotted(found.func))):
            return
        value = self.value(node)
        if isinstance(found, ast.List | ast.Tuple) and any(isinstance(item, ast.Call) for item in found.elts):
            return
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        shown = " ".join(ast.unparse(found).split())[:120] if value == UNREAD else shown
        yield Setting(names=names, value=value, words=f"{names[0].rpartition('.')[2]}={shown}", counted=counted)

    def _mesh(self, node: ast.Call, words: str) -> Iterator[Setting]:
        """Yield the degrees of a device mesh by the names of its dims."""
        named = {word.arg: self.value(word.value) for word in node.keywords}
        shape = self.value(node.args[1]) if len(node.args) > 1 else named.get("mesh_shape")
        names = named.get("mesh_dim_names")
        if isinstance(shape, tuple) and isinstance(names, tuple) and len(shape) == len(names):
            for name, size in zip(names, shape, strict=True):
                yield Setting(names=(f"mesh.{name}",), value=size, words=words)
        else:
            yield Setting(names=("init_device_mesh()",), value=UNREAD, words=words)

    def _node(self, node: ast.expr) -> ast.expr:
        """Return what a name stands for, where it is assigned once."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id in self._values and node.id not in seen:
            seen.add(node.id)
            node = self._values[node.id]
        return node

    def value(self, node: ast.expr) -> object:
        """Return a literal, a product of literals, or a dotted name as it is written; UNREAD for anything else."""
        found = self._node(node)
        value: object = UNREAD
        match found:
            case ast.Constant():
                value = "" if found.value is None else found.value
            case ast.Attribute() if dotted(found).partition(".")[0] not in _OBJECTS:
                value = dotted(found)
            case ast.List() | ast.Tuple():
                value = tuple(self.value(element) for element in found.elts)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                value = -number
            case ast.BinOp(op=ast.Mult()):
                left, right = self.value(found.left), self.value(found.right)
                if isinstance(left, int) and isinstance(right, int) and abs(left * right) < 10**9:
                    value = left * right
        return value


def _assigned(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield names that a statement assigns, such as `dim = 1024` or `bs, seq = 32, 512`."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return
    target, value = node.targets[0], node.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=False))
    yield from ((name.id, assigned) for name, assigned in pairs if isinstance(name, ast.Name))


def _path(target: ast.expr) -> str:
    """By what an assigned attribute or item is known: `config.compile.enable` is `compile.enable`; "" for a name."""
    if isinstance(target, ast.Subscript) and _is_text(target.slice):
        return str(target.slice.value)  # type: ignore[attr-defined]
    return dotted(target).partition(".")[2] if isinstance(target, ast.Attribute) else ""


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _says_itself(name: str) -> bool:
    """True for a call that is read by its own name or keywords: of a class, of its method, or of a known function."""
    return any(part[:1].isupper() for part in name.split(".")) or name == "dict" or is_known_call(name)


def _is_object(node: ast.expr, values: Mapping[str, ast.expr]) -> bool:
    """Return True for an argument that is no literal and no member of an enumeration: a model, for instance."""
    if isinstance(node, ast.Name) and node.id in values:
        node = values[node.id]
    return not (isinstance(node, ast.Constant) or getattr(node, "attr", "").isupper())


def _section(name: str) -> str:
    """The section of a class: `compile` of CompileConfig, `float8_linear_converter` of Float8LinearConverter.Config."""
    parts = [part for part in name.split(".") if part != "Config"]
    plain = "_".join(_PARTS.split(parts[-1])).lower() if parts else ""
    return re.sub(r"_config$", "", plain)


def _names(nodes: list[ast.expr | ast.stmt]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (f"{getattr(node, 'module', None) or ''}.{alias.name}".strip(".") for alias in node.names)
