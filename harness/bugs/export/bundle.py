"""Bundles a function and everything that it needs into one file, as text, with the flags of a case folded.

Sources are parsed, never imported. Definitions keep their text, so what people wrote is what people read.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.errors import HarnessError

PACKAGE = "harness"
_LENGTH = 120  # of a line
_WIDTH = 110  # of a list of imports


class NotBundled(HarnessError):
    """A definition needs a module that must not be bundled."""


def bundle(module: str, name: str, given: Mapping[str, object], *, limits: tuple[str, ...] = ()) -> str:
    """Imports, constants and definitions that function `name` of `module` needs, itself last.

    `given` has the values of the names of the module `…given`: flags (bool) decide, the others become constants.
    Raises `NotBundled` where it needs a module whose dotted name starts with one of `limits`.
    """
    found = _Bundle(given, limits)
    found.add(module, name)
    return found.text()


def fold_flags(source: str, flags: Mapping[str, bool]) -> str:
    """The source with constant-folded `if FLAG:`, `a if FLAG else b`, `not FLAG` and `FLAG or a`."""
    while flags and (choices := sorted(_choices(ast.parse(source), flags), key=_place)):
        text = source.encode()  # columns of a syntax tree count bytes
        starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
        for node, kept in reversed(choices):  # from the end, so that the places of the others stay
            with_kept = _with_value if isinstance(kept, ast.expr) else _with_body
            text = with_kept(text, starts, node, kept)
        source = text.decode()
    return source


_Kept = ast.expr | list[ast.stmt]
_Choice = tuple[ast.expr | ast.stmt, _Kept]


def _place(choice: _Choice) -> tuple[int, int]:
    return choice[0].lineno, choice[0].col_offset


def _choices(node: ast.AST, flags: Mapping[str, bool]) -> Iterator[_Choice]:
    """The outermost nodes that a flag decides, each with the part that stays."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.If(test=ast.Name(id=name)) if name in flags:
                yield child, child.body if flags[name] else child.orelse
            case ast.If(test=ast.BoolOp(op=ast.Or(), values=[ast.Name(id=name), _])) if flags.get(name):
                yield child, child.body
            case ast.IfExp(test=ast.Name(id=name)) if name in flags:
                yield child, child.body if flags[name] else child.orelse
            case ast.BoolOp(op=ast.Or(), values=[ast.Name(id=name), other]) if name in flags:
                yield child, other
            case _:
                yield from _choices(child, flags)


def _with_body(text: bytes, starts: Sequence[int], choice: ast.AST, kept: _Kept) -> bytes:
    """The text with these statements in place of an `if`. `starts`: of its lines."""
    assert isinstance(choice, ast.If) and isinstance(kept, list) and choice.end_lineno is not None
    body = ""
    if kept:
        assert kept[-1].end_lineno is not None
        lines = text[starts[kept[0].lineno - 1] : starts[kept[-1].end_lineno]].decode()
        body = textwrap.indent(textwrap.dedent(lines), " " * choice.col_offset)
    return text[: starts[choice.lineno - 1]] + body.encode() + text[starts[choice.end_lineno] :]


def _with_value(text: bytes, starts: Sequence[int], choice: ast.AST, kept: _Kept) -> bytes:
    """The text with this expression in place of a choice and its parentheses. `starts`: of its lines."""
    assert isinstance(choice, ast.expr) and isinstance(kept, ast.expr)
    (begin, end), value = _span(starts, choice), slice(*_span(starts, kept))
    if text[begin - 2 : begin] == b" (" and text[end : end + 1] == b")":
        begin, end = begin - 1, end + 1
    return text[:begin] + text[value] + text[end:]


def _span(starts: Sequence[int], node: ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


class _Source:
    """The top level of one module: text and place of what it defines, and where it imports from."""

    def __init__(self, module: str, flags: Mapping[str, bool]) -> None:
        self.text = fold_flags(_text(module), flags)
        self._lines = self.text.splitlines()
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str | None, str]] = {}
        for node in ast.parse(self.text).body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    self.imports[bound] = (alias.name, None, alias.asname or "")
            elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (node.module or "", alias.name, alias.asname or "")
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.definitions |= {each.id: node for each in targets if isinstance(each, ast.Name)}

    def of(self, node: ast.stmt) -> str:
        """The text of a definition, with its decorators."""
        decorators = [each.lineno for each in getattr(node, "decorator_list", ())]
        return "\n".join(self._lines[min([node.lineno, *decorators]) - 1 : node.end_lineno])


@functools.cache
def _text(module: str) -> str:
    return source_of(module).read_text()


@functools.cache
def _read(module: str, flags: tuple[tuple[str, bool], ...]) -> _Source:
    return _Source(module, dict(flags))


def source_of(module: str) -> Path:
    """The file of a module of this package, which is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]).joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


class _Bundle:
    """The imports, constants and definitions collected so far."""

    def __init__(self, given: Mapping[str, object], limits: tuple[str, ...]) -> None:
        self._constants = {name: value for name, value in given.items() if not isinstance(value, bool)}
        self._flags = {name: value for name, value in given.items() if isinstance(value, bool)}
        self._limits = limits
        self._plain: set[tuple[str, str]] = set()
        self._from: dict[str, set[str]] = {}
        self._used: set[str] = set()
        self._texts: dict[tuple[str, str], str] = {}

    def add(self, module: str, name: str) -> None:
        """Add a definition, after what it needs."""
        source = self._source(module)
        node = source.definitions.get(name)
        if node is None:
            raise NotBundled(f"it needs {module}.{name}, which is a part of the harness.")
        key = (module, source.of(node))
        if key in self._texts:
            return
        self._texts[key] = ""  # it may need itself
        self._require_no_import_inside(node)
        bound = _bound(node)
        for used in _names(node):
            if used in self._flags:
                continue
            if used in source.definitions:
                self.add(module, used)
            elif used in source.imports:
                self._import(*source.imports[used], used)
            else:
                assert hasattr(builtins, used) or used in bound, f"{module}: {name} uses {used}"
        del self._texts[key]
        self._texts[key] = _without_aliases(source.of(node))  # behind what it needs

    def _require_no_import_inside(self, node: ast.stmt) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.ImportFrom) and (each.module or "").startswith(f"{PACKAGE}."):
                raise NotBundled(f"it needs {each.module}, which is a part of the harness.")

    def _source(self, module: str) -> _Source:
        if any(module == limit or module.startswith(f"{limit}.") for limit in self._limits):
            raise NotBundled(f"it needs {module}, which is a part of the harness.")
        text = _text(module)
        return _read(module, tuple(each for each in self._flags.items() if each[0] in text))

    def _import(self, module: str, name: str | None, alias: str, bound: str) -> None:
        if module.partition(".")[0] == PACKAGE:
            assert name is not None, f"{module} is imported whole"
            if bound in self._constants:
                self._used.add(bound)
            else:
                self.add(module, name)
        elif name is None:
            self._plain.add((module, alias))
        else:
            self._from.setdefault(module, set()).add(f"{name} as {alias}" if alias else name)

    def text(self) -> str:
        """The file, without a docstring. Constants that are read once are written where they are read."""
        body = "\n".join(self._blocks())
        kept = {}
        for name, value in self._constants.items():
            if name not in self._used:
                continue
            read = re.compile(rf"\b{name}\b")
            if len(read.findall(body)) == 1:
                body = read.sub(_literal(value).replace("\\", r"\\"), body)
            else:
                kept[name] = value
        if "torch." in body:
            self._plain.add(("torch", ""))
        constants = _constant_lines(kept)
        return "\n".join([*_import_lines(self._plain, self._from), *([""] if constants else []), *constants, body, ""])

    def _blocks(self) -> Iterator[str]:
        """Definitions: two empty lines around those of several lines."""
        before = False
        for text in self._texts.values():
            several = "\n" in text
            yield ("\n\n" if several or before else "") + text.replace("  # noqa: E731", "")
            before = several


class _Code(str):
    """A constant that is an expression."""

    __slots__ = ()


def code(text: str) -> str:
    """A constant whose value is this expression of torch."""
    return _Code(text)


def _constant_lines(constants: Mapping[str, object]) -> list[str]:
    """Integers side by side in one line, every other constant in one of its own."""
    integers = {name: value for name, value in constants.items() if isinstance(value, int)}
    others = [f"{name} = {_literal(value)}" for name, value in constants.items() if name not in integers]
    line = f"{', '.join(integers)} = {', '.join(map(str, integers.values()))}"
    return [*([line] if integers else []), *others]


def _literal(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, _Code):
        return value
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _without_aliases(text: str) -> str:
    """A definition without `a = b` aliases, which folded flags leave behind."""
    for line, name, value in re.findall(r"^( +(\w+) = ([A-Z]\w*[a-z]\w*)\n)", text, flags=re.MULTILINE):
        if len(re.findall(rf"^ +{name} = ", text, flags=re.MULTILINE)) == 1:
            shorter = re.sub(rf"\b{name}\b", value, text.replace(line, ""))
            text = shorter if all(len(each) <= _LENGTH for each in shorter.splitlines()) else text
    return text


def _names(node: ast.AST) -> list[str]:
    """Names that are read, in order, each once."""
    loads = [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)]
    return list(dict.fromkeys(loads))


def _bound(node: ast.AST) -> set[str]:
    """Names that a definition binds itself: parameters, variables, functions and errors inside."""
    bound: set[str | None] = set()
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name) | ast.ExceptHandler(name=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                bound |= {alias.asname or alias.name for alias in aliases}
    return {name for name in bound if name is not None}


def _import_lines(plain: set[tuple[str, str]], names: Mapping[str, set[str]]) -> list[str]:
    """Standard library first, then the others, each group sorted; long ones in parentheses."""
    lines: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for module, alias in plain:
        lines[_others(module)].append((f"0{module}", f"import {module} as {alias}" if alias else f"import {module}"))
    for module, found in names.items():
        line = f"from {module} import {', '.join(sorted(found))}"
        if len(line) > _WIDTH:
            wrapped = textwrap.fill(", ".join(sorted(found)), _WIDTH, initial_indent="    ", subsequent_indent="    ")
            line = f"from {module} import (\n{wrapped},\n)"
        lines[_others(module)].append((f"1{module}", line))
    first, second = ([text for _, text in sorted(lines[others])] for others in (False, True))
    return [*first, *([""] if first else []), *second]


def _others(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "torchao", "numpy", "torchtitan")
