"""The text that all reports share: findings, cases, failures and totals, without markup.

Text from ranks may contain anything; `printable` removes what would break a terminal or an XML file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from textwrap import indent, wrap

from harness.checks.causes import first_effect
from harness.document import check_totals, verdict_totals
from harness.plural import counted
from harness.result import CaseResult, RunResult
from harness.trace import RankFailure
from harness.verdict import Finding, NotJudged, Verdict

# ANSI escape sequences, and all characters that XML 1.0 does not allow.
_UNPRINTABLE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[^\t\n\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """The rows as a table with aligned columns, those in `right` to the right; no trailing spaces."""
    columns = []
    for index, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if index in right else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def wrapped(text: str, width: int, first: str, later: str) -> list[str]:
    """The lines of a text, indented by `first` and `later`; no word is split, so an id may be longer than the width."""
    return wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def printable(text: str) -> str:
    """The text without ANSI escape sequences and control characters."""
    return _UNPRINTABLE.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def finding_text(finding: Finding) -> str:
    """A finding on several lines: rule, place and sentence, then expected, found and what to do."""
    where = f" [{finding.place}]" if finding.place else ""
    values = (("expected", finding.expected), ("found", finding.found), ("fix", finding.fix))
    lines = [
        f"{finding.rule}{where}: {finding.headline}",
        *(f"  {name}: {value}" for name, value in values if value is not None),
    ]
    return printable("\n".join(lines))


def findings_texts(findings: Sequence[Finding]) -> list[str]:
    """All findings of a case, in groups where some of them are likely to be effects of those before them."""
    split, texts = first_effect(findings), [finding_text(finding) for finding in findings]
    if split is None:
        return texts
    groups = {"nearest to the cause:": texts[:split], "also found, likely effects:": texts[split:]}
    return ["\n".join([title, *(indent(text, "  ") for text in group)]) for title, group in groups.items()]


def outcome(result: CaseResult) -> str:
    """How a case ended, as the end of a sentence that starts with its id."""
    unjudged = bool(result.findings) and not any(finding.judged for finding in result.findings)
    return "could not be judged" if unjudged else result.verdict.phrase


def headline(result: CaseResult) -> str:
    """The first finding of a case, or what was unusual about it, on one line; empty if nothing was."""
    if result.findings:
        more = f" (+{len(result.findings) - 1} more)" if len(result.findings) > 1 else ""
        known = f"{result.expectation}: " if result.verdict is Verdict.KNOWN and result.expectation else ""
        excused = f"{result.quarantined.partition(':')[0]}: " if result.excused else ""
        return printable(excused + known + result.findings[0].first_line) + more
    parts = (result.expectation and f"as expected: {result.expectation}", retried(result))
    return printable("; ".join(part for part in parts if part)).replace("\n", " ")


def retried(result: CaseResult) -> str:
    """The number of attempts and the reasons for retrying; empty after a single attempt."""
    if len(result.attempts) < 2:
        return ""
    earlier = "; ".join(f"{attempt.verdict.value}: {attempt.message}" for attempt in result.attempts[:-1])
    return f"{len(result.attempts)} attempts, earlier: {earlier}"


def failure_text(failure: RankFailure) -> str:
    """How a rank failed, with its traceback or stack dump."""
    phase = f" in {failure.phase}" if failure.phase else ""
    because = " (after another rank failed)" if failure.consequence else ""
    head = f"rank {failure.rank} {failure.kind}{phase}{because}: {failure.message}"
    return printable("\n".join(part for part in (head, failure.traceback.rstrip()) if part))


def left_out_text(run: RunResult) -> str:
    """The cases that did not fit into the budget, each on a line; empty when there was none."""
    if not run.left_out:
        return ""
    lines = "".join(f"  {name}\n" for name in run.left_out)
    return f"left out, beyond the budget ({len(run.left_out)}):\n{lines}\n"


def unverified_text(run: RunResult) -> str:
    """The checks that were not judged for want of a verified formula or signature, each on a line; or nothing."""
    skipped = [each for result in run.results for each in result.not_judged if each.unverified]
    return _grouped("not judged here", skipped)


def not_judged_text(run: RunResult) -> str:
    """Every check that was not judged somewhere, with its reason and the number of cases; empty when all were."""
    return _grouped("not judged", [each for result in run.results for each in result.not_judged])


def _grouped(title: str, skipped: Sequence[NotJudged]) -> str:
    """Every check with its reason and the number of cases. Reasons that differ in what to do alone share a line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in sorted(skipped, key=lambda each: (each.check, each.reason)):
        reasons.setdefault((each.check, each.reason.partition("; `")[0]), []).append(each.reason)
    lines = "".join(
        f"  {check} in {counted(len(found), 'case')}: {found[0]}\n" for (check, _), found in reasons.items()
    )
    return printable(f"{title}:\n{lines}\n") if lines else ""


def references_text(run: RunResult) -> str:
    """How many cases had no stored golden to be compared with; empty when all had one."""
    count = sum(result.golden == "run here" for result in run.results)
    return (
        f"{counted(count, 'case')} compared with BF16 references that were run here: no golden is stored\n"
        if count
        else ""
    )


def derived_text(run: RunResult) -> str:
    """How many cases were judged by derived tolerances; empty when all were measured."""
    count = sum(bool(result.derived) for result in run.results)
    what = "judged by tolerances that were derived from BF16 runs with rounding errors: none was measured"
    return f"{counted(count, 'case')} {what}\n" if count else ""


def totals_text(run: RunResult) -> str:
    """What ends a report: what was not judged, not run or not stored, then the totals."""
    return unverified_text(run) + left_out_text(run) + references_text(run) + derived_text(run) + totals_line(run)


def totals_words(verdicts: Sequence[Verdict]) -> str:
    """The number of cases of every verdict that there is: "3 passed, 1 crash"."""
    return ", ".join(f"{count} {name}" for name, count in verdict_totals(verdicts).items() if count) or "nothing"


def totals_line(run: RunResult) -> str:
    """The run on one line: cases by verdict, checks that were judged and that were not, and the seconds it took."""
    counts = totals_words([result.verdict for result in run.results])
    cpu_s = sum(result.cpu_s for result in run.results)
    stopped = " - interrupted" if run.interrupted else ""
    excused = sum(result.excused for result in run.results)
    counts += f" ({excused} of them quarantined)" if excused else ""
    checks = check_totals(run.results)
    judged = f"{counted(checks['judged'], 'check')} judged, {checks['not_judged']} not; " if run.results else ""
    return f"{counted(len(run.results), 'case')}: {counts}; {judged}{run.wall_s:.1f} s wall, {cpu_s:.1f} s CPU{stopped}"
