"""The report for humans: a verdict table, a block for every case that is not good, and the totals.

Plain text for logs and CI; for terminals, the same table as a rich renderable with colours and wrapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import indent
from typing import TYPE_CHECKING

from harness.report.wording import (
    aligned,
    failure_text,
    findings_texts,
    headline,
    outcome,
    retried,
    totals_text,
)
from harness.result import CaseResult, RunResult
from harness.trace import RankFailure
from harness.verdict import Verdict

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_TRACEBACK_LINES = 25  # the last lines of a traceback; the JSON report has all of it
_COLUMNS = ("case", "verdict", "ranks", "wall s", "CPU s", "note")
_NUMBERS = (2, 3, 4)  # right-aligned columns
_COLOURS = {Verdict.PASSED: "green", Verdict.KNOWN: "cyan", Verdict.NOT_RUN: "yellow", Verdict.INFRA: "yellow"}


def text_report(run: RunResult) -> str:
    """Table, blocks and totals as plain text."""
    parts = [text_table(run.results), *(case_block(result) for result in run.results if not result.verdict.good)]
    return "\n\n".join([*filter(None, parts), totals_text(run)]) + "\n"


def text_table(results: Sequence[CaseResult]) -> str:
    """The verdict table; empty when there are no results."""
    if not results:
        return ""
    return aligned([_COLUMNS, *map(_row, results)], right=_NUMBERS)


def case_block(result: CaseResult) -> str:
    """The findings, tracebacks and retries of a case, and the command that reproduces it."""
    lines = [
        f"{result.case_id} {outcome(result)}",
        *(indent(text, "  ") for text in findings_texts(result.findings)),
        *(indent(text, "  ") for text in _failure_texts(result.run.failures if result.run else ())),
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
        table.add_column(name, justify="right" if _COLUMNS.index(name) in _NUMBERS else "left", overflow="fold")
    for result in results:
        colour = _COLOURS.get(result.verdict, "red")
        cells = [Text(cell) for cell in _row(result)]  # Text, not str: brackets are no markup
        cells[1].stylize(colour)
        table.add_row(*cells)
    return table


def _row(result: CaseResult) -> tuple[str, ...]:
    times = (f"{result.seconds:.1f}", f"{result.cpu_s:.1f}")
    return (result.case_id, result.verdict.value, str(result.world_size), *times, headline(result))


def _failure_texts(failures: Sequence[RankFailure]) -> list[str]:
    """How ranks failed, without consequences, each traceback once; only the end of a long traceback."""
    causes = [failure for failure in failures if not failure.consequence] or list(failures)
    with_traceback = sorted(
        (failure for failure in causes if failure.traceback), key=lambda item: (item.traceback, item.rank)
    )
    return [
        _tail(failure_text(min(group, key=lambda failure: failure.rank)))
        for _, group in groupby(with_traceback, key=lambda failure: failure.traceback)
    ]


def _tail(text: str) -> str:
    head, *lines = text.splitlines()
    if len(lines) <= SHOWN_TRACEBACK_LINES:
        return text
    omitted = len(lines) - SHOWN_TRACEBACK_LINES
    return "\n".join([head, f"({omitted} earlier lines)", *lines[-SHOWN_TRACEBACK_LINES:]])
