"""Reports of runs in the terminal."""

import pytest
from msgspec.structs import replace

from harness.checks.catalogue import KNOWN
from harness.report.case import case_section, finding_entry, headline
from harness.report.run import case_table, not_judged_section, run_markdown, run_sections, totals_line
from harness.report.sections import Section, text_of
from harness.result import CaseResult, ReferenceRun, RunResult, WithFix
from harness.trace import RankFailure
from harness.verdict import Finding, NotJudged, Verdict
from tests.builders import a_finding, make_attempt, make_failure, make_result, make_results, run_of

FINDING = Finding(
    rule="fp8_on/not-converted",
    says="{module} was not converted\nsecond line",
    step=3,
    rank=1,
    module="layers.0.w1",
    expected="converted",
    found="plain",
)
WRONG = a_finding(rule="parity/gradients", message="21 of 21 gradients differ", step=3, verdict=Verdict.NUMERIC)


def text_report(run_result: RunResult) -> str:
    return text_of(run_sections(run_result, rerun="fp8-harness run --lf"))


def case_block(result: CaseResult) -> str:
    return text_of([case_section(result)])


def table_lines(*results: CaseResult, width: int | None = None) -> list[str]:
    return text_of([Section(blocks=(case_table(results),))], width=width).splitlines()


def failure(rank: int, *, traceback: str = "Traceback\n  boom", consequence: bool = False) -> RankFailure:
    return make_failure(rank, traceback=traceback, phase="step 3", consequence=consequence)


def result(case_id: str = "single-bf16", verdict: Verdict = Verdict.PASSED, *findings: Finding) -> CaseResult:
    return make_result(case_id, verdict, findings=findings)


def crashed(*failures: RankFailure) -> CaseResult:
    return make_result(
        "tp4",
        Verdict.CRASH,
        findings=(a_finding(check="engine", message="rank 1 raised"),),
        attempts=(make_attempt(Verdict.INFRA, "no fork"), make_attempt(Verdict.CRASH)),
        run=run_of(*failures),
    )


def run(*results: CaseResult, interrupted: bool = False) -> RunResult:
    return make_results(*results, wall_s=12.34, interrupted=interrupted)


def test_the_table() -> None:
    assert table_lines(result(), result("tp2-rowwise-v2256", Verdict.INVARIANT, FINDING, WRONG)) == [
        "case               verdict    ranks  wall s  CPU s  note",
        "single-bf16        passed         4     1.2    2.5",
        (
            "tp2-rowwise-v2256  invariant      4     1.2    2.5  "
            "fp8_on/not-converted in layers.0.w1: it was not converted [step 3, rank 1] (+1 more)"
        ),
    ]
    assert table_lines() == []


def test_a_finding_says_where_what_expected_and_found_or_that_it_could_not_be_judged() -> None:
    assert text_of([Section(blocks=(finding_entry(FINDING),))]).splitlines() == [
        "fp8_on/not-converted [step 3, rank 1]: layers.0.w1 was not converted",
        "  second line",
        "  expected: converted",
        "  found: plain",
    ]
    assert finding_entry(a_finding(check="judge", message="no check")).title == "judge/test: no check"
    assert "[step 0, rank 0]" in finding_entry(a_finding(check="c", message="m", step=0, rank=0)).title
    lacks = a_finding(rule="loss_vs_golden/no-golden", message="no golden is stored", judged=False)
    assert case_block(result("bad", Verdict.INVARIANT, lacks)).startswith("bad could not be checked\n")
    both = case_block(result("bad", Verdict.INVARIANT, FINDING, lacks))
    assert both.startswith("bad broke an invariant\n") and "also: not checked: loss_vs_golden/no-golden" in both


def test_a_failure_is_three_lines_and_one_line_for_all_that_follows() -> None:
    many = [replace(FINDING, module=f"layers.{layer}.w{number}") for layer in (0, 1) for number in (1, 2)]
    lines = [
        "  fp8_on/not-converted in layers.0.w1: it was not converted [step 3, rank 1]",
        "  expected converted, found plain",
        "  next: fp8-harness run bad -v",
        "  also: 1 that likely follow: parity/gradients",
    ]
    assert case_block(result("bad", Verdict.INVARIANT, FINDING, WRONG)).splitlines()[1:] == lines
    lines[0] = "  fp8_on/not-converted in 4 modules (layers.*.w1, layers.*.w2): each was not converted [step 3, rank 1]"
    assert case_block(result("bad", Verdict.INVARIANT, *many, WRONG)).splitlines()[1:] == lines
    mended = replace(FINDING, fix="convert it.")
    assert case_block(result("bad", Verdict.INVARIANT, mended)).splitlines()[3:] == [
        "  fix: convert it.",
        "  reproduce: fp8-harness run bad",
    ]
    whole = text_of([case_section(result("bad", Verdict.INVARIANT, FINDING, WRONG), whole=True)])
    assert "`fp8-harness explain RULE`" in whole
    assert "second line" in whole and "parity/gradients [step 3]: 21 of 21 gradients differ" in whole


def test_a_known_fault_is_one_line_with_its_link_and_whether_it_passes_with_the_fix() -> None:
    fault = KNOWN.finding(fault="rounds", link="unreported", reason="It rounds.")
    known = result("a", Verdict.KNOWN, fault, WRONG)
    fixed = replace(known, with_fix=WithFix(fixes=("f.py:apply",), verdict=Verdict.PASSED, findings=(), checks=()))
    line = "rounds (unreported), passes with the candidate fix: It rounds."
    assert headline(fixed) == f"judge/known: {line}"
    assert "(unreported), no candidate fix is recorded: It rounds." in headline(known)
    assert text_report(run(fixed, fixed)).count(f"known issues of torch and torchao\n  {line} (in 2 cases)\n") == 1
    assert "  rounds (unreported), passes with the candidate fix\n" in text_report(run(fixed))
    assert fixed.three_lines.why == "parity/gradients fails as recorded"


def test_the_report_has_a_block_for_what_is_not_good_only_and_counts_every_verdict() -> None:
    text = text_report(run(result(), result("known", Verdict.KNOWN, FINDING), result("bad", Verdict.NUMERIC, FINDING)))
    assert "bad computed wrong numbers" in text
    assert "next: fp8-harness run bad -v" in text
    assert "known failed as" not in text and "run --case single" not in text
    assert text.endswith(
        "3 cases: 1 passed, 1 numeric, 1 known; 0 checks ran, 0 did not; 12.3 s wall, 7.5 s CPU (cases 7.5)\n"
    )
    assert text_report(run(interrupted=True)) == "0 cases: nothing; 12.3 s wall, 0.0 s CPU - interrupted\n"
    line = totals_line(run(*(result(verdict.value, verdict) for verdict in Verdict)))
    assert all(f"1 {verdict.value}" in line for verdict in Verdict)


def test_the_cpu_seconds_of_all_processes_are_told_and_those_that_a_second_run_saves() -> None:
    made = ("solo", 1.0, True), ("noise", 2.0, True), ("noise", 2.5, False), ("replay", 0.25, False)
    references = tuple(ReferenceRun(kind=kind, name=kind, cpu_s=seconds, stored=kept) for kind, seconds, kept in made)
    kept = ReferenceRun(kind="bf16", name="kept", ran=0)
    told = replace(run(result()).end, references=(*references, kept), harness_cpu_s=3.0)
    text = text_report(replace(run(result()), end=told))
    assert "references: 4 of 5 run, 5.8 s CPU (noise 4.5, replay 0.2, solo 1.0)\n" in text
    parts = "11.2 s CPU (cases 2.5, references 5.8, harness 3.0), of which a second run saves 3.0"
    assert text.endswith(f"12.3 s wall, {parts}\n")


def test_headlines_are_cut_in_the_table_and_retries_and_expectations_are_visible() -> None:
    words = "rank 0 raised: " + "Traceback " * 200 + "the cause"
    result = make_result("a", Verdict.CRASH, findings=(a_finding(message=words), a_finding()))
    assert headline(result).startswith(f"/test: {words[:380]}") and headline(result).endswith("… (+1 more)")
    assert len(headline(result)) < 420
    assert "the cause" in case_block(result)
    assert headline(crashed()) == "engine/test: rank 1 raised"
    block = case_block(crashed())
    assert "2 attempts, earlier: infra: no fork" in block
    assert headline(make_result(expectation="alignment")) == "as expected: alignment"


def test_equal_tracebacks_are_shown_once_and_long_ones_by_their_end() -> None:
    block = case_block(crashed(failure(1), failure(2), failure(3, traceback="other\n", consequence=True)))
    assert block.count("boom") == 1
    assert "rank 1 raised in step 3: ValueError: x" in block
    assert "other" not in block
    assert "boom" in case_block(crashed(failure(1, consequence=True)))
    one, two = (replace(crashed(failure(0), failure(1)), case_id=name) for name in ("one", "two"))
    printed = replace(two, run=run_of(failure(0, traceback="Traceback\n  boom\nlast output:\nother words")))
    unlike = replace(crashed(failure(0, traceback="Traceback\n  bang")), case_id="three")
    for text in (text_report(run(one, two, unlike)), run_markdown(run(one, printed, unlike))):
        assert text.count("  boom") == 1 and text.count("  bang") == 1
        assert text.count("rank 0 raised in step 3: ValueError: x\n  same traceback as one") == 1
    assert "boom" in case_block(two)
    long = "\n".join(f"line {number}" for number in range(100))
    block = case_block(crashed(failure(1, traceback=long)))
    assert "(75 earlier lines)" in block and "line 99" in block and "line 74\n" not in block


def test_stacks_of_stuck_ranks_are_left_to_the_finding_and_the_json_report() -> None:
    stuck = failure(0, traceback='Current thread 0x0 (most recent call first):\n  File "x.py", line 1 in f')
    stuck = replace(stuck, kind="stuck", message="did not finish")
    assert "x.py" not in case_block(crashed(stuck))
    block = case_block(crashed(replace(stuck, traceback=f"{stuck.traceback}\nlast output:\nwarned")))
    assert "x.py" not in block and "last output:\n  warned" in block


IDS = [
    "fsdp2-tp2-tensorwise-tpstyle.fp8-ac.op-v2048-f64",
    "atp2-fallback-tensorwise-tpstyle.fp8-graph-v2048-f64",
    "hsdp2x2-tp2-tensorwise-tpstyle.fp8-dim.512-layers.4-ffn.1408-v2048-s3-seed1-b16-tol.0.05",
]


@pytest.mark.parametrize("width", range(60, 180, 7))
def test_the_table_never_splits_an_id_and_nothing_else_is_wider_than_the_terminal(width: int) -> None:
    long = a_finding(check="c", message="words " * 30)
    lines = table_lines(*(result(name, Verdict.NUMERIC, long) for name in IDS), width=width)
    for name in IDS:
        assert sum(line.startswith(name) for line in lines) == 1
    assert all(len(line) <= width or line in IDS for line in lines)
    assert sum(line.count("numeric") for line in lines) == len(IDS)
    assert sum(line.count("words") for line in lines) == 30 * len(IDS)


def test_cases_that_were_not_run_are_one_line() -> None:
    waiting = [result(f"w{number}", Verdict.NOT_RUN) for number in range(34)]
    text = text_report(run(result(), *waiting, interrupted=True))
    assert "\nnot run: 34 cases (`fp8-harness run --lf` runs them)\n" in text
    assert "w7" not in text and "34 not_run" in text
    assert "not run: 1 case (`fp8-harness run --lf` runs it)" in text_report(run(result(), waiting[0]))


def test_markdown_lists_what_is_not_good_folds_the_rest() -> None:
    finding = a_finding(check="c", message="a | b <x> & ```")
    text = run_markdown(run(result(), result("bad", Verdict.NUMERIC, finding)))
    assert text.startswith("## fp8-harness: not good\n")
    assert "| `bad` | numeric | 4 | 1.2 | 2.5 | c/test: a \\| b &lt;x&gt; &amp; \\`\\`\\` |" in text
    assert "````text\nbad computed wrong numbers" in text
    assert text.count("<details>") == text.count("</details>") == 2
    assert text.index("`bad`") < text.index("`single-bf16`")
    assert run_markdown(run(result())).startswith("## fp8-harness: good\n")
    assert run_markdown(run()).startswith("## fp8-harness: not good\n")


def test_checks_that_were_not_judged_are_named_once_with_their_reason_and_counted() -> None:
    skipped = NotJudged(check="traffic", reason="the formula for traffic was not verified: torch 2.99", unverified=True)
    inapplicable = NotJudged(check="graphs", reason="no rank recorded graphs")
    run_result = run(*(make_result(name, not_judged=(inapplicable, skipped)) for name in ("a", "b")))
    line = "traffic in 2 cases: the formula for traffic was not verified: torch 2.99"
    assert f"not checked here\n  {line}\n" in text_report(run_result)
    assert line in run_markdown(run_result)
    assert "not checked" not in text_report(run(make_result("a", not_judged=(inapplicable,))))
    skipped = NotJudged(check="memory", reason="it is the partitioner's choice")
    run_result = run(*(make_result(name, checks=("finite",), not_judged=(skipped,)) for name in ("a", "b")))
    text = text_of([not_judged_section(run_result)])
    assert text == "not checked\n  memory in 2 cases: it is the partitioner's choice\n"
    assert text_of([not_judged_section(run(make_result("a")))]) == ""
    assert "2 cases: 2 passed; 2 checks ran, 2 did not; " in totals_line(run_result)
