"""Bug files: what is written is what is read, open fields stop a case, and every mistake is named with its line."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.case import Case, Float8, Layout
from harness.matrix.caseid import case_id
from harness.plugins.bugs.bugfile import Bug, BugFile, cases_of_bugs, read_bug_file, read_bugs, write_bug_file
from harness.project import Project
from harness.running.selection import NothingSelected, Query, select_cases
from harness.verdict import FailureSignature
from tests.strategies import POSSIBLE_CASES

CASE = Case(layout=Layout(tp=2), float8=Float8(recipe="rowwise", filter_fqns=("wq",)))
BUG = Bug(
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
TEXT = write_bug_file(BugFile(id="ao-1", where="", bug=BUG, case=CASE, **TABLES))
REFUSED = '[bug]\ntitle = "t"\nlink = "l"\nstatus = "refused"\nsymptom = "nan"\n[refused]\nMXFP8 = "block scales"\n'
texts = st.dictionaries(st.sampled_from(["tp", "dim", "some fact"]), st.text(max_size=20), max_size=3)


def stored(folder: Path, text: str, name: str = "ao-1") -> Path:
    path = folder / "cases" / "bugs" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_written_bug_reads_back_as_the_same(tmp_path: Path) -> None:
    path = stored(tmp_path, TEXT)
    assert read_bug_file(path) == BugFile(id="ao-1", where=str(path), bug=BUG, case=CASE, **TABLES)


@example(case=Case(), stated={}, missing={"tp": "\r\n"})
@given(case=POSSIBLE_CASES, stated=texts, missing=texts)
def test_every_case_and_text_is_kept(
    tmp_path_factory: pytest.TempPathFactory, case: Case, stated: dict[str, str], missing: dict[str, str]
) -> None:
    bug = Bug(title="t", link="l", status="open", symptom="unknown")
    path = stored(tmp_path_factory.mktemp("bugs"), "")
    written = BugFile(id="ao-1", where=str(path), bug=bug, case=case, stated=stated, missing=missing)
    path.write_text(write_bug_file(written, heading="Where it came from.\nAnd when."))
    assert read_bug_file(path) == written


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('status = "fixed"', 'status = "gone"', r"Invalid enum value 'gone'"),
        ('symptom = "wrong_numbers"', 'symptom = "odd"', r"Invalid enum value 'odd'"),
        ("amax_without_abs", "amax_without_ab", r"did you mean amax_without_abs"),
        ('status = "fixed"', 'status = "live"', r"a live bug needs no planted fault"),
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
        assert [case_id(case) for case in select_cases(project, Query(sources=(source,)))] == [case_id(CASE)]


def test_a_folder_without_a_runnable_bug_selects_nothing(tmp_path: Path) -> None:
    stored(tmp_path, REFUSED)
    with pytest.raises(NothingSelected):
        select_cases(Project(root=tmp_path, state=tmp_path), Query(sources=("bugs",)))
