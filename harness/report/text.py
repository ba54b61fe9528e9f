"""The report for humans: a verdict table, a block for every case that is not good, and the totals.

Plain text for logs and CI. The table for terminals is in `table.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import indent

from harness.report.table import started, text_table
from harness.report.wording import (
    counted,
    failure_text,
    finding_text,
    retried,
    totals_text,
)
from harness.result import CaseResult, RunResult
from harness.trace import RankFailure

SHOWN_TRACEBACK_LINES = 25  # the last lines of a traceback; the JSON report has all of it


def text_report(run: RunResult, *, rerun: str) -> str:
    """Table, blocks and totals as plain text; `rerun` is the command that runs what was not run."""
    return "\n\n".join([*filter(None, [text_table(started(run.results))]), blocks_text(run, rerun=rerun)])


def blocks_text(run: RunResult, *, rerun: str) -> str:
    """A block for every case that ran and is not good, one line for all that were not run, and the totals."""
    blocks = [case_block(result) for result in started(run.results) if not result.verdict.good]
    return "\n\n".join([*blocks, *filter(None, [_not_run(run, rerun)]), totals_text(run)]) + "\n"


def _not_run(run: RunResult, rerun: str) -> str:
    count = len(run.results) - len(started(run.results))
    return f"not run: {counted(count, 'case')} (`{rerun}` runs {'it' if count == 1 else 'them'})" if count else ""


def case_block(result: CaseResult) -> str:
    """The findings, tracebacks and retries of a case, and the command that reproduces it."""
    lines = [
        f"{result.case_id} {result.verdict.phrase}",
        *(indent(finding_text(finding), "  ") for finding in result.findings),
        *(indent(text, "  ") for text in _failure_texts(result.run.failures if result.run else ())),
        *([f"  {retried(result)}"] if retried(result) else []),
        *([f"  reproduce: {result.command}"] if result.command else []),
    ]
    return "\n".join(lines)


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
