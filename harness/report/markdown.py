"""The report for a pull request or a CI summary page: totals, a table of what is not good, details folded away."""

from __future__ import annotations

from harness.report.text import case_block
from harness.report.wording import headline, totals_line
from harness.result import CaseResult, RunResult

SHOWN_CASES = 200  # CI summary pages are cut at about 1 MB


def markdown_report(run: RunResult) -> str:
    """The summary of a run as GitHub-flavoured markdown."""
    bad = [result for result in run.results if not result.verdict.good]
    state = "good" if run.exit_code == 0 else "not good"
    parts = [f"## fp8-harness: {state}", totals_line(run)]
    if bad:
        parts += [_table(bad[:SHOWN_CASES]), *(_details(result) for result in bad[:SHOWN_CASES])]
    if len(bad) > SHOWN_CASES:
        parts.append(f"… and {len(bad) - SHOWN_CASES} more cases that are not good.")
    if run.results:
        parts.append(_folded(f"all {len(run.results)} cases", _table(list(run.results))))
    return "\n\n".join(parts) + "\n"


def _table(results: list[CaseResult]) -> str:
    rows = [
        f"| `{result.case_id}` | {result.verdict.value} | {result.world_size} | {result.seconds:.1f} "
        f"| {_cell(headline(result))} |"
        for result in results
    ]
    return "\n".join(["| case | verdict | ranks | wall s | note |", "|---|---|---:|---:|---|", *rows])


def _details(result: CaseResult) -> str:
    block = case_block(result)
    fence = "`" * max(3, _longest_ticks(block) + 1)
    return _folded(f"{result.case_id}: {result.verdict.value}", f"{fence}text\n{block}\n{fence}")


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{_escaped(title)}</summary>\n\n{body}\n\n</details>"


def _longest_ticks(text: str) -> int:
    return max((len(run) for run in "".join(char if char == "`" else " " for char in text).split()), default=0)


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|").replace("\n", " ")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
