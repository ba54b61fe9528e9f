"""Curves as text, in the format of torchtitan's golden files, and the judgement of several of one job."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.evidence.curve import (
    Number,
    TextCurve,
    curve_of,
    curve_of_case,
    job_of,
    read_curve,
    text_of_curve,
)
from harness.evidence.golden import load_golden
from harness.matrix.caseid import parse_case_id
from harness.plugins.parity.curves import EXACT, check_job, judge_curve, judge_each
from harness.plugins.parity.sections import curve_sections
from harness.report.sections import text_of

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
    text = text_of_curve(curve_of_case(golden.case_id, golden.losses, golden.grad_norms))
    assert text.splitlines()[0] == f"# config: {golden.case_id}"
    points = read(tmp_path, text).points
    assert tuple(point.loss.value for point in points) == golden.losses
    assert tuple(point.grad_norm.value for point in points if point.grad_norm is not None) == golden.grad_norms


def test_a_golden_file_of_torchtitan_is_read_and_written_as_it_is(tmp_path: Path) -> None:
    their_curve = read(tmp_path, THEIRS)
    assert text_of_curve(their_curve) == THEIRS
    assert their_curve.job == "llama3_debugmodel" and their_curve.case is None
    assert their_curve.points[0].loss.value == 8.023969650268555


def test_older_files_have_losses_alone(tmp_path: Path) -> None:
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
    assert curves[0].said["parallelism"] == "TP=2"
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
