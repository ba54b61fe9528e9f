"""The report for people: a verdict table, a block for every case that is not good, and the totals.

Plain text for logs and CI; for terminals the same table as a rich renderable, so that it wraps and has colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from harness.report.wording import failure_text, finding_text, headline, retried, totals_line
from harness.result import CaseResult, RunResult
from harness.trace import RankFailure
from harness.verdict import Verdict

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_TRACEBACK_LINES = 25  # the end of a traceback tells most; the JSON report has all of it
_COLUMNS = ("case", "verdict", "ranks", "wall s", "CPU s", "note")
_COLOURS = {Verdict.PASSED: "green", Verdict.KNOWN: "cyan", Verdict.NOT_RUN: "yellow", Verdict.INFRA: "yellow"}


def text_report(run: RunResult) -> str:
    """Table, blocks and totals as plain text."""
    parts = [text_table(run.results), *(case_block(result) for result in run.results if not result.verdict.good)]
    return "\n\n".join([*(part for part in parts if part), totals_line(run)]) + "\n"


def text_table(results: Sequence[CaseResult]) -> str:
    """The verdict table, aligned, without trailing blanks; empty when there are no results."""
    if not results:
        return ""
    rows = [_COLUMNS, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(_aligned(row, widths) for row in rows)


def case_block(result: CaseResult) -> str:
    """Everything to know about one case that is not good, the command that reproduces it last."""
    lines = [
        f"{result.case_id} {result.verdict.phrase}",
        *(_indented(finding_text(finding), 2) for finding in result.findings),
        *(_indented(text, 2) for text in _ends(result.run.failures if result.run else ())),
        *([f"  {retried(result)}"] if retried(result) else []),
        *([f"  reproduce: {result.command}"] if result.command else []),
    ]
    return "\n".join(lines)


def rich_table(results: Sequence[CaseResult]) -> Table:
    """The verdict table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in _COLUMNS[2:5] else "left", overflow="fold")
    for result in results:
        colour = _COLOURS.get(result.verdict, "red")
        cells = [Text(cell) for cell in _row(result)]  # Text: no markup, ids and messages may hold brackets
        cells[1].stylize(colour)
        table.add_row(*cells)
    return table


def _row(result: CaseResult) -> tuple[str, ...]:
    times = (f"{result.seconds:.1f}", f"{result.cpu_s:.1f}")
    return (result.case_id, result.verdict.value, str(result.world_size), *times, headline(result))


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [
        cell.rjust(width) if column in (2, 3, 4) else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _ends(failures: Sequence[RankFailure]) -> list[str]:
    """How ranks ended, those that began it first; ranks with the same traceback once. Long tracebacks are cut."""
    causes = [failure for failure in failures if not failure.consequence] or list(failures)
    with_dump = sorted(
        (failure for failure in causes if failure.traceback), key=lambda item: (item.traceback, item.rank)
    )
    return [
        _tail(failure_text(min(group, key=lambda failure: failure.rank)))
        for _, group in groupby(with_dump, key=lambda failure: failure.traceback)
    ]


def _tail(text: str) -> str:
    head, *lines = text.splitlines()
    if len(lines) <= SHOWN_TRACEBACK_LINES:
        return text
    left_out = len(lines) - SHOWN_TRACEBACK_LINES
    return "\n".join([head, f"({left_out} earlier lines)", *lines[-SHOWN_TRACEBACK_LINES:]])


def _indented(text: str, blanks: int) -> str:
    return "\n".join(" " * blanks + line if line else "" for line in text.splitlines())
