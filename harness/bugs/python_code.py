"""What Python code in a report calls, read from its syntax tree. The code is never executed."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping

import msgspec

_MAX_CODE = 200_000  # characters of one piece that are parsed
_PROMPT = re.compile(r"^(?:>>> |\.\.\. |In \[\d+\]: )", re.MULTILINE)
_INLINE = re.compile(
    r"\b(?:[\w.]*\.)?(?:Float8LinearConfig|from_recipe_name|convert_to_float8_training)\([^()\n]{0,300}\)"
)


class PythonCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call. Arguments are literals, or names as they are written; None for anything else. `words` is the source."""

    name: str
    arguments: tuple[object, ...]
    keywords: Mapping[str, object]  # with the path of keywords that leads to the call: "compile.enable"
    words: str


def python_calls(text: str) -> tuple[PythonCall, ...]:
    """Every call of a piece of code, in the order of the text; () for what is no Python."""
    tree = _tree(text)
    if tree is None:
        return ()
    names = dict(_assignments(tree))
    paths = {child: path for node in ast.walk(tree) if isinstance(node, ast.Call) for child, path in _nested(node)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    return tuple(_call(node, text, names, paths) for node in calls)


def inline_calls(text: str) -> tuple[PythonCall, ...]:
    """The calls of torchao's float8 API that stand in prose."""
    return tuple(call for found in _INLINE.findall(text)[:100] for call in python_calls(found))


def attributes(text: str) -> frozenset[str]:
    """Dotted names that the code reads, such as `ScalingType.DELAYED`."""
    tree = _tree(text)
    nodes = () if tree is None else ast.walk(tree)
    return frozenset(_dotted(node) for node in nodes if isinstance(node, ast.Attribute))


def _tree(text: str) -> ast.Module | None:
    code = _PROMPT.sub("", text[:_MAX_CODE])
    lines = code.split("\n")
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    for each in dict.fromkeys((code, "\n".join(line[indent:] for line in lines))):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return ast.parse(each)
    return None


def _assignments(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Names that are given one literal, such as `dim = 1024` or `bs, seq = 32, 512`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            yield target.id, value.value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for name, each in zip(target.elts, value.elts, strict=True):
                if isinstance(name, ast.Name) and isinstance(each, ast.Constant):
                    yield name.id, each.value


def _nested(node: ast.Call) -> Iterator[tuple[ast.Call, str]]:
    """The calls that are values of keywords of a call, with the keyword."""
    for keyword in node.keywords:
        if isinstance(keyword.value, ast.Call) and keyword.arg is not None:
            yield keyword.value, keyword.arg


def _call(node: ast.Call, text: str, names: Mapping[str, object], paths: Mapping[ast.Call, str]) -> PythonCall:
    prefix = f"{paths[node]}." if node in paths else ""
    return PythonCall(
        name=_dotted(node.func),
        arguments=tuple(_value(argument, names) for argument in node.args),
        keywords={f"{prefix}{word.arg}": _value(word.value, names) for word in node.keywords if word.arg},
        words=_source(text, node),
    )


def _source(text: str, node: ast.Call) -> str:
    """The name of the call and its first words: enough to find it."""
    lines = text.split("\n")[node.lineno - 1 : (node.end_lineno or node.lineno)]
    joined = " ".join(line.strip() for line in lines)
    start = joined.find(_dotted(node.func).rpartition(".")[2])
    return joined[max(start, 0) :][:120].rstrip(", ")


def _value(node: ast.expr, names: Mapping[str, object]) -> object:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return _dotted(node)
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_value(each, names) for each in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _value(node.left, names), _value(node.right, names)
        return left * right if isinstance(left, int) and isinstance(right, int) and left * right < 10**9 else None
    return None


def _dotted(node: ast.expr) -> str:
    """The dotted name of an expression; "" for what has none."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ".".join(reversed(parts))
    return ".".join((node.id, *reversed(parts)))
