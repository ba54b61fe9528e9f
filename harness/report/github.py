"""What GitHub Actions shows of a run: an annotation for every case that is not good, and the summary of the job.

An annotation is a line `::error title=…::…` in the log; the runner reads escapes of its own there.
"""

from __future__ import annotations

from harness.report.markdown import markdown_report
from harness.report.wording import findings_texts, outcome, printable
from harness.result import CaseResult, RunResult

SHOWN = 10  # errors of one step that GitHub shows
SUMMARY_BYTES = 1 << 20  # of one step; GitHub drops a larger summary as a whole
_CUT = "\n\n… cut off here: the whole report is larger than GitHub shows.\n"


def annotation_lines(run: RunResult) -> str:
    """Workflow commands, one a line: an error for every bad case, the last one for all that GitHub would not show."""
    bad = [result for result in run.results if not result.verdict.good]
    shown = bad if len(bad) <= SHOWN else bad[: SHOWN - 1]
    lines = [_error(result.case_id, _message(result)) for result in shown]
    if len(bad) > len(shown):
        names = "\n".join(result.case_id for result in bad[len(shown) :])
        lines.append(_error(f"{len(bad) - len(shown)} more cases are not good", names))
    return "".join(f"{line}\n" for line in lines)


def job_summary(run: RunResult) -> str:
    """The markdown report, cut at the end of a paragraph where it is larger than GitHub shows."""
    text = markdown_report(run)
    content = text.encode(errors="replace")
    if len(content) < SUMMARY_BYTES:
        return text
    kept = content[: SUMMARY_BYTES - len(_CUT.encode()) - 1].decode(errors="ignore")
    return kept.rpartition("\n\n")[0] + _CUT


def _error(title: str, message: str) -> str:
    name = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::error title={name}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return printable(text).replace("%", "%25").replace("\n", "%0A")


def _message(result: CaseResult) -> str:
    command = [f"reproduce: {result.command}"] if result.command else []
    return "\n".join([outcome(result), *findings_texts(result.findings), *command])
