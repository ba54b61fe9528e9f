"""The report for humans: a verdict table, a block for every case that is not good, and the totals.

Plain text for logs and CI. The table for terminals is in `table.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import indent
from types import MappingProxyType

from msgspec.structs import replace

from harness.checks.stacks import LAST_OUTPUT
from harness.plural import counted
from harness.report.table import started, text_table
from harness.report.wording import (
    failure_text,
    findings_texts,
    outcome,
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
    blocks = bad_blocks(started(run.results))
    return "\n\n".join([*blocks, *filter(None, [_not_run(run, rerun)]), totals_text(run)]) + "\n"


def _not_run(run: RunResult, rerun: str) -> str:
    count = len(run.results) - len(started(run.results))
    return f"not run: {counted(count, 'case')} (`{rerun}` runs {'it' if count == 1 else 'them'})" if count else ""


def bad_blocks(results: Sequence[CaseResult]) -> list[str]:
    """A block for every case that is not good. A traceback that several of them have is in the first one's alone."""
    bad = [result for result in results if not result.verdict.good]
    first: dict[str, str] = {}
    for result in bad:
        for failure in result.run.failures if result.run else ():
            first.setdefault(_raised(failure), result.case_id)
    return [case_block(result, first) for result in bad]


def case_block(result: CaseResult, first: Mapping[str, str] = MappingProxyType({})) -> str:
    """The findings, tracebacks and retries of a case, and the command that reproduces it.

    `first`: the case whose block has a traceback. This block refers to it if it is that of another case.
    """
    lines = [
        f"{result.case_id} {outcome(result)}",
        *(indent(text, "  ") for text in findings_texts(result.findings)),
        *(indent(text, "  ") for text in _failure_texts(result, first)),
        *([f"  {retried(result)}"] if retried(result) else []),
        *([f"  {result.quarantined}"] if result.excused else []),
        *([f"  reproduce: {result.command}"] if result.command else []),
    ]
    return "\n".join(lines)


def _failure_texts(result: CaseResult, first: Mapping[str, str]) -> list[str]:
    """How ranks failed, without consequences, each traceback once; only the end of a long traceback."""
    causes = (result.run.causes or result.run.failures) if result.run else ()
    told = [failure for failure in (_told(each, result.case_id, first) for each in causes) if failure.traceback]
    told.sort(key=lambda failure: (failure.traceback, failure.rank))
    return [_tail(failure_text(next(group))) for _, group in groupby(told, key=lambda failure: failure.traceback)]


def _told(failure: RankFailure, case_id: str, first: Mapping[str, str]) -> RankFailure:
    """The failure without what is told elsewhere: where ranks are stuck, and the traceback of another case."""
    _, mark, output = failure.traceback.partition(LAST_OUTPUT)
    if failure.kind == "stuck":
        return replace(failure, traceback=mark + output)
    other = first.get(_raised(failure), case_id)
    return failure if other == case_id else replace(failure, traceback=f"same traceback as {other}")


def _raised(failure: RankFailure) -> str:
    """The traceback without what the rank printed."""
    return failure.traceback.partition(LAST_OUTPUT)[0].rstrip()


def _tail(text: str) -> str:
    head, *lines = text.splitlines()
    if len(lines) <= SHOWN_TRACEBACK_LINES:
        return text
    omitted = len(lines) - SHOWN_TRACEBACK_LINES
    return "\n".join([head, f"({omitted} earlier lines)", *lines[-SHOWN_TRACEBACK_LINES:]])
