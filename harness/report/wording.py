"""The words that every text report shares: how a finding, a case and a whole run read. No layout, no markup.

Text that comes from ranks may hold anything; `printable` takes out what would spoil a terminal or an XML file.
"""

from __future__ import annotations

import re

from harness.report.document import verdict_totals
from harness.result import CaseResult, RunResult
from harness.trace import RankFailure
from harness.verdict import Finding, Verdict

# Colour and cursor sequences of terminals, then every character that XML 1.0 does not allow.
_UNPRINTABLE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[^\t\n\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """The text without terminal sequences and control characters."""
    return _UNPRINTABLE.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def place(finding: Finding) -> str:
    """Where a finding is: "step 3, rank 1, module layers.0.attention.wq"; empty when it is about the whole run."""
    parts = (("step", finding.step), ("rank", finding.rank), ("module", finding.module))
    return ", ".join(f"{name} {value}" for name, value in parts if value is not None)


def finding_text(finding: Finding) -> str:
    """A finding on several lines: check, place and message, then expected and found."""
    where = f" [{place(finding)}]" if place(finding) else ""
    values = (("expected", finding.expected), ("found", finding.found))
    lines = [
        f"{finding.check}{where}: {finding.message}",
        *(f"  {name}: {value}" for name, value in values if value is not None),
    ]
    return printable("\n".join(lines))


def headline(result: CaseResult) -> str:
    """Why a case is not simply passed, on one line; empty when there is nothing to say."""
    if result.findings:
        more = f" (+{len(result.findings) - 1} more)" if len(result.findings) > 1 else ""
        known = f"{result.expectation}: " if result.verdict is Verdict.KNOWN and result.expectation else ""
        return printable(known + result.findings[0].message.partition("\n")[0]) + more
    parts = (result.expectation and f"as expected: {result.expectation}", retried(result))
    return printable("; ".join(part for part in parts if part)).replace("\n", " ")


def retried(result: CaseResult) -> str:
    """How often a case was tried and why, when it was more than once."""
    if len(result.attempts) < 2:
        return ""
    earlier = "; ".join(f"{attempt.verdict.value}: {attempt.message}" for attempt in result.attempts[:-1])
    return f"{len(result.attempts)} attempts, earlier: {earlier}"


def failure_text(failure: RankFailure) -> str:
    """How a rank ended, with its traceback or stack dump and its last output."""
    phase = f" in {failure.phase}" if failure.phase else ""
    because = " (after another rank failed)" if failure.consequence else ""
    head = f"rank {failure.rank} {failure.kind}{phase}{because}: {failure.message}"
    return printable("\n".join(part for part in (head, failure.traceback.rstrip()) if part))


def totals_line(run: RunResult) -> str:
    """The run in one line: how many cases, by verdict, and the seconds it took."""
    counts = ", ".join(f"{count} {name}" for name, count in verdict_totals(run).items() if count) or "nothing"
    cpu_s = sum(result.cpu_s for result in run.results)
    stopped = " - interrupted" if run.interrupted else ""
    return f"{len(run.results)} cases: {counts}; {run.wall_s:.1f} s wall, {cpu_s:.1f} s CPU{stopped}"
