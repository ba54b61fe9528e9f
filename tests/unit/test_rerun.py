"""What `--lf` runs: all that is not known to be good in the last run, and a note on what cannot be told."""

from __future__ import annotations

import pytest

from harness.project import Project
from harness.result import RunStart
from harness.run_options import RunOptions
from harness.running.selection import NothingSelected
from harness.store import RunStore
from harness.verdict import Verdict
from harness.workflow import rerun_query
from tests.builders import make_result

GOOD, BAD, THIRD = "single-rowwise-v2048-f32", "fsdp2-rowwise-v2048-f32", "tp2-rowwise-v2048-f32"


def new_run(project: Project, *planned: str) -> RunStore:
    store = RunStore(project.new_run())
    if planned:
        store.begin(RunStart(cases=planned))
    return store


def test_a_whole_run_has_only_its_failures_and_no_notes(project: Project) -> None:
    store = new_run(project, GOOD, BAD)
    store.append(make_result(GOOD))
    store.append(make_result(BAD, Verdict.CRASH))
    rerun = rerun_query(project)
    assert (rerun.query.sources, rerun.notes) == ((BAD,), ())


def test_cases_that_a_killed_run_never_reached_run_again(project: Project) -> None:
    new_run(project, GOOD, BAD, THIRD).append(make_result(GOOD))
    rerun = rerun_query(project)
    assert rerun.query.sources == (BAD, THIRD)
    (note,) = rerun.notes
    assert note == (
        "2 of 3 cases of the last run have no result: it was killed or still runs, or the result is damaged. "
        "They run now."
    )
    new_run(project, GOOD).append(make_result(GOOD))
    new_run(project, BAD, THIRD)
    assert rerun_query(project).query.sources == (BAD, THIRD)


@pytest.mark.parametrize(
    ("planned", "keep", "note"),
    [((GOOD, BAD), 20, "1 of 2 cases of the last run has no result"), ((), 80, ":2: not a line of results: ")],
    ids=["in the list of cases", "named by the line"],
)
def test_the_case_of_a_damaged_line_runs_again(
    project: Project, planned: tuple[str, ...], keep: int, note: str
) -> None:
    store = new_run(project, *planned)
    store.append(make_result(GOOD))
    before = store.path.stat().st_size
    store.append(make_result(BAD))
    store.path.write_bytes(store.path.read_bytes()[: before + keep])
    rerun = rerun_query(project)
    assert rerun.query.sources == (BAD,) and note in rerun.notes[0]


@pytest.mark.parametrize("text", [b'{"line":"ca', b'{"line":"case","id":"no-such-case","ver'])
def test_a_damaged_line_that_names_no_case_is_noted(project: Project, text: bytes) -> None:
    store = new_run(project)
    store.append(make_result(BAD, Verdict.CRASH))
    store.path.write_bytes(store.path.read_bytes() + text)
    rerun = rerun_query(project)
    assert rerun.query.sources == (BAD,)
    (note,) = rerun.notes
    assert note.startswith(f"{store.path}:2: not a line of results: ")
    assert note.endswith("It does not say which case it was. Fix: run the tier of that run again.")


def test_nothing_but_a_line_that_names_no_case_is_not_a_good_run(project: Project) -> None:
    store = new_run(project)
    store.append(make_result(GOOD))
    store.path.write_bytes(store.path.read_bytes() + b"{")
    with pytest.raises(NothingSelected, match=r"\.jsonl:2: .* Fix: run the tier of that run again\."):
        rerun_query(project)


def test_a_damaged_list_of_cases_is_noted(project: Project) -> None:
    store = new_run(project, GOOD, BAD)
    store.append(make_result(BAD, Verdict.CRASH))
    store.path.write_bytes(store.path.read_bytes().replace(b'{"line":"start","schema":5', b"["))
    (note,) = rerun_query(project).notes
    assert ".jsonl:1: not a line of results" in note
    store = new_run(project, GOOD)
    store.append(make_result(GOOD, Verdict.CRASH))
    store.path.write_bytes(store.path.read_bytes().replace(b'"schema":5', b'"schema":2'))
    with pytest.raises(NothingSelected, match=r"it has schema 2, this version reads schema 5.* Fix: run the tier"):
        rerun_query(project)


def test_a_run_in_which_all_is_good_has_nothing_to_run(project: Project) -> None:
    new_run(project, GOOD).append(make_result(GOOD))
    with pytest.raises(NothingSelected, match="nothing failed in the last run"):
        rerun_query(project)


def test_the_options_of_the_run_come_back(project: Project) -> None:
    options = RunOptions(
        device="cpu", backend="gloo", timeout_s=3.0, inject=("/fix.py:apply", "fault:amax_without_abs")
    )
    RunStore(project.new_run()).begin(RunStart(cases=(GOOD,), options=options))
    rerun_options = rerun_query(project).options
    assert rerun_options == options
    words = "--device cpu --backend gloo --timeout-s 3 --inject /fix.py:apply --inject fault:amax_without_abs"
    assert rerun_options.words == tuple(words.split())
