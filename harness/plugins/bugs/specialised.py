"""A Python file whose switches are set: what they decide against is gone, and the rest stays as it was written."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

_COMPARED: Mapping[type[ast.cmpop], Callable[..., bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_CONSTANT = re.compile(r"^([A-Z0-9_]+(?:, [A-Z0-9_]+)*) = .+?(?=  #|$)", flags=re.MULTILINE)  # without its comment
_NOTHING = "contextlib.nullcontext()"


class _Unknown(Exception):
    """The value of an expression is known when the file runs, not before."""


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


def with_values(source: str, values: Mapping[str, object]) -> str:
    """The source with these values of its constants, whose names are written as there."""
    shown = {name: _literal(value).strip("()" * ("," in name)) for name, value in values.items()}
    return _CONSTANT.sub(lambda line: f"{line[1]} = {shown[line[1]]}" if line[1] in shown else line[0], source)


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')


def specialised(source: str, switches: Mapping[str, object], sizes: Mapping[str, object]) -> str:
    """The source without the constants of `switches`. `sizes` stay, and decide alike. It must be ASCII."""
    return _Specialiser(source, switches, sizes).module()


class _Specialiser:
    def __init__(self, source: str, switches: Mapping[str, object], sizes: Mapping[str, object]) -> None:
        assert source.isascii(), "offsets of ast are those of bytes"
        self._source, self._switches, self._sizes = source, switches, sizes
        self._names = re.compile(rf"\b(?:{'|'.join({**switches, **sizes})})\b")
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def module(self) -> str:
        body = ast.parse(self._source).body
        return self._spliced(0, len(self._source), self._of_block(body, after=0))

    # Text

    def _line(self, number: int) -> int:
        return self._starts[number - 1]

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None, "it was parsed"
        return self._line(node.lineno) + node.col_offset, self._line(node.end_lineno) + node.end_col_offset

    def _spliced(self, start: int, end: int, edits: Iterator[_Edit]) -> str:
        parts, at = [], start
        for edit in sorted(edits):
            parts += [self._source[at : edit.start], edit.text]
            at = edit.end
        return "".join([*parts, self._source[at:end]])

    def _text(self, node: ast.expr) -> str:
        return self._spliced(*self._span(node), self._edits(node))

    def _dedented(self, block: Sequence[ast.stmt], after: int) -> str:
        """The lines of a block that takes the place of the statement around it."""
        last = block[-1].end_lineno or 0
        text = self._spliced(self._line(after + 1), self._line(last + 1), self._of_block(block, after))
        return "".join(line.removeprefix("    ") for line in text.splitlines(keepends=True))

    # Statements

    def _of_block(self, block: Sequence[ast.stmt], after: int) -> Iterator[_Edit]:
        """Edits of statements that follow the line `after`. Comments in front of one that goes go too."""
        for previous, stmt in pairwise([None, *block]):
            assert stmt is not None and stmt.end_lineno is not None, "only the first of a pair is None"
            first = after if previous is None else previous.end_lineno or after
            whole = self._line(stmt.lineno), self._line(stmt.end_lineno + 1)
            if isinstance(stmt, ast.If) and (truth := self._truth(stmt.test)) is not None:
                yield self._of_if(stmt, truth, first)
            elif isinstance(stmt, ast.With) and self._text(stmt.items[0].context_expr) == _NOTHING:
                yield _Edit(*whole, self._dedented(stmt.body, stmt.items[0].context_expr.end_lineno or 0))
            elif isinstance(stmt, ast.Assign) and getattr(stmt.targets[0], "id", "") in self._switches:
                yield _Edit(self._line(first + 1), whole[1], "")
            else:
                yield from self._edits(stmt)

    def _of_if(self, stmt: ast.If, truth: bool | None, after: int) -> _Edit:
        """What is left of an `if` or `elif` that is decided."""
        start, end, inside = self._line(stmt.lineno), self._line((stmt.end_lineno or 0) + 1), self._is_elif(stmt)
        while truth is False and stmt.orelse and self._is_elif(stmt.orelse[0]):
            assert isinstance(stmt.orelse[0], ast.If), "an elif is an if"
            stmt = stmt.orelse[0]
            truth = self._truth(stmt.test)
        if truth is None:
            text = self._spliced(self._line(stmt.lineno), end, self._edits(stmt))
            return _Edit(start, end, text if inside else text.replace("elif", "if", 1))
        kept = stmt.body if truth else stmt.orelse
        if not kept:
            return _Edit(self._line(after + 1), end, "")
        ahead = (stmt.test.end_lineno or 0) if truth else kept[0].lineno - 1
        if inside:
            text = self._spliced(self._line(ahead + 1), end, self._of_block(kept, ahead))
            return _Edit(start, end, f"{' ' * stmt.col_offset}else:\n{text}")
        return _Edit(start, end, self._dedented(kept, ahead))

    def _is_elif(self, stmt: ast.stmt) -> bool:
        return self._source.startswith("elif", self._line(stmt.lineno) + stmt.col_offset)

    def _edits(self, node: ast.AST) -> Iterator[_Edit]:
        """Edits of what is inside of a node, or of all of it."""
        if isinstance(node, ast.stmt | ast.expr) and not self._names.search(self._source, *self._span(node)):
            return
        if isinstance(node, ast.expr) and (text := self._folded(node)) is not None:
            yield _Edit(*self._span(node), text)
            return
        if isinstance(node, ast.JoinedStr):  # Python 3.11 does not say where its parts are
            return
        for _, field in ast.iter_fields(node):
            nodes = field if isinstance(field, list) else [field]
            block = [stmt for stmt in nodes if isinstance(stmt, ast.stmt)]
            if block:
                yield from self._of_block(block, block[0].lineno - 1)
            for child in nodes if not block else ():
                yield from self._edits(child) if isinstance(child, ast.AST) else ()

    # Expressions

    def _folded(self, node: ast.expr) -> str | None:  # noqa: PLR0911  one case per form
        """What an expression becomes; None where it stays, but for what is inside of it."""
        match node:
            case ast.IfExp() if (truth := self._truth(node.test)) is not None:
                return self._text(node.body if truth else node.orelse)
            case ast.BoolOp():
                return self._of_operands(node)
            case ast.Subscript(value=ast.Dict() as table, slice=key):
                return self._chosen(table, key, None)
            case ast.Call(func=ast.Attribute(value=ast.Dict() as table, attr="get"), args=[key, default]):
                return self._chosen(table, key, default)
            case ast.Call(func=ast.Name(id="getattr"), args=[of, name]):
                return f"{self._text(of)}.{self._value(name)}"
        names = {
            used_name.id
            for used_name in ast.walk(node)
            if isinstance(used_name, ast.Name) and isinstance(used_name.ctx, ast.Load)
        }
        if names.isdisjoint(self._switches):
            return None
        try:
            return _literal(self._value(node))
        except _Unknown:
            return None

    def _of_operands(self, node: ast.BoolOp) -> str | None:
        truth = self._truth(node)
        if truth is not None:
            return str(truth)
        unknown = [operand for operand in node.values if self._truth(operand) is None]
        word = " and " if isinstance(node.op, ast.And) else " or "
        return None if len(unknown) == len(node.values) else word.join(map(self._text, unknown))

    def _chosen(self, table: ast.Dict, key: ast.expr, default: ast.expr | None) -> str | None:
        try:
            wanted = self._value(key)
        except _Unknown:
            return None
        values = dict(zip((self._value(table_key) for table_key in table.keys if table_key), table.values, strict=True))
        value = values.get(wanted, default)
        return None if value is None else self._text(value)

    def _truth(self, node: ast.expr) -> bool | None:
        """Whether a condition holds; None where that is unknown. One operand may decide for all."""
        if isinstance(node, ast.BoolOp):
            truths = [self._truth(operand) for operand in node.values]
            decides = isinstance(node.op, ast.Or)
            return decides if decides in truths else None if None in truths else not decides
        try:
            return bool(self._value(node))
        except _Unknown:
            return None

    def _value(self, node: ast.expr) -> object:  # noqa: PLR0911  one case per form
        """The value of an expression of switches and sizes. Raises _Unknown."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self._switches:
                return self._switches[name]
            case ast.Name(id=name) if name in self._sizes:
                return self._sizes[name]
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand)
            case ast.Compare(left=left, ops=[compared], comparators=[right]) if type(compared) in _COMPARED:
                return _COMPARED[type(compared)](self._value(left), self._value(right))
            case ast.Call(func=ast.Name(id="tuple"), args=[ast.Name() as name]):
                return tuple(self._mapping(name))
            case ast.Call(func=ast.Name(id="tuple"), args=[ast.Call(func=ast.Attribute(value=name, attr="values"))]):
                return tuple(self._mapping(name).values())
            case ast.Call(func=ast.Name(id="prod"), args=[ast.Call(func=ast.Attribute(value=name, attr="values"))]):
                return math.prod(self._mapping(name).values())
        raise _Unknown

    def _mapping(self, node: ast.expr) -> Mapping[str, int]:
        value = self._value(node)
        if not isinstance(value, Mapping):
            raise _Unknown
        return value
