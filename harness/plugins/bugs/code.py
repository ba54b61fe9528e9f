"""The settings of Python code: keywords of calls, assigned attributes, dicts, and the calls themselves.

A call or a dict that is assigned to a name, an attribute or a keyword is known by that: `compile=CompileConfig(…)` and
`config.compile = CompileConfig(…)` are both `compile`, and so is a name that is given later. Nothing is executed.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from harness.plugins.bugs.settings import MOST, UNREAD, Setting
from harness.plugins.bugs.spellings import is_known_call

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
    nodes = sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)),
        key=lambda node: (node.lineno, node.col_offset),
    )
    reader = _Reader(nodes)
    settings = tuple(setting for node in nodes[: 20 * MOST] for setting in reader.settings(node))
    calls = tuple(dotted(node.func) for node in nodes if isinstance(node, ast.Call))
    return Code(settings[:MOST], calls, tuple(_names(nodes)), tuple(_configurations(tree)))


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
        counted = _is_config(name)
        prefixes = dict.fromkeys(filter(None, (self._known_by.get(node, ""), _section(name))))
        for word in node.keywords:
            if word.arg is not None:
                keys = tuple(f"{prefix}.{word.arg}" for prefix in prefixes) or (word.arg,)
                yield from self._one(keys, word.value, counted=counted)

    def _linear(self, node: ast.Call, words: str) -> Iterator[Setting]:
        """The features of the first linear, of which a bare stack consists."""
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
        """A setting, unless its value is a call or a dict, whose own settings are read by its name."""
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
        """The degrees of a device mesh by the names of its dims."""
        named = {word.arg: self.value(word.value) for word in node.keywords}
        shape = self.value(node.args[1]) if len(node.args) > 1 else named.get("mesh_shape")
        names = named.get("mesh_dim_names")
        if isinstance(shape, tuple) and isinstance(names, tuple) and len(shape) == len(names):
            for name, size in zip(names, shape, strict=True):
                yield Setting(names=(f"mesh.{name}",), value=size, words=words)
        else:
            yield Setting(names=("init_device_mesh()",), value=UNREAD, words=words)

    def _node(self, node: ast.expr) -> ast.expr:
        """What a name stands for, where it is assigned once."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id in self._values and node.id not in seen:
            seen.add(node.id)
            node = self._values[node.id]
        return node

    def value(self, node: ast.expr) -> object:
        """A literal, a product of literals, or a dotted name as it is written; UNREAD for anything else."""
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
                value = _product(self.value(found.left), self.value(found.right))
        return value


def _product(left: object, right: object) -> object:
    if isinstance(left, int) and isinstance(right, int) and abs(left * right) < 10**9:
        return left * right
    return UNREAD


def _assigned(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Names that a statement assigns, such as `dim = 1024` or `bs, seq = 32, 512`."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return
    target, value = node.targets[0], node.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=False))
    for name, assigned in pairs:
        if isinstance(name, ast.Name):
            yield name.id, assigned


def _path(target: ast.expr) -> str:
    """By what an assigned attribute or item is known: `config.compile.enable` is `compile.enable`; "" for a name."""
    if isinstance(target, ast.Subscript) and _is_text(target.slice):
        return str(target.slice.value)  # type: ignore[attr-defined]
    return dotted(target).partition(".")[2] if isinstance(target, ast.Attribute) else ""


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_config(name: str) -> bool:
    """True for a call of a class, as `TrainingArguments` and `SelectiveAC.Config`, and for a dict."""
    last = name.rpartition(".")[2]
    return last[:1].isupper() or last == "dict"


def _says_itself(name: str) -> bool:
    """True for a call that is read by its own name or keywords: of a class, of its method, or of a known function."""
    return any(part[:1].isupper() for part in name.split(".")) or name == "dict" or is_known_call(name)


def _is_object(node: ast.expr, values: Mapping[str, ast.expr]) -> bool:
    """True for an argument that is no literal and no member of an enumeration: a model, for instance."""
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


def _configurations(tree: ast.Module) -> Iterator[str]:
    """Functions that return a configuration of torchtitan."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.returns is not None and dotted(node.returns) == "Trainer.Config":
            yield node.name
