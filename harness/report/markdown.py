"""The report for pull requests and CI summary pages: totals, a table of the bad cases, and collapsed details."""

from __future__ import annotations

import html
import re

from harness.report.text import bad_blocks
from harness.report.wording import headline, totals_line, unverified_text
from harness.result import CaseResult, RunResult

SHOWN_CASES = 200  # CI summary pages are truncated at about 1 MB


def markdown_report(run: RunResult) -> str:
    """The summary of a run as GitHub-flavoured markdown."""
    bad = [result for result in run.results if not result.verdict.good]
    state = "good" if run.exit_code == 0 else "not good"
    parts = [f"## fp8-harness: {state}", totals_line(run)]
    if bad:
        shown = bad[:SHOWN_CASES]
        parts += [_table(shown), *map(_details, shown, bad_blocks(shown))]
    if len(bad) > SHOWN_CASES:
        parts.append(f"… and {len(bad) - SHOWN_CASES} more that are not good.")
    unverified = unverified_text(run)
    if unverified:
        parts.append(f"```text\n{unverified.rstrip()}\n```")
    if run.left_out:
        listed = "\n".join(f"- `{name}`" for name in run.left_out)
        parts.append(_collapsed(f"cases beyond the budget ({len(run.left_out)})", listed))
    if run.results:
        parts.append(_collapsed(f"all cases ({len(run.results)})", _table(list(run.results))))
    return "\n\n".join(parts) + "\n"


def _table(results: list[CaseResult]) -> str:
    rows = [
        f"| `{result.case_id}` | {result.verdict.value} | {result.world_size} | {result.seconds:.1f} "
        f"| {_cell(headline(result))} |"
        for result in results
    ]
    return "\n".join(["| case | verdict | ranks | wall s | note |", "|---|---|---:|---:|---|", *rows])


def _details(result: CaseResult, block: str) -> str:
    longest = max(map(len, re.findall("`+", block)), default=0)
    fence = "`" * max(3, longest + 1)
    return _collapsed(f"{result.case_id}: {result.verdict.value}", f"{fence}text\n{block}\n{fence}")


def _collapsed(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title, quote=False)}</summary>\n\n{body}\n\n</details>"


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|").replace("\n", " ")
