"""The verdict table: plain text for logs, and for a terminal as wide as it is. A case id is never split over lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.report.wording import aligned, headline
from harness.result import CaseResult
from harness.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import JustifyMethod, RenderableType

_COLUMNS = ("case", "verdict", "ranks", "wall s", "CPU s", "note")
_NUMBERS = (2, 3, 4)  # right-aligned columns
_COLOURS = {Verdict.PASSED: "green", Verdict.KNOWN: "cyan", Verdict.INFRA: "yellow"}
_NOTE_WIDTH = 30  # a longer note is wrapped, into at least so many characters
_GAP = 2  # between columns, as rich sets them


def started(results: Sequence[CaseResult]) -> tuple[CaseResult, ...]:
    """The results of cases that were run."""
    return tuple(result for result in results if result.verdict is not Verdict.NOT_RUN)


def text_table(results: Sequence[CaseResult]) -> str:
    """The verdict table; empty when there are no results."""
    if not results:
        return ""
    return aligned([_COLUMNS, *map(_row, results)], right=_NUMBERS)


def rich_table(results: Sequence[CaseResult], *, width: int) -> RenderableType:
    """The table for a terminal of this width: where ids leave too little room, each has a line of its own."""
    rows = [_row(result) for result in results]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    needed = sum(widths[:-1]) + min(widths[-1], _NOTE_WIDTH) + _GAP * (len(widths) - 1)
    return _one_line(results, rows) if needed <= width else _own_line(results, rows, widths)


def _one_line(results: Sequence[CaseResult], rows: Sequence[Sequence[str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(_COLUMNS):
        justify: JustifyMethod = "right" if index in _NUMBERS else "left"
        table.add_column(name, justify=justify, no_wrap=name != "note", overflow="fold")
    for result, row in zip(results, rows, strict=True):
        cells = [Text(cell) for cell in row]  # Text, not str: brackets are no markup
        cells[1].stylize(_COLOURS.get(result.verdict, "red"))
        table.add_row(*cells)
    return table


def _own_line(results: Sequence[CaseResult], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines: list[RenderableType] = []
    for result, (name, *cells, note) in zip([None, *results], [_COLUMNS, *rows], strict=True):
        places = zip(cells, widths[1:-1], range(1, len(widths)), strict=False)
        numbers = [cell.rjust(size) if index in _NUMBERS else cell.ljust(size) for cell, size, index in places]
        line = Text("  " + " ".join(numbers), no_wrap=True, overflow="ignore")
        if result is None:
            line.append(f"  ({name} above, {note} below)")
        else:
            line.stylize(_COLOURS.get(result.verdict, "red"), 2, 2 + widths[1])
            lines.append(Text(name, no_wrap=True, overflow="ignore"))
        lines.append(line)
        if result is not None and note:
            lines.append(Padding(Text(note), (0, 0, 0, 2)))
    return Group(*lines)


def _row(result: CaseResult) -> tuple[str, ...]:
    times = (f"{result.seconds:.1f}", f"{result.cpu_s:.1f}")
    return (result.case_id, result.verdict.value, str(result.world_size), *times, headline(result))
