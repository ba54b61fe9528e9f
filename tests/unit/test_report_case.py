"""Reports of one case, and for CI: annotations, JUnit XML, the summary of a job."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.failures import LAST_OUTPUT
from harness.report.case import case_sections, shown_case, sparkline
from harness.report.ci import ANNOTATIONS, SUMMARY_BYTES, annotation_lines, job_summary, junit_report
from harness.report.sections import text_of
from harness.result import CaseResult, Curve, Measured, RunResult, Sent
from harness.text import binary_bytes
from harness.verdict import NotJudged, Verdict
from tests.builders import a_finding, make_attempt, make_cast_range, make_failure, make_result, make_results, run_of

ID = "fsdp2-tp2-tensorwise-tpstyle.fp8-ac.op-v2048-f64"
TABLE = """\
the loss differs by +0.0278 from the golden at step 2, 0.00782 allowed
  step        golden         found    difference     allowed
     1      7.783702      7.782655     -0.001047    0.002910
     2      7.684422      7.712241     +0.027820    0.007820  <"""
SENT = Sent(calls=40, payload_bytes=655360)
MEASURED = Measured(
    curves={
        "case": Curve(losses=(8.0, 7.0, math.nan), grad_norms=(1.0, 2.0, 3.0)),
        "golden": Curve(losses=(8.0, 7.5, 7.0), grad_norms=(1.0, 1.0, 1.0)),
    },
    allowed_loss=(0.01, 0.02),
    loss_distance=0.5,
    parity=1e-15,
    scaled_mm_calls=420,
    wire={"all_gather in float8_e4m3fn along tp": SENT, "all_reduce (max) in float64 along tp": SENT},
    expected_wire={"all_gather in float8_e4m3fn along tp": Sent(calls=41, payload_bytes=655360)},
    saved_bytes=2048,
    expected_saved_bytes=2048,
    fused={"fused_all_gather_scaled_matmul in forward": 4},
    casts=(make_cast_range(2, amax=1.5, scale_min=2.0, scale_max=2.0, flushed=0.125),),
)


def case_text(case: CaseResult, *, width: int = 60) -> str:
    return text_of(shown_case(case), width=width)


def made(**changes: object) -> CaseResult:
    return make_result(ID, Verdict.NUMERIC, **changes)


def full(message: str = TABLE) -> CaseResult:
    return made(
        findings=(a_finding(check="loss_vs_golden", message=message, step=2, rank=0),),
        run=run_of(make_failure(traceback="\n".join(f"line {number}" for number in range(40)))),
        checks=("finite", "parity"),
        not_judged=(NotJudged(check="traffic", reason="the ranks were not asked to record traffic"),),
        measured=MEASURED,
    )


def test_everything_is_told_in_blocks() -> None:
    text = case_text(full())
    titles = [line for line in text.splitlines()[1:] if line and not line.startswith(" ")]
    assert titles == [
        "what is wrong",
        "findings",
        "stacks",
        "curves",
        "numbers",
        "communicated, by all ranks in all steps",
        "fused",
        "checked",
        "not checked",
        "run it again",
    ]
    for part in (
        "loss      case    █▁!  8 -> nan",
        "loss      golden  █▅▁  8 -> 7",
        "0.5 nats (allowed 0.02)",
        "found 40 calls, 640 KiB, formula 41 calls, 640",
        "saved for backward",
        "line 39",
        f"fp8-harness run {ID}",
    ):
        assert part in text, part
    assert "line 20" not in text


def test_a_case_of_which_nothing_was_measured_says_what_is_known() -> None:
    assert case_text(made()) == (
        f"{ID}\n  numeric; 4 ranks, 1.2 s wall, 2.5 s CPU\n\nrun it again\n  fp8-harness run {ID}\n"
    )


@given(st.lists(st.text("ab \n", max_size=200)).map(" ".join))
def test_lines_are_at_most_so_long(message: str) -> None:
    words = " ".join(word[:20] for word in message.split(" "))
    long = [line for line in case_text(full(words)).splitlines() if len(line) > 60]
    assert len(long) == 2 and all(ID in line for line in long), "commands are never wrapped"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_a_larger_value_never_has_a_lower_bar(values: list[float]) -> None:
    bars = sparkline(values, min(values), max(values))
    assert len(bars) == len(values)
    ordered = [bar for _, bar in sorted(zip(values, bars, strict=True))]
    assert ordered == sorted(bars)


def test_bytes_have_binary_units() -> None:
    assert [binary_bytes(count) for count in (0, 1023, 1024, 3 * 2**20 // 2)] == ["0 B", "1023 B", "1 KiB", "1.5 MiB"]


def result(verdict: Verdict, *, text: str = "why") -> CaseResult:
    passed = verdict is Verdict.PASSED
    return make_result(
        "a",
        verdict,
        findings=() if passed else (a_finding(check="c", message=text, expected=text, rank=2),),
        attempts=(make_attempt(verdict, text),),
        run=None if passed else run_of(make_failure(0, text, traceback=text, phase=text)),
    )


def parsed(*results: CaseResult) -> ElementTree.Element:
    run = make_results(*results, wall_s=3.0, provenance={"torch": "2.13.0", "empty": ""})
    return ElementTree.fromstring(junit_report(run))


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_what_is_good_has_no_failure_and_no_error(verdict: Verdict) -> None:
    root = parsed(result(verdict))
    case = root.find(".//testcase")
    assert case is not None
    bad = [*case.findall("failure"), *case.findall("error")]
    assert (not bad) is verdict.good
    assert all(element.get("type") == verdict.value and "why" in (element.text or "") for element in bad)
    assert int(root.get("failures", "0")) + int(root.get("errors", "0")) == len(bad)


def test_a_case_has_its_facts_and_a_bad_one_its_command_and_the_end_of_the_output_of_ranks() -> None:
    case = parsed(result(Verdict.CRASH)).find(".//testcase")
    assert case is not None
    assert (case.get("classname"), case.get("name"), case.get("time")) == ("fp8-harness", "a", "1.250")
    facts = {element.get("name"): element.get("value") for element in case.findall("properties/property")}
    assert facts == {"command": "fp8-harness run a", "verdict": "crash", "world_size": "4"}
    assert "why" in (case.findtext("system-out") or "")
    failure = make_failure(0, traceback=f"Traceback\n{LAST_OUTPUT}\nNCCL gave up")
    case = parsed(make_result("a", Verdict.CRASH, run=run_of(failure)))
    assert (case.findtext(".//error") or "").endswith("reproduce: fp8-harness run a")
    assert (case.findtext(".//system-out") or "").endswith("NCCL gave up")


def test_refusals_cases_without_findings_and_empty_runs_are_valid() -> None:
    refused = make_result(run=run_of(make_failure(0, traceback="Traceback"), make_failure(1, traceback="Traceback")))
    assert parsed(refused).find(".//system-out") is None
    root = parsed(make_result(expectation="output_alignment"))
    assert root.findtext(".//system-out") == "as expected: output_alignment"
    (error,) = parsed(make_result(verdict=Verdict.NOT_RUN)).findall(".//error")
    assert error.get("message") == "was not run" == (error.text or "").splitlines()[0]
    assert parsed().get("tests") == "0"


def test_an_error_of_the_harness_about_a_target_shows_the_output_of_ranks_alone() -> None:
    text = "TargetMisfit: build() made an AdamW. Fix: make another."
    failure = make_failure(0, text, traceback=f"Traceback in harness/worker\n{LAST_OUTPUT}\nloaded the model")
    (section,) = case_sections([make_result("a", Verdict.CRASH, run=run_of(failure))])
    assert "loaded the model" in text_of([section]) and "Traceback" not in text_of([section])


def test_a_known_fault_is_skipped_with_its_text() -> None:
    root = parsed(result(Verdict.KNOWN), result(Verdict.PASSED))
    (skipped,) = root.findall(".//skipped")
    assert skipped.get("message") == "c/test: why [rank 2]" and root.get("skipped") == "1" and root.get("tests") == "2"
    output = root.findtext(".//testcase/system-out") or ""
    assert "c/test: why [rank 2]\nexpected why\nnext: fp8-harness " in output and "c/test [rank 2]: why" in output


@given(st.text(st.characters(codec=None)))
def test_any_text_gives_valid_xml_and_one_line(text: str) -> None:
    case = parsed(result(Verdict.CRASH, text=text)).find(".//testcase")
    assert case is not None
    (line, *rest) = annotation_lines(run_of_texts(text)).split("\n")
    assert rest == [""] and "\r" not in line and read(line)[0] == "case0"


HOSTILE = "50 %\n::error::forged\r\n::set-output name=a::b\x1b[31m, %0A"


def run_of_texts(*texts: str) -> RunResult:
    results = (
        make_result(f"case{number}", Verdict.NUMERIC, findings=(a_finding(check="c", message=text),), world_size=1)
        for number, text in enumerate(texts)
    )
    return RunResult(results=(make_result("good"), make_result("known", Verdict.KNOWN), *results))


def read(line: str) -> tuple[str, str]:
    """Title and message of an annotation, as the runner of GitHub reads them."""
    match = re.fullmatch(r"::error title=([^,:]*)::(.*)", line)
    assert match is not None, line

    def unescaped(text: str) -> str:
        for code, character in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
            text = text.replace(code, character)
        return text

    return unescaped(match[1]), unescaped(match[2])


def test_a_bad_case_is_annotated_with_what_is_wrong_and_how_to_reproduce_it() -> None:
    (line,) = annotation_lines(run_of_texts("the loss is off")).splitlines()
    title, message = read(line)
    assert title == "case0"
    assert message == "computed wrong numbers\nc/test: the loss is off\nnext: fp8-harness run case0 -v"
    text = annotation_lines(run_of_texts(HOSTILE))
    assert text.count("\n") == 1
    assert "c/test: 50 %\nnext: " in read(text.rstrip("\n"))[1]


@given(st.integers(0, 3 * ANNOTATIONS))
def test_no_more_than_github_shows_and_every_case_named(count: int) -> None:
    lines = annotation_lines(run_of_texts(*["x"] * count)).splitlines()
    assert len(lines) == min(count, ANNOTATIONS)
    named = "\n".join(line for annotation in lines for line in read(annotation))
    assert all(re.search(rf"^case{number}$", named, flags=re.MULTILINE) for number in range(count))


def test_a_summary_is_the_markdown_report_and_never_larger_than_github_shows() -> None:
    assert job_summary(run_of_texts("the loss is off")).startswith("## fp8-harness: not good")
    text = job_summary(run_of_texts(*["x\n" + "é" * 20_000] * 40))
    assert SUMMARY_BYTES * 0.9 < len(text.encode()) < SUMMARY_BYTES
    assert text.endswith("cut off here: the whole report is larger than GitHub shows.\n")
