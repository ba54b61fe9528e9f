"""What a report consists of, and how a terminal and Markdown show it. A page shows the same (`html/assets/parts.html`).

A report is a list of blocks: paragraphs, lists, facts, tables, entries, verbatim text, and sections, which are a title
over further blocks. Builders pass texts as they are: the renderers make them safe to show (`printable.py`), wrap what
is too long, and leave out sections, tables and facts without content. What a terminal or a log shows is bounded: a
result of 80 MB must not print 80 MB.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec.structs import replace

from harness.text import code_span, counted, in_html, in_markdown, own_markdown, printable

if TYPE_CHECKING:
    from rich.text import Text

_INDENT = _GAP = "  "
MOST = 4_000_000  # characters of a report, of which every line counts as at least this many:
_PER_LINE = 100
_LAST_COLUMN = 30  # a longer last cell is wrapped, into at least so many characters
# Of verdicts, and of the words of `parity`; the others are red.
_COLORS = {
    **dict.fromkeys(("passed", "equal", "rounding"), "green"),
    **dict.fromkeys(("known", "refused", "excluded"), "cyan"),
    "infra": "yellow",
}


class Items(msgspec.Struct, frozen=True):
    lines: tuple[str, ...]


class Facts(msgspec.Struct, frozen=True):
    pairs: tuple[tuple[str, str], ...]


class Verbatim(msgspec.Struct, frozen=True):
    """Text whose lines are never wrapped: a traceback, a command."""

    text: str
    language: str = ""  # of the code block in Markdown


class Table(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rows of texts. Column `verdict` colors its rows on a page, and its cells in a terminal."""

    rows: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...] = ()
    title: str = ""
    right: tuple[int, ...] = ()  # columns of numbers
    code: tuple[int, ...] = ()  # columns of ids, which are code in Markdown
    verdict: int | None = None
    folded: bool = False  # the reader of a page opens it


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Lines about one thing, and the command that shows more. A page has a link to `case`."""

    title: str = ""
    case: str = ""
    lines: tuple[str, ...] = ()
    command: str = ""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks under a title. A section with a `name` (letters only) is an item of a page's menu."""

    title: str = ""
    blocks: tuple[Block, ...] = ()
    name: str = ""
    folded: bool = False  # the reader of a page, or of Markdown on GitHub, opens it


_Shown: TypeAlias = Callable[[str], str]  # text as Markdown
Block: TypeAlias = "str | Items | Facts | Verbatim | Table | Entry | Section"


def _rich(plain: str = "") -> Text:
    from rich.text import Text  # where it is shown: a command starts without it

    return Text(plain)


def text_of(blocks: Iterable[Block], *, width: int | None = None, where: str = "") -> str:
    """Return the plain text of `terminal`."""
    return terminal(blocks, width=width, where=where).plain


def terminal(blocks: Iterable[Block], *, width: int | None = None, where: str = "") -> Text:
    """What a terminal of `width` columns shows; None wraps nothing, for logs. Blocks have a blank line between them.

    Ids, commands and verbatim text are never split: their lines alone may be longer. `where`: the options that write
    all of it. With them lines beyond a bound are left out, but not the last block, which has the totals.
    """
    room, left, blocks, parts = MOST, 0, list(blocks), []
    for at, block in enumerate(blocks, 1):
        lines, kept = list(_lines(block, "", width)), []
        for line in lines:
            room -= len(line) + _PER_LINE
            kept += [line] if room >= 0 or not where or at == len(blocks) else []
        left += len(lines) - len(kept)
        if left and at == len(blocks):
            parts.append(_rich(f"left out here: {counted(left, 'line')}; {where} has all."))
        parts += [_rich("\n").join(kept)] if kept else []
    return _rich("\n\n").join(parts).append("\n") if parts else _rich()


def _lines(block: Block, indent: str, width: int | None) -> Iterator[Text]:
    match block:
        case Section(title=title) | Table(title=title) if title:
            untitled = replace(block, title="")
            inside = list(_lines(untitled, indent + _INDENT, width))
            yield from map(_rich, wrapped(title, width, indent, indent + _INDENT) if inside else ())
            yield from inside
        case Section(blocks=blocks):
            for child in blocks:
                yield from _lines(child, indent, width)
        case Table():
            yield from _table_lines(block, indent, width)
        case _:
            yield from map(_rich, _plain_lines(block, indent, width))


def _plain_lines(block: str | Items | Facts | Verbatim | Entry, indent: str, width: int | None) -> Iterator[str]:
    within = indent + _INDENT
    match block:
        case str():
            yield from wrapped(block, width, indent)
        case Verbatim(text):
            yield from (indent + line for line in printable(text).splitlines())
        case Items(lines):
            for line in lines:
                yield from wrapped(line, width, indent, within)
        case Facts(pairs):
            size = max((len(name) for name, value in pairs if value), default=0)
            for name, value in pairs:
                yield from wrapped(value, width, f"{indent}{name:<{size}}{_GAP}", f"{indent}{'':<{size}}{_GAP}")
        case Entry():
            yield from wrapped(" ".join(filter(None, (block.case, block.title))), width, indent, within)
            yield from _plain_lines(Items(block.lines), within, width)
            if block.command:
                yield f"{within}$ {printable(block.command)}"


def wrapped(text: str, width: int | None, first: str = "", later: str | None = None) -> list[str]:
    """The lines of a text behind these indents, wrapped where they are too long. A line keeps an indent of its own."""
    lines, start, rest = [], first, first if later is None else later
    for line in printable(text).splitlines():
        words = line.lstrip()
        own = line[: len(line) - len(words)]
        if width is None or len(start + line) <= width:
            lines.append((start + line).rstrip())
        else:
            lines += textwrap.wrap(
                words,
                width,
                initial_indent=start + own,
                subsequent_indent=rest + own,
                break_long_words=False,
                break_on_hyphens=False,
            )
        start = rest if first.strip() else first
    return lines


def _table_lines(table: Table, indent: str, width: int | None) -> Iterator[Text]:
    """Yield a line for every row, its last cell wrapped, or below; a block for every row where columns do not fit."""
    rows = [tuple(printable(cell).replace("\n", " ") for cell in row) for row in table.rows]
    lines = [table.columns, *rows] if any(table.columns) and rows else rows
    *sizes, last = [max(map(len, column)) for column in zip(*lines, strict=True)] or [0]
    room = None if width is None else width - len(indent) - sum(size + len(_GAP) for size in sizes)
    if room is None or room >= min(last, _LAST_COLUMN):
        for row in lines:
            yield from _row_lines(table, row, indent, (*sizes, last), room)
    elif width is not None and len(sizes) > 1 and room + len(_GAP) >= 0:
        for at, row in enumerate(lines):
            yield from _row_lines(table, (*row[:-1], ""), indent, (*sizes, 0), None)
            yield from map(_rich, wrapped(row[-1], width, indent + 2 * _INDENT) if at or lines is rows else ())
    else:
        for row in rows:
            yield from _row_block(table, row, indent, width)


def _row_lines(table: Table, row: Sequence[str], indent: str, sizes: Sequence[int], room: int | None) -> Iterator[Text]:
    cells = [
        cell.rjust(size) if index in table.right else cell.ljust(size)
        for index, (cell, size) in enumerate(zip(row, sizes, strict=True))
    ]
    line = _rich(indent)
    for index, cell in enumerate(cells[:-1]):
        line.append(cell, _color(table, index, row[index])).append(_GAP)
    first, *more = wrapped(cells[-1].rstrip(), room) or [""]
    below = " " * len(line)
    line.append(first).rstrip()
    yield line
    yield from (_rich(below + continuation) for continuation in more)


def _row_block(table: Table, row: Sequence[str], indent: str, width: int | None) -> Iterator[Text]:
    """Yield the first cell, below it the others with the names of their columns, and the last one."""
    names = (table.columns or ("",) * len(row))[1:-1]
    others = [f"{name} {cell}".strip() for name, cell in zip(names, row[1:-1], strict=True) if cell not in ("", "-")]
    if row[0]:
        yield _rich(indent + row[0])
    for line in map(_rich, wrapped(", ".join(others), width, indent + _INDENT, indent + 2 * _INDENT)):
        if table.verdict is not None:
            line.highlight_words([row[table.verdict]], _color(table, table.verdict, row[table.verdict]))
        yield line
    yield from map(_rich, wrapped(row[-1], width, indent + _INDENT))


def _color(table: Table, index: int, cell: str) -> str:
    return _COLORS.get(cell, "red") if index == table.verdict and cell not in table.columns else ""


def markdown(blocks: Iterable[Block], *, level: int = 2, own: bool = False) -> str:
    """GitHub-flavoured Markdown: the titles are headings of this level, and those inside of them of the next.

    `own`: all text is the project's, from its code or records, and its links stay links.
    """
    shown = own_markdown if own else in_markdown
    return "\n\n".join(part for block in blocks for part in _parts(block, level, shown)) + "\n"


def _parts(block: Block, level: int, shown: _Shown) -> Iterator[str]:
    match block:
        case Section(title=title, folded=True) | Table(title=title, folded=True):
            body = "\n\n".join(_parts(replace(block, title="", folded=False), level, shown))
            yield f"<details><summary>{in_html(title)}</summary>\n\n{body}\n\n</details>"
        case Section(title=title, blocks=blocks):
            inside = [part for child in blocks for part in _parts(child, level + bool(title), shown)]
            yield from [f"{'#' * level} {_on_one_line(title, shown)}"] if title and inside else []
            yield from inside
        case Table(title=title, rows=rows):
            yield from [f"**{_on_one_line(title, shown)}**"] if title and rows else []
            yield from [_markdown_table(block, shown)] if rows else []
        case Verbatim(text, language):
            fence = "`" * max([2, *map(len, re.findall("`+", text))]) + "`"
            yield f"{fence}{language}\n{printable(text)}\n{fence}"
        case str():
            yield shown(block)
        case _:
            yield "\n".join(_bullets(block, shown))


def _bullets(block: Items | Facts | Entry, shown: _Shown) -> Iterator[str]:
    match block:
        case Items(lines):
            yield from (f"- {_on_one_line(line, shown)}" for line in lines)
        case Facts(pairs):
            for name, value in pairs:
                yield from [f"- {_on_one_line(name, shown)}: {_on_one_line(value, shown)}"] if value else []
        case Entry():
            case_id = f"{code_span(block.case)} " if block.case else ""
            yield f"- {case_id}{_on_one_line(block.title, shown)}".rstrip()
            yield from (f"  {line}" for line in _bullets(Items(block.lines), shown))
            yield from [f"  - {code_span(block.command)}"] if block.command else []


def _markdown_table(table: Table, shown: _Shown) -> str:
    columns = table.columns or ("",) * len(table.rows[0])
    rules = ["---:" if index in table.right else "---" for index in range(len(columns))]
    rows = (_row(row, shown, table.code) for row in table.rows)
    return "\n".join([_row(columns, shown), f"|{'|'.join(rules)}|", *rows])


def _row(cells: Sequence[str], shown: _Shown, code: Sequence[int] = ()) -> str:
    texts = (code_span(cell) if at in code and cell else _on_one_line(cell, shown) for at, cell in enumerate(cells))
    return f"| {' | '.join(map(_in_cell, texts))} |"


def _in_cell(text: str) -> str:
    """Return the text with its pipes escaped. A backslash before one would escape the backslash that does it."""
    return re.sub(r"\\(?=\|)", r"\\ ", text).replace("|", r"\|")


def _on_one_line(text: str, shown: _Shown) -> str:
    return " ".join(shown(text).split())
