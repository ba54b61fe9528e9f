"""The table of `parity`: layouts and the word about each; curves as text, and several of one job judged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.evidence.golden import curve_text, load_golden
from harness.matrix.axes import axis_values
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, layout_id, parse_case_id, parse_layout
from harness.plugins.parity.against import Base, change
from harness.plugins.parity.commands import curve_sections, parity_junit, parity_markdown, parity_page, parity_sections
from harness.plugins.parity.curves import Number, TextCurve, curve_of, curve_of_case, job_of, read_curve
from harness.plugins.parity.layouts import (
    EXACT,
    CurveRow,
    Distance,
    Parity,
    Row,
    _beside,
    check_job,
    exit_code_of,
    judge_curve,
    judge_each,
    row,
    usual_layouts,
)
from harness.report.sections import text_of
from harness.result import CaseResult, Curve, WorstGradient
from harness.studies.layouts import cases_of
from harness.verdict import ExitCode, Verdict
from tests.builders import WQ, a_finding, make_failure, make_measured, make_result, make_results
from tests.commands import understood

NAME = "tp2-rowwise-v2048-s2-b16"


def result(
    distance: float = 0.01, *, allowed: float | None = 0.1, name: str = NAME, same_bits: bool = False, **changes: Any
) -> CaseResult:
    worst = WorstGradient(fqn=f"{WQ}.weight", step=2, distance=distance, allowed=allowed)
    solo = Curve(losses=(8.0, 7.25), grad_norms=(1.0, 0.9))
    measured = make_measured(worst_gradient=worst, same_bits=same_bits, curves={"solo": solo})
    numbers: dict[str, Any] = {"losses": (8.0, 7.5), "grad_norms": (1.0, 0.9), "measured": measured}
    return make_result(name, **{**numbers, **changes})


WRONG = a_finding(check="scales", message=f"input in forward of {WQ} at step 1 on rank 0 has a wrong scale", step=1)
REFUSED = "tp8-tensorwise-head.fp8-v2248-b16"
ROWS = {
    "equal": result(0.0, same_bits=True),
    "rounding": result(),
    "drift": result(0.0975),
    "wrong": result(0.3, verdict=Verdict.NUMERIC, findings=(WRONG,)),
    "known": result(0.3, verdict=Verdict.KNOWN, findings=(WRONG,)),
    "changed": result(verdict=Verdict.CHANGED, findings=(WRONG,)),
    "infra": result(verdict=Verdict.INFRA, measured=None, losses=(), grad_norms=()),
    "not run": result(verdict=Verdict.NOT_RUN, measured=None, losses=(), grad_norms=()),
    "not checked": result(measured=make_measured()),
}


def parity(*results: CaseResult, left_out: tuple[str, ...] = ()) -> Parity:
    run, rows = make_results(*results), tuple(map(row, results))
    code = exit_code_of(rows, run)
    return Parity(case_id="single", rows=rows, left_out=left_out, exit_code=code, seconds=5.0, software={})


def test_logprobs_are_columns_where_they_were_recorded() -> None:
    moved = replace(result(), measured=make_measured(logprobs=(0.019, 0.0045)))
    text = text_of(parity_sections(parity(moved), make_results(moved)))
    assert "logprob max" in text and "0.019" in text and "0.0045" in text and "logprob: distance of" in text
    assert "logprob" not in text_of(parity_sections(parity(result()), make_results(result())))


@pytest.mark.parametrize("word", ROWS)
def test_the_word_follows_from_the_verdict_and_the_distances(word: str) -> None:
    assert row(ROWS[word]).word == word


@pytest.mark.parametrize(
    ("case", "word"),
    [
        (result(math.nan), "wrong"),
        (result(math.inf), "wrong"),
        (result(0.3), "wrong"),
        (result(allowed=None), "not checked"),
        (result(verdict=Verdict.INVARIANT, findings=(replace(WRONG, judged=False),)), "not checked"),
        (result(verdict=Verdict.INVARIANT, findings=(replace(WRONG, judged=False), WRONG)), "wrong"),
        (result(math.nan, same_bits=True), "wrong"),
    ],
)
def test_what_is_no_number_or_not_compared_never_passes(case: CaseResult, word: str) -> None:
    assert row(case).word == word
    assert parity(case).exit_code is (ExitCode.FAILED if word == "wrong" else ExitCode.NOTHING_RAN)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("equal", "rounding", "known"), ExitCode.GOOD),
        (("equal", "wrong", "infra"), ExitCode.FAILED),
        (("equal", "infra"), ExitCode.INFRA),
        (("equal", "changed"), ExitCode.CHANGED),
        (("not run",), ExitCode.NOTHING_RAN),
    ],
)
def test_only_wrong_fails(words: tuple[str, ...], code: ExitCode) -> None:
    assert parity(*(ROWS[word] for word in words)).exit_code is code


def test_a_refusal_that_must_come_is_no_fault_and_names_its_rule() -> None:
    refused_row = row(result(name=REFUSED, measured=None, losses=(), grad_norms=()))
    assert refused_row.word == "refused" and refused_row.why


@pytest.mark.parametrize(
    ("layouts", "note"),
    [
        ("tp2", "--set sequence_parallel=false --set loss_parallel=false"),
        ("tp2 fsdp2-tp2", "--set sequence_parallel=false --set loss_parallel=false"),
        ("tp2 tp2-nosp tp2-nosp-nolp-rounding", "--set loss_parallel=false"),
        ("tp2 tp2-nosp-rounding", "--set sequence_parallel=false"),
        ("tp2-nosp", "--set loss_parallel=false"),
        ("tp2-nosp-nolp", ""),
        ("tp2 tp4-rounding", ""),
        ("fsdp2", ""),
    ],
)
def test_the_options_for_a_target_that_refuses_what_is_usual_of_tp(layouts: str, note: str) -> None:
    names = [(layout.removesuffix("-rounding"), layout.endswith("-rounding")) for layout in layouts.split()]
    rows = tuple(
        Row(layout=name, case_id=f"{name}-rowwise-v2048-b16", word="rounding" if is_sound else "refused", why="words")
        for name, is_sound in names
    )
    sound = row(ROWS["equal"])
    study = replace(parity(), rows=(replace(sound, layout="single", case_id="single-rowwise-v2048-b16"), *rows))
    run = make_results(ROWS["equal"])
    for text in (text_of(parity_sections(study, run)), parity_markdown(study, run)):
        assert (f", add `{note}`\n" in text) if note else ("add `" not in text)
        understood(f"fp8-harness parity --layouts {','.join(name for name, _ in names)} {note}")


def test_a_table_has_a_row_for_every_layout_in_a_narrow_terminal_too() -> None:
    study = parity(*ROWS.values(), left_out=("fsdp8",))
    excluded = Row(layout="ddp2", case_id="x", word="excluded", why="ddp")
    study = replace(study, rows=(*study.rows, excluded))
    sections = parity_sections(study, make_results(*ROWS.values()))
    wide, narrow = text_of(sections), text_of(sections, width=60)
    (line,) = [line for line in wide.splitlines() if " rounding " in line and "tp2" in line]
    assert line.split()[:6] == ["tp2", "rounding", "7.50000", "7.25000", "0.01", "0.1"]
    assert line.endswith(f"gradient of {WQ}.weight, step 2")
    assert "wrong scale" in wide and "left out, beyond the budget: fsdp8" in wide and "1 excluded" in wide
    assert all(len(line) <= 60 for line in narrow.splitlines() if "fp8-harness" not in line)
    assert "verdict rounding, loss 7.50000" in narrow or "rounding    7.50000" in narrow


def test_a_wrong_row_shows_what_is_wrong_and_nothing_that_is_allowed() -> None:
    far = replace(WRONG, values={**WRONG.values, "distance": 0.5, "allowed": 0.25})
    for finding, cells in ((WRONG, "| - | - |"), (far, "| 0.5 | 0.25 |")):
        wrong = result(verdict=Verdict.NUMERIC, findings=(finding,))
        assert f"| 7.25000 {cells} {WRONG.rule}, step 1 |" in parity_markdown(parity(wrong), make_results(wrong))


@pytest.mark.parametrize("word", ROWS)
def test_no_row_contradicts_itself(word: str) -> None:
    """What is right is within its tolerance, what is wrong is not, and json has what the table shows."""
    told = row(ROWS[word])
    if told.error is not None and told.tolerance is not None:
        assert (told.error <= told.tolerance) is (word not in {"wrong", "known"}), told
    assert told.decided_by or word in ("infra", "not run", "not checked")
    assert (told.error == 0) is (told.decided_by == "bitwise equal")
    assert msgspec.json.decode(msgspec.json.encode(told))["decided_by"] == told.decided_by


def test_a_row_says_what_is_certain_of_the_same_step() -> None:
    certain = a_finding(check="parity", message="divided twice", fix="divide once", step=1)
    for findings, why in (
        ((WRONG, certain), "step 1: divided twice"),
        ((WRONG, replace(certain, step=2)), "step 1: input in forward"),
        ((replace(WRONG, fix="own"), certain), "step 1: input in forward"),
    ):
        assert row(result(verdict=Verdict.NUMERIC, findings=findings)).why.startswith(why)


def test_one_step_that_is_wrong_fails_and_is_named_first() -> None:
    shown = replace(row(ROWS["wrong"]), layout="fsdp2 with clipping")
    study = replace(parity(ROWS["equal"]), one_step=(shown,))
    text = parity_markdown(study, make_results(ROWS["equal"], replace(ROWS["wrong"], case_id=shown.case_id)))
    assert text.startswith("## parity: no layout is wrong; wrong in one step: fsdp2 with clipping\n")
    assert "| fsdp2 with clipping | wrong | 8.00000 |" in text and "- fsdp2 with clipping: step 1: " in text


def test_junit_says_what_the_table_says() -> None:
    """A layout that the target refuses by itself is skipped, with what it said; what must be refused passes."""
    raised = '  File "/my/target.py", line 7, in build\n    raise NotImplementedError("no TP yet")\n'
    said = make_failure(message="NotImplementedError: no TP yet", traceback=raised, phase="build")
    by_target = result(verdict=Verdict.CRASH, failures=(said,), findings=(WRONG,), measured=None)
    by_rule = result(name=REFUSED, measured=None, losses=(), grad_norms=())
    loose = result(math.nan, name="fsdp2-rowwise-v2048-b16")
    unjudged = result(allowed=None, name="fsdp4-rowwise-v2048-b16")
    wrong = replace(ROWS["wrong"], case_id="tp4-rowwise-v2048-s2-b16")
    results = (by_target, by_rule, loose, unjudged, wrong)
    study = parity(*results)
    root = ElementTree.fromstring(parity_junit(study, make_results(*results)))
    children = {
        testcase.get("name"): [(child.tag, child.get("message")) for child in testcase if child.get("message")]
        for testcase in root.iter("testcase")
    }
    assert children[by_target.case_id] == [("skipped", "no TP yet")] and children[by_rule.case_id] == []
    tags = [[tag for tag, _ in children[case.case_id]] for case in (loose, unjudged, wrong)]
    assert tags == [["failure"], ["error"], ["failure"]]
    counts = {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "5", "failures": "2", "errors": "1", "skipped": "1"}


def test_markdown_is_one_table_the_page_has_it_too_and_a_golden_file_is_judged_below() -> None:
    results = (ROWS["equal"], ROWS["wrong"])
    study, run = parity(*results), make_results(*results)
    text = parity_markdown(study, run)
    assert "| layout | verdict | loss | reference | rel. error | tolerance | decided by |" in text
    verdict, _, rest = text.partition("\n")
    assert verdict == "## parity: 1 layout is wrong: tp2"
    assert "<details><summary>all findings</summary>" in rest and "| tp2 | equal | 7.50000 |" in rest
    assert rest.index("| tp2 | wrong |") < rest.index("- tp2: ") < rest.index("<details>")
    assert "CPU only" not in text  # of a run that does not say so
    assert parity_markdown(replace(study, software={"device": "cpu"}), run).count("\n- ", rest.index("<details>")) >= 3
    assert b"Layouts</h2>" in parity_page(study, run)
    off = Distance(step=1, kind="grad_norm", value=1.2, nearest=1.0, off=0.2, allowed=0.01)
    others = tuple("abcd")
    golden = CurveRow(name="bad.txt", word="wrong", others=others, steps=((1, "wrong"),), first=off, worst=off)
    study, run = replace(parity(ROWS["equal"]), golden=golden), make_results(ROWS["equal"])
    for text in (text_of(parity_sections(study, run)), parity_markdown(study, run)):
        assert "parity: no layout is wrong; bad.txt is wrong\n" in text
        assert "Compared with 4 other runs" in text and "grad_norm, step 1" in text
    assert b"Compared with 4 other runs" in parity_page(study, run)


def test_layouts_are_meshes_of_powers_of_two_and_keep_the_axes_of_the_case() -> None:
    names = [layout_id(layout) for layout in usual_layouts(10)]
    assert names[:3] == ["single", "fsdp2", "tp2"] and {"hsdp2x2", "fsdp2-tp2", "tp8"} < set(names)
    base = {**axis_values(Case()), "recipe": "tensorwise", "tp_styles": "float8"}
    cases = cases_of(base, [parse_layout("single"), parse_layout("tp2-nosp")], ["tp_styles"])
    assert list(map(case_id, cases)) == ["single-tensorwise-v2048-f32", "tp2-nosp-tensorwise-tpstyle.fp8-v2048-f32"]
    with pytest.raises(HarnessError, match="no layout of this case has a use for it"):
        cases_of({**base, "sequence_parallel": False}, [parse_layout("fsdp2")], ["sequence_parallel"])


def numbers(digest: str = "a", *, solo: float = 8.0, **changes: Any) -> CaseResult:
    """A result with digests, and the curve of one rank."""
    plain = result(**changes)
    assert plain.measured is not None
    curves = {"case": Curve(losses=plain.losses, grad_norms=plain.grad_norms)}
    curves["solo"] = Curve(losses=(solo, 7.5), grad_norms=(1.0, 0.9))
    digests = {"gradients": digest, "parameters": digest}
    return replace(plain, measured=replace(plain.measured, digests=digests, curves=curves))


def other(found: str, build: str = "20261120", unreleased: str = "torch nightly") -> CaseResult:
    """A layout that only differs from a formula, with a build that is no release."""
    finding = replace(WRONG, formula="traffic", found=found, differs=f"torch 2.16.0.dev{build} differs")
    return replace(numbers(), verdict=Verdict.CHANGED, findings=(finding,), unreleased=unreleased)


@pytest.mark.parametrize(
    ("now", "then", "word", "code"),
    [
        (numbers(), numbers(), "same bits", ExitCode.GOOD),
        (numbers("b"), numbers(), "rounding", ExitCode.GOOD),
        (numbers("b", solo=8.1), numbers(), "moved", ExitCode.GOOD),
        (numbers("b", losses=(9.0, 7.5)), numbers(solo=8.1), "moved", ExitCode.GOOD),
        (result(), numbers(), "not compared", ExitCode.GOOD),  # without digests
        (ROWS["wrong"], numbers(), "now wrong", ExitCode.FAILED),
        (ROWS["wrong"], ROWS["wrong"], "wrong in both", ExitCode.FAILED),
        (numbers(), ROWS["wrong"], "now right", ExitCode.GOOD),
        (numbers(), ROWS["infra"], "not compared", ExitCode.GOOD),
        (ROWS["wrong"], ROWS["infra"], "not compared", ExitCode.FAILED),
        (ROWS["not run"], numbers(), "not compared", ExitCode.NOTHING_RAN),
        (ROWS["wrong"], None, "new", ExitCode.FAILED),
        # with a nightly a new difference from a formula counts
        (other("28"), numbers(), "now differs", ExitCode.CHANGED),
        (other("42"), other("28", "20261119"), "now differs", ExitCode.CHANGED),
        (other("28"), other("28", "20261119"), "same bits", ExitCode.GOOD),
        (numbers(), other("28", "20261119"), "same bits", ExitCode.GOOD),
        (other("28", unreleased=""), other("28", unreleased=""), "same bits", ExitCode.CHANGED),
        (other("28"), None, "new", ExitCode.GOOD),
    ],
)
def test_what_became_of_a_layout_since_the_base(
    now: CaseResult, then: CaseResult | None, word: str, code: ExitCode
) -> None:
    beside = _beside(Base(name="abc (main)", results={} if then is None else {NAME: then}), now)
    assert beside.change == word
    assert exit_code_of((beside,), make_results(now)) is code


@pytest.mark.parametrize(
    ("word", "before", "became"),
    [
        ("equal", "refused", "now runs"),
        ("refused", "equal", "now refused"),
        ("refused", "refused", ""),
        ("wrong", "refused", "now wrong"),
    ],
)
def test_a_refusal_may_come_and_go(word: str, before: str, became: str) -> None:
    assert change(word, before, result(), result()) == (became, "")


def test_a_table_shows_of_the_base_what_differs() -> None:
    base = Base(name="abc (main)", results={NAME: ROWS["wrong"]})
    now = replace(numbers("b"), losses=(8.0, 7.4))
    study = replace(parity(now), against="abc (main)", rows=(_beside(base, now),))
    text = parity_markdown(study, make_results(now))
    assert text.startswith("## parity: no layout is wrong; against abc (main): 1 now right\n")
    assert "| layout | verdict | base | change | loss | reference | rel. error | tolerance | decided by |" in text
    assert "| tp2 | rounding | wrong | now right | 7.40000 | 7.50000 | 0.01 | 0.1 | gradient of " in text
    both = replace(parity(ROWS["wrong"]), rows=(_beside(base, ROWS["wrong"]),), against="abc (main)")
    assert both.exit_code is ExitCode.FAILED  # wrong is wrong
    assert "in the base too: step 1: input in forward" in parity_markdown(both, make_results(ROWS["wrong"]))


ROOT = Path(__file__).parents[4]
FAMILY = "tiny-v2048-s5-gb8-sl32-lr0.001-seed0"
THEIRS = """# config: llama3_debugmodel_fsdp2_tp2_cp2
# ngpu: 8
# parallelism: FSDP=2, TP=2, CP=2
# step loss grad_norm
1 8.023969650268555 1.5995219945907593
2 7.695959091186523 1.4733818769454956
"""
LOG = """[rank0]:[titan] 2026-08-21 10:00:00,1 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.02397  \x1b[38;2;180;60;0mgrad_norm:  1.5995  \x1b[38;2;54;234;195mmemory:  1.51GiB(1.9%)\x1b[39m
[rank1]:[titan] 2026-08-21 10:00:00,1 - root - INFO - step:  1  loss:  8.02397  grad_norm:  1.5995  memory:  1.51GiB
[titan] 2026-08-21 10:00:01,1 - root - INFO - validate step:  1  loss:  7.90000  memory:  1.51GiB(1.9%)
[titan] 2026-08-21 10:00:02,1 - root - INFO - step:  2  loss:  7.69596  grad_norm:  1.4734  memory:  1.51GiB(1.9%)
"""  # noqa: E501  as printed


def read(folder: Path, text: str) -> TextCurve:
    (folder / "curve.txt").write_text(text)
    return read_curve(folder / "curve.txt")


def curve(name: str, *losses: float, norms: tuple[float, ...] = ()) -> TextCurve:
    return curve_of(name, losses, norms, {})


CLEAN = [curve(str(index), 8.0, 7.5 + index * 1e-4, 7.0 + index * 1e-4) for index in range(5)]


def test_a_golden_is_written_without_a_lost_bit(tmp_path: Path) -> None:
    golden = load_golden(ROOT, "cpu", FAMILY)
    text = curve_text(golden.case_id, golden.losses, golden.grad_norms)
    assert text.splitlines()[:3] == [f"# config: {golden.case_id}", "# ngpu: 1", "# parallelism: none"]
    assert "# ngpu: 4\n# parallelism: FSDP=2, TP=2\n" in curve_text("fsdp2-tp2-rowwise-v2048-b16", (8.0,), (1.6,))
    points = read(tmp_path, text).points
    assert tuple(point.loss.value for point in points) == golden.losses
    assert tuple(point.grad_norm.value for point in points if point.grad_norm is not None) == golden.grad_norms


def test_a_golden_file_of_torchtitan_is_read_and_older_ones_have_losses_alone(tmp_path: Path) -> None:
    their_curve = read(tmp_path, THEIRS)
    assert their_curve.job == "llama3_debugmodel" and their_curve.case is None
    assert their_curve.points[0].loss.value == 8.023969650268555
    older = read(tmp_path, "1 8.1309\n2 7.84\n")
    assert [point.loss for point in older.points] == [Number(8.1309, 5e-5), Number(7.84, 0.005)]
    assert older.points[0].grad_norm is None and older.job == ""


def test_a_log_has_its_printed_digits_and_no_validation(tmp_path: Path) -> None:
    log = read(tmp_path, LOG)
    assert [(point.step, point.loss.value) for point in log.points] == [(1, 8.02397), (2, 7.69596)]
    assert log.points[0].grad_norm == Number(1.5995, 5e-5)
    assert judge_curve(log, [read(tmp_path, THEIRS)]).word == "equal", "what was printed is not off"


@pytest.mark.parametrize("text", ["1 8.0 1.0\n1 8.5 1.0\n", "no step here\n"])
def test_two_runs_in_a_file_or_none_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(HarnessError, match=r"curve.txt.*Fix: give "):
        read(tmp_path, text)


def test_a_run_names_its_job_in_every_layout_and_files_of_two_jobs_are_refused(tmp_path: Path) -> None:
    curves = [curve_of_case(name, (7.0,), (1.0,)) for name in ("tp2-rowwise-v2048-b16", "single-rowwise-v2048-b16")]
    assert {text_curve.job for text_curve in curves} == {"single-rowwise-v2048-b16"}
    check_job(curves[0], parse_case_id("fsdp2-rowwise-v2048-b16"))
    names = ("tp2-rowwise-v2048-b16", "fsdp2-tp2-rowwise-v2048-b16", "hsdp2x2-rowwise-v2048-b16")
    assert {job_of(parse_case_id(name)) for name in names} == {"single-rowwise-v2048-b16"}
    with pytest.raises(HarnessError, match="give files of one model, seed and data"):
        judge_each([read(tmp_path, THEIRS), read(tmp_path, "1 8.0\n")])


@pytest.mark.parametrize("text", [THEIRS, "# config: single-bf16-v2048-b16\n1 8.0\n"])
def test_a_file_of_another_job_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(HarnessError, match=r"curve.txt: .*Fix: "):
        check_job(read(tmp_path, text), parse_case_id("single-rowwise-v2048-b16"))


def test_clean_layouts_are_rounding_and_one_that_leaves_their_gap_is_wrong() -> None:
    assert {row.word for row in judge_each(CLEAN)} == {"rounding"}
    bad = curve("bad", 8.0, 7.5, 7.1)
    rows = {row.name: row for row in judge_each([*CLEAN, bad])}
    assert [name for name, row in rows.items() if row.word == "wrong"] == ["bad"]
    first = rows["bad"].first
    assert first is not None and (first.kind, first.step) == ("loss", 3)
    assert rows["bad"].steps == ((1, "equal"), (2, "equal"), (3, "wrong"))
    assert "1-2 equal, 3 wrong" in text_of(curve_sections(tuple(rows.values())))


def test_nothing_is_allowed_where_no_number_differs() -> None:
    same = [curve(str(index), 8.0, 7.5) for index in range(4)]
    assert judge_curve(curve("same", 8.0, 7.5), same).word == "equal"
    with pytest.raises(HarnessError, match="give at least 4"):
        judge_curve(curve("off", 8.0, 7.5001), same)
    row = judge_curve(curve("last bit", 8.0, 7.5 * (1 + EXACT / 2), 7.0), CLEAN)
    assert row.word == "rounding"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_wrong_and_shows_no_rounding(number: float) -> None:
    bad = curve("bad", 8.0, number, 7.0)
    rows = judge_each([*CLEAN, bad])
    assert [row.word for row in rows] == ["rounding"] * 5 + ["wrong"]
    assert "bad" not in rows[0].others


def test_norms_are_judged_by_themselves() -> None:
    clean = [curve(str(index), 8.0, norms=(1.0 + index * 1e-4,)) for index in range(5)]
    row = judge_curve(curve("doubled", 8.0, norms=(2.0,)), clean)
    assert row.word == "wrong" and row.first is not None and row.first.kind == "grad_norm"
