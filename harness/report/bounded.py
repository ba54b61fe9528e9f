"""Bounds what a terminal or a log shows: a result of 80 MB must not print 80 MB."""

from collections.abc import Sequence

from msgspec.structs import replace

from harness.report.sections import Block, Entry, Facts, Items, Section, Table, Verbatim
from harness.text import counted

LONGEST = 20_000  # characters of one text
MOST = 4_000_000  # characters of a report, of which every line counts as at least this many:
_PER_LINE = 100


def bounded(blocks: Sequence[Block], *, where: str) -> list[Block]:
    """The blocks, with what is beyond these bounds left out. The last block, which has the totals, stays.

    `where`: the options that write all of it, for the line that says how much is left out.
    """
    bound, end = _Bound(), _Bound()
    first, last = [bound.block(block) for block in blocks[:-1]], [end.block(block) for block in blocks[-1:]]
    left = bound.left + end.left
    return [*first, *([f"left out here: {counted(left, 'line')}; {where} has all."] if left else []), *last]


class _Bound:
    """What is left of the room, and how many lines had none."""

    def __init__(self) -> None:
        self._room = MOST
        self.left = 0

    def block(self, block: Block) -> Block:
        """As much of the block as there is room for."""
        shown: Block
        match block:
            case str():
                shown = self._text(block) or ""
            case Verbatim(text):
                shown = replace(block, text=self._text(text) or "")
            case Items(lines):
                shown = Items(self._texts(lines))
            case Facts(pairs):
                shown = Facts(tuple((name, part) for name, value in pairs if (part := self._text(value)) is not None))
            case Table(rows=rows):
                shown = replace(block, rows=tuple(filter(None, map(self._row, rows))))
            case Entry(title=title, lines=lines):
                head = self._text(title)
                texts = self._texts(lines)
                shown = "" if head is None else replace(block, title=head, lines=texts)
            case Section(title=title, blocks=blocks):
                takes = self._takes(len(_short(title)), lines=1)
                shown = replace(block, title=_short(title) if takes else "", blocks=tuple(map(self.block, blocks)))
        return shown

    def _texts(self, texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(shown for text in texts if (shown := self._text(text)) is not None)

    def _row(self, row: tuple[str, ...]) -> tuple[str, ...]:
        shown = tuple(map(_short, row))
        return shown if self._takes(sum(map(len, shown)), lines=1) else ()

    def _text(self, text: str) -> str | None:
        shown = _short(text)
        return shown if self._takes(len(shown), lines=shown.count("\n") + 1) else None

    def _takes(self, characters: int, *, lines: int) -> bool:
        """Take room for a text; False where there is none, and none for what comes after it."""
        self._room -= characters + _PER_LINE * lines
        if self._room < 0:
            self._room, self.left = -1, self.left + lines
        return self._room >= 0


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text) - LONGEST} more characters)"
