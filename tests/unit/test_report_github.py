"""Annotations and job summaries for GitHub: one line a case, whatever ranks wrote, and never more than GitHub shows."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from harness.report.github import SHOWN, SUMMARY_BYTES, annotation_lines, job_summary
from harness.result import RunResult
from harness.verdict import Verdict
from tests.builders import a_finding, make_result

HOSTILE = "50 %\n::error::forged\r\n::set-output name=a::b\x1b[31m, %0A"


def run(*texts: str) -> RunResult:
    results = (
        make_result(f"case{number}", Verdict.NUMERIC, findings=(a_finding(check="c", message=text),))
        for number, text in enumerate(texts)
    )
    return RunResult(results=(make_result("good"), make_result("known", Verdict.KNOWN), *results), wall_s=1.0)


def read(line: str) -> tuple[str, str]:
    """Title and message of an annotation, as the runner of GitHub reads them."""
    found = re.fullmatch(r"::error title=([^,:]*)::(.*)", line)
    assert found is not None, line

    def unescaped(text: str) -> str:
        for code, character in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
            text = text.replace(code, character)
        return text

    return unescaped(found[1]), unescaped(found[2])


def test_a_bad_case_is_annotated_with_what_is_wrong_and_how_to_reproduce_it() -> None:
    (line,) = annotation_lines(run("the loss is off")).splitlines()
    title, message = read(line)
    assert title == "case0"
    assert message == "computed wrong numbers\nc/test: the loss is off\nreproduce: fp8-harness run --case case0"


def test_hostile_text_is_one_annotation_and_reads_as_it_was() -> None:
    text = annotation_lines(run(HOSTILE))
    assert text.count("\n") == 1
    assert "c/test: 50 %\n::error::forged\n::set-output name=a::b, %0A" in read(text.rstrip("\n"))[1]


@given(st.text(st.characters(codec=None)))
def test_any_text_is_one_line(text: str) -> None:
    (line, *rest) = annotation_lines(run(text)).split("\n")
    assert rest == [""] and "\r" not in line and read(line)[0] == "case0"


@given(st.integers(0, 3 * SHOWN))
def test_no_more_than_github_shows_and_every_case_named(count: int) -> None:
    lines = annotation_lines(run(*["x"] * count)).splitlines()
    assert len(lines) == min(count, SHOWN)
    named = "\n".join(line for each in lines for line in read(each))
    assert all(re.search(rf"^case{number}$", named, flags=re.MULTILINE) for number in range(count))


def test_a_summary_is_the_markdown_report() -> None:
    assert job_summary(run("the loss is off")).startswith("## fp8-harness: not good")


def test_a_summary_is_never_larger_than_github_shows() -> None:
    text = job_summary(run(*["x\n" + "é" * 20_000] * 40))
    assert SUMMARY_BYTES * 0.9 < len(text.encode()) < SUMMARY_BYTES
    assert text.endswith("cut off here: the whole report is larger than GitHub shows.\n")
