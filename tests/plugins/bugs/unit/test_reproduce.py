"""Bug files, which read back as written and name every mistake; and reproducing a bug: the answer and its trials."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.cli.main import main
from harness.errors import HarnessError
from harness.matrix.case import Case, Float8, Layout
from harness.matrix.caseid import case_id
from harness.matrix.records import Symptom
from harness.plugins.bugs import commands as bug
from harness.plugins.bugs import trials
from harness.plugins.bugs.bugfile import Bug, BugFile, cases_of_bugs, read_bug_file, read_bugs, write_bug_file
from harness.plugins.bugs.commands import tell_other_failure
from harness.plugins.bugs.sections import reproduced_sections
from harness.plugins.bugs.trials import NamedCase, Reproduced, TrialResult, known_in, reproduced
from harness.project import Project, find_project
from harness.report.sections import text_of
from harness.running.plan import Plan
from harness.running.progress import SilentProgress
from harness.running.schedule import Ended
from harness.running.selection import NothingSelected, Query, select_cases
from harness.verdict import ExitCode, FailureSignature, Verdict
from tests.builders import a_finding, make_case, make_known
from tests.jobs import make_capacity
from tests.strategies import POSSIBLE_CASES

CASE = make_case(tp=2, recipe="rowwise")
SCALES = FailureSignature(kind="scales/amax", where=("layers.*.wq",), first_step=1)
CRASH = FailureSignature(kind="crash", what="RuntimeError: Expected trailing dimension of mat1 to be divisible by N")
BUG: dict[str, Any] = {"title": "t", "link": "l", "status": "live", "symptom": "crash", "detected_by": ("engine",)}


def ask(seen: FailureSignature | None, verdict: Verdict = Verdict.INVARIANT, /, **bug: Any) -> Reproduced:
    file = BugFile(id="ao-1", where="ao-1.toml", bug=Bug(**(BUG | bug)), case=CASE, full_size={"tp": 8})
    result = TrialResult(case_id="tp2", verdict=verdict, signature=seen, message="it says so", cpu_s=1.0)
    return reproduced(NamedCase(CASE, file), result, installed={"torch": "2.13.0"}, device="a GPU")


@pytest.mark.parametrize(
    ("seen", "bug", "answer"),
    [
        (SCALES, {"signature": SCALES}, "reproduced"),
        (CRASH, {"signature": SCALES}, "another failure"),
        (None, {"signature": SCALES}, "not reproduced"),
        (CRASH, {"message": "RuntimeError: Expected trailing dimension of mat1 to be divisible by 16"}, "reproduced"),
        (CRASH, {"message": "KeyError: no such mesh dimension exists"}, "another failure"),
        (CRASH, {}, "reproduced"),
        (SCALES, {}, "another failure"),
        (SCALES, {"symptom": "wrong_numbers"}, "reproduced"),
        (CRASH, {"symptom": "wrong_numbers"}, "another failure"),
        (SCALES, {"symptom": "nan"}, "another failure"),
        (FailureSignature(kind="finite/loss"), {"symptom": "nan"}, "reproduced"),
        (FailureSignature(kind="hang", what="barrier"), {"symptom": "hang"}, "reproduced"),
        (FailureSignature(kind="crash", what="CollectiveMismatch: ranks"), {"symptom": "hang"}, "reproduced"),
        (FailureSignature(kind="memory/bytes"), {"symptom": "memory"}, "reproduced"),
        (SCALES, {"symptom": "traffic"}, "another failure"),
    ],
)
def test_the_answer(seen: FailureSignature | None, bug: dict[str, Any], answer: str) -> None:
    assert ask(seen, **bug).answer == answer
    other = FailureSignature(kind="traffic/volume", what="all_reduce")  # from a formula, which is no other failure
    assert ask(other, Verdict.CHANGED, signature=SCALES).answer == "not reproduced"
    assert ask(other, Verdict.INVARIANT, signature=SCALES).answer == "another failure"
    assert ask(other, Verdict.CHANGED, signature=other).answer == "reproduced"


@pytest.mark.parametrize(
    ("seen", "verdict", "code", "bisect"),
    [
        (CRASH, Verdict.CRASH, 1, 1),
        (SCALES, Verdict.INVARIANT, 1, 125),
        (None, Verdict.PASSED, 0, 0),
        (None, Verdict.INFRA, 4, 125),
    ],
)
def test_exit_codes(seen: FailureSignature | None, verdict: Verdict, code: int, bisect: int) -> None:
    answer = ask(seen, verdict)
    assert (answer.exit_code, answer.bisect_code) == (code, bisect)


def test_without_a_bug_any_failure_is_one() -> None:
    result = TrialResult(case_id="tp2", verdict=Verdict.CRASH, signature=CRASH, message="", cpu_s=1.0)
    assert reproduced(NamedCase(CASE, None), result, installed={}, device="").answer == "reproduced"
    other = reproduced(NamedCase(CASE, None), result, installed={}, device="", like=SCALES)
    assert other.answer == "another failure"


def test_a_recorded_fault_that_shows_is_named_whatever_the_answer_is() -> None:
    fault = make_known(requires=(Symptom(rule="scales/amax"),))
    wrong, other = a_finding(check="scales", rule="scales/amax"), a_finding(rule="parity/loss")
    assert known_in((other,), (fault,)) == {}
    assert known_in((wrong,), (fault,)) == {"recorded": "An example. (https://example.org/1)"}
    (rest,) = known_in((wrong, other), (fault,)).values()
    assert rest.endswith("; 1 finding of 2 not explained by it")
    text = text_of(reproduced_sections(msgspec.structs.replace(ask(CRASH), known=known_in((wrong,), (fault,)))))
    assert "known issue  recorded: An example." in text


def test_shrink_and_export_say_that_a_failure_is_not_the_reported_one(capsys: pytest.CaptureFixture[str]) -> None:
    bug = BugFile(id="ao-1", where="ao-1.toml", bug=Bug(**BUG, signature=CRASH), case=CASE)
    for signature in (CRASH, SCALES):
        result = TrialResult(case_id="tp2", verdict=Verdict.INVARIANT, signature=signature, message="", cpu_s=1.0)
        tell_other_failure(NamedCase(CASE, bug), result)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("fp8-harness: warning: tp2: another failure than the reported one: expected crash")
    assert "found scales/amax" in warning


def test_both_failures_and_what_differs_are_shown() -> None:
    reported: dict[str, Any] = {"hardware": "8 x H100", "versions": {"torch": "2.6", "ao": "1"}}
    text = text_of(reproduced_sections(ask(CRASH, signature=SCALES, **reported)))
    assert "expected  scales/amax" in text and "found     crash: RuntimeError" in text
    assert "torch: 2.6 reported, 2.13.0 here" in text and "ao: 1 reported, not installed here" in text
    assert "hardware: 8 x H100 reported, a GPU here" in text and "tp: 8 reported, 2 here" in text


def test_ctrl_c_ends_trials_as_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: Ended[Any] = Ended(results=(None,), interrupted=True)
    monkeypatch.setattr(trials, "run_schedule", lambda *args, **options: stopped)
    monkeypatch.setattr(trials, "open_references", lambda *_: None)
    executor: Any = SimpleNamespace(stop=None)
    running = trials.Trials(find_project(), Plan(capacity=make_capacity(2)), executor, SilentProgress())
    with pytest.raises(KeyboardInterrupt):
        running.run([make_case()])


def test_an_interruption_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bug, "run_once", interrupted)
    monkeypatch.setenv("FP8_HARNESS_STATE", str(tmp_path))
    monkeypatch.setenv("FP8_HARNESS_PROGRAM", "tests.acceptance.fake_program")
    assert main(["-q", "bug", "repro", "single-bf16-v2048-f32"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err.strip() == "fp8-harness: error: interrupted."


CASE_OF_FILE = Case(layout=Layout(tp=2), float8=Float8(recipe="rowwise", filter_fqns=("wq",)))
BUG_FILE = Bug(
    title='Loss is "off" by 2 %',
    link="https://github.com/pytorch/ao/issues/1",
    status="fixed",
    symptom="wrong_numbers",
    reported=datetime.date(2024, 7, 16),
    first_bad_step=3,
    versions={"torch": "2.5.0.dev20240617+cu121"},
    detected_by=("scales",),
    planted=("amax_without_abs",),
    signature=FailureSignature(kind="scales/amax", where=("layers.*.wq", "input in forward")),
)
TABLES = {
    "stated": {"tp": "--training.tensor_parallel_degree 2"},
    "derived": {"global_batch": "1 a rank x 8 ranks"},
    "full_size": {"dim": 4096},
}
TEXT = write_bug_file(BugFile(id="ao-1", where="", bug=BUG_FILE, case=CASE_OF_FILE, **TABLES))
REFUSED = '[bug]\ntitle = "t"\nlink = "l"\nstatus = "refused"\nsymptom = "nan"\n[refused]\nMXFP8 = "block scales"\n'
texts = st.dictionaries(st.sampled_from(["tp", "dim", "some fact"]), st.text(max_size=20), max_size=3)


def stored(folder: Path, text: str, name: str = "ao-1") -> Path:
    path = folder / "cases" / "bugs" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_written_bug_reads_back_as_the_same(tmp_path: Path) -> None:
    path = stored(tmp_path, TEXT)
    assert read_bug_file(path) == BugFile(id="ao-1", where=str(path), bug=BUG_FILE, case=CASE_OF_FILE, **TABLES)


@example(case=Case(), stated={}, missing={"tp": "\r\n"})
@given(case=POSSIBLE_CASES, stated=texts, missing=texts)
def test_every_case_and_text_is_kept(
    tmp_path_factory: pytest.TempPathFactory, case: Case, stated: dict[str, str], missing: dict[str, str]
) -> None:
    bug = Bug(title="t", link="l", status="open", symptom="unknown")
    path = stored(tmp_path_factory.mktemp("bugs"), "")
    written = BugFile(id="ao-1", where=str(path), bug=bug, case=case, stated=stated, missing=missing)
    path.write_text(write_bug_file(written))
    assert read_bug_file(path) == written


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('status = "fixed"', 'status = "gone"', r"Invalid enum value 'gone'"),
        ('symptom = "wrong_numbers"', 'symptom = "odd"', r"Invalid enum value 'odd'"),
        pytest.param(
            "amax_without_abs", "amax_without_ab", r"did you mean amax_without_abs", marks=pytest.mark.plugin("faults")
        ),
        ('status = "fixed"', 'status = "live"', r"a live bug needs no injected fault"),
        ("detected_by", "detected", r"unknown key 'detected'"),
        ("tp = 2", "tp = 0", r"tp = 0"),
        ("[stated]", "[said]", r"unknown key 'said'"),
        ("[derived]", "[missing]", r"fields are open in a bug that is fixed"),
        ("dim = 4096", "dims = 4096", r"unknown key 'dims'"),
        ('detected_by = [\n    "scales",\n]', "", r"a fixed bug needs detected_by"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(HarnessError, match=message):
        read_bug_file(stored(tmp_path, TEXT.replace(old, new, 1)))


def test_a_refused_bug_has_no_case(tmp_path: Path) -> None:
    bug = read_bug_file(stored(tmp_path, REFUSED))
    assert not bug.runs
    with pytest.raises(HarnessError, match="no case has this bug: MXFP8: block scales"):
        bug.runnable()
    with pytest.raises(HarnessError, match=r"has a \[refused\] table and no case"):
        read_bug_file(stored(tmp_path, REFUSED + '[case]\nid = "single-bf16-v2048-f32"\n'))


def test_open_fields_say_what_to_fill_in(tmp_path: Path) -> None:
    text = TEXT.replace('"fixed"', '"open"').replace('planted = [\n    "amax_without_abs",\n]\n', "")
    path = stored(tmp_path, text + '[missing]\nvocab_size = "which tokenizer?"\n')
    with pytest.raises(HarnessError, match=r"open fields: vocab_size: which tokenizer\?"):
        cases_of_bugs(path)


def test_the_bugs_are_run_by_the_name_of_their_folder(tmp_path: Path) -> None:
    (tmp_path / "golden").mkdir()
    project = Project(root=tmp_path, state=tmp_path / "state")
    one = stored(tmp_path, TEXT)
    stored(tmp_path, REFUSED, name="ao-2")
    assert [bug.id for bug in read_bugs(project.bugs)] == ["ao-1", "ao-2"]
    for source in ("bugs", str(project.bugs), str(one)):
        assert [case_id(case) for case in select_cases(project, Query(sources=(source,)))] == [case_id(CASE_OF_FILE)]
    one.unlink()
    with pytest.raises(NothingSelected):
        select_cases(project, Query(sources=("bugs",)))
