"""Finds what a source file uses of the private parts of torch and torchao, without importing either.

A part is private where a name on the way to it begins with an underscore. What a file patches counts too, under any
name. An attribute of an object whose class the source does not tell is known by its last name only.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

LIBRARIES = ("torch", "torchao")
# Functions whose first two arguments are an owner and the name of what they put something in the place of.
PATCHING = {"setattr", "delattr", "wrap", "wrap_everywhere", "replace"}
READING = {"getattr", "hasattr", "vars"}
OF_STDLIB = {"_asdict", "_replace", "_make", "_fields"}  # of named tuples
Bindings = dict[str, tuple[str, ...]]  # what a name in the source stands for; "" for what is not known


class Use(NamedTuple):
    """One use of a private part: its dotted name from torch or torchao on, or only its last name with a dot before."""

    name: str
    line: int
    patched: bool = False

    @property
    def is_whole(self) -> bool:
        """False where the source does not tell of what class the owner is."""
        return not self.name.startswith(".")


def is_private(name: str) -> bool:
    """True for a name with an underscore in front that is not one of Python's own."""
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def private_uses(tree: ast.Module, inherited: frozenset[str] = frozenset()) -> frozenset[Use]:
    """Every use in a file. A module that is imported counts where nothing of it is used by name.

    `inherited`: attributes that classes of other files give to `self`.
    """
    uses = frozenset(_Scan(tree, inherited).uses)
    names = {use.name for use in uses}
    return frozenset(use for use in uses if not any(name.startswith(f"{use.name}.") for name in names))


class _Scan:
    def __init__(self, tree: ast.Module, inherited: frozenset[str]) -> None:
        self.uses: set[Use] = set()
        self._inherited = inherited
        self._own = set(_defined(tree))
        self._constants = dict(_constants(tree))
        self._bind_and_visit(tree.body, {})

    def _bind_and_visit(self, body: list[ast.stmt], outer: Bindings, hidden: frozenset[str] = frozenset()) -> None:
        """One scope: first what its names stand for, then what is done with them, then the scopes inside."""
        bindings = {name: value for name, value in outer.items() if name not in hidden}
        nodes = [node for statement in body for node in _of_scope(statement)]
        for node in nodes:
            self._bind(node, bindings)
        for node in nodes:
            self._visit(node, bindings)
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._bind_and_visit(node.body, bindings, _parameters(node))
            elif isinstance(node, ast.ClassDef):
                self._bind_and_visit(node.body, bindings)
            elif isinstance(node, ast.Lambda):
                self._bind_and_visit([ast.Expr(node.body)], bindings, _parameters(node))

    def _bind(self, node: ast.AST, bindings: Bindings) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._import(alias.name, node.lineno)
                bindings[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0],
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                self._import(f"{node.module}.{alias.name}", node.lineno)
                bindings[alias.asname or alias.name] = (f"{node.module}.{alias.name}",)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, node.value, bindings)
        elif isinstance(node, ast.For):
            self._assign(node.target, node.iter, bindings, iterated=True)

    def _assign(self, target: ast.expr, value: ast.expr, bindings: Bindings, *, iterated: bool = False) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, given in zip(target.elts, value.elts, strict=True):
                self._assign(one, given, bindings)
        elif isinstance(target, ast.Name) and (iterated or target.id not in bindings):
            names = self._resolve(value, bindings)
            if names or target.id in bindings:
                bindings[target.id] = names

    def _import(self, name: str, line: int) -> None:
        if _belongs(name) and any(map(is_private, name.split("."))):
            self.uses.add(Use(name, line))

    def _resolve(self, node: ast.expr, bindings: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """The dotted names that an expression may stand for; none where the source does not tell."""
        if isinstance(node, ast.Name):
            return bindings.get(node.id, ())
        if isinstance(node, ast.Attribute):
            return tuple(f"{owner}.{node.attr}" for owner in self._resolve(node.value, bindings))
        if isinstance(node, ast.Tuple):
            return tuple(name for element in node.elts for name in self._resolve(element, bindings))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READING:
            return self._named(node, bindings)
        return ()

    def _named(self, call: ast.Call, bindings: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Owner and constant name, as the first arguments of `getattr`."""
        if len(call.args) < 2:
            return ()
        name = self._constant(call.args[1])
        return tuple(f"{owner}.{name}" for owner in self._resolve(call.args[0], bindings)) if name else ()

    def _constant(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        return self._constants.get(node.id, "") if isinstance(node, ast.Name) else ""

    def _visit(self, node: ast.AST, bindings: Bindings) -> None:
        if isinstance(node, ast.Attribute):
            self._visit_attribute(node, bindings)
        elif isinstance(node, ast.Name):
            self._note(bindings.get(node.id, ()), node.lineno)
        elif isinstance(node, ast.Call):
            self._visit_call(node, bindings)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._visit_string(node.value, node.lineno)

    def _visit_attribute(self, node: ast.Attribute, bindings: Bindings) -> None:
        names = self._resolve(node, bindings)
        self._note(names, node.lineno, patched=isinstance(node.ctx, ast.Store))
        own = self._own | (self._inherited if getattr(node.value, "id", "") == "self" else OF_STDLIB)
        if not names and is_private(node.attr) and node.attr not in own:
            self.uses.add(Use(f".{node.attr}", node.lineno))

    def _visit_call(self, node: ast.Call, bindings: Bindings) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments = node.args
        if called == "callback" and arguments and getattr(arguments[0], "id", "") == "setattr":
            called, arguments = "setattr", arguments[1:]
        if called in PATCHING | READING and len(arguments) >= 2:
            given = ast.Call(node.func, arguments, [])
            self._note(self._named(given, bindings), node.lineno, patched=called in PATCHING)

    def _visit_string(self, text: str, line: int) -> None:
        for name in text.split(".") if text.isascii() and " " not in text else ():
            if name.isidentifier() and is_private(name) and name not in self._own:
                self.uses.add(Use(f".{name}", line))

    def _note(self, names: tuple[str, ...], line: int, *, patched: bool = False) -> None:
        for name in names:
            if _belongs(name) and (patched or any(map(is_private, name.split(".")))):
                self.uses.add(Use(_without_overload(name), line, patched))


def _without_overload(name: str) -> str:
    """An operator, without the words for one of its overloads."""
    return ".".join(name.split(".")[:4]) if name.startswith("torch.ops.") else name


def _belongs(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


def _of_scope(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is inside of it, up to where the next scope begins, whose own parts are evaluated outside."""
    pending = [node]
    while pending:
        current = pending.pop()
        yield current
        children = _children(current, without="body" if type(current) in _SCOPES else "")
        pending += reversed([child for child in children if not _is_docstring(child)])


_SCOPES = {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda}
_WITHOUT_NODES = {"ctx", "op", "ops", "id", "attr", "arg", "asname", "module", "level", "kind", "type_comment"}


@functools.cache  # one tree is read for several reasons
def everything(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node, several times as fast as by `ast.walk`. Contexts and operators, which no name is in, are left out."""
    nodes = [tree]
    for node in nodes:  # it grows
        nodes += _children(node)
    return tuple(nodes)


def _children(node: ast.AST, *, without: str = "") -> list[ast.AST]:
    children = []
    for name in node._fields:
        if name in _WITHOUT_NODES or name == without:
            continue
        value = getattr(node, name)
        if type(value) is list:
            children += [child for child in value if isinstance(child, ast.AST)]
        elif isinstance(value, ast.AST):
            children.append(value)
    return children


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> frozenset[str]:
    given = node.args
    names = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return frozenset(parameter.arg for parameter in names)


def attributes_of_self(tree: ast.Module) -> Iterator[str]:
    """The attributes that the classes of a file give to their objects."""
    for node in everything(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            yield node.attr


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Every name, attribute and word of a string in a file."""
    for node in everything(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.split(".")


def _defined(tree: ast.Module) -> Iterator[str]:
    """The private names that the file gives to things of its own: functions, classes, variables, attributes, slots."""
    for node in everything(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if getattr(node.value, "id", "") in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__slots__" for target in node.targets):
            yield from (element.value for element in ast.walk(node.value) if isinstance(element, ast.Constant))


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ((target.id, node.value.value) for target in node.targets if isinstance(target, ast.Name))
