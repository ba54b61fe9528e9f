"""The store: whatever interrupts a run, what was finished stays readable."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.durable import WriteFailed
from harness.errors import HarnessError
from harness.result import CaseResult, RunResult
from harness.store import RunStore, run_lines
from harness.verdict import NotJudged, Verdict
from tests.builders import a_finding, make_result, make_trace, run_of


def result(case_id: str = "a", verdict: Verdict = Verdict.PASSED, *, losses: tuple[float, ...] = (7.0,)) -> CaseResult:
    return make_result(
        case_id,
        verdict,
        findings=(a_finding(check="finite", message="two\nlines\u2028", found="NaN"),),
        run=run_of(make_trace(losses=losses, converted_fqns=("output",))),
        checks=("finite",),
        not_judged=(NotJudged(check="parity", reason="no rank recorded sketches"),),
    )


def test_what_is_stored_is_read(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    stored = (result("a"), result("b", Verdict.CRASH))
    for each in stored:
        store.append(each)
    assert store.read().results == tuple(replace(each, run=None) for each in stored)
    assert store.read().damaged == {}
    assert RunStore(tmp_path / "run.jsonl").read() == store.read()


def test_losses_that_are_no_numbers_come_back(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    store.append(result(losses=(math.nan, math.inf, -math.inf, 0.1)))
    assert [repr(loss) for loss in store.read().results[0].losses] == ["nan", "inf", "-inf", "0.1"]


def test_a_file_that_is_not_there_is_an_empty_run(tmp_path: Path) -> None:
    assert RunStore(tmp_path / "nowhere").read().results == ()


def test_a_line_cut_short_anywhere_is_reported_and_costs_nothing_else(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    store.append(result("a"))
    whole = store.path.read_bytes()
    store.append(result("b", Verdict.CRASH))
    both = store.path.read_bytes()
    for length in range(len(whole) + 1, len(both) - 1, 31):
        store.path.write_bytes(both[:length])
        found = store.read()
        assert [each.case_id for each in found.results] == ["a"]
        (told,) = found.damaged
        assert f"{store.path}:2: not a line of results" in told


def test_storing_goes_on_after_a_line_cut_short(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    store.append(result("a"))
    store.path.write_bytes(store.path.read_bytes() + b'{"line":"case","i')
    store.append(result("c"))
    found = store.read()
    assert [each.case_id for each in found.results] == ["a", "c"]
    assert len(found.damaged) == 1


@pytest.mark.parametrize("line", [b"[]", b"\xff\xfe", b'{"line":"case"}', b"{}", b'{"line":"other"}'])
def test_a_line_that_is_no_result_is_reported(tmp_path: Path, line: bytes) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    store.path.write_bytes(line + b"\n")
    assert store.read().results == () and len(store.read().damaged) == 1


def test_another_schema_is_reported_as_such(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    store.path.write_bytes(run_lines(RunResult(results=(result(),))).replace(b'"schema":3', b'"schema":2'))
    (told,) = store.read().damaged
    assert "it has schema 2, this version reads schema 3" in told and store.read().results == ()


def test_the_last_result_of_a_case_counts(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    for each in (result("a", Verdict.CRASH), result("b"), result("a")):
        store.append(each)
    assert {each.case_id: each.verdict for each in store.read().results} == {
        "a": Verdict.PASSED,
        "b": Verdict.PASSED,
    }


def test_many_threads_store_at_once(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    threads = [threading.Thread(target=store.append, args=(result(f"case{number}"),)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.read().results) == 16 and not store.read().damaged


def test_an_unreadable_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="cannot be read"):
        RunStore(tmp_path).read()


def test_what_cannot_be_written_is_noted_or_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    notes: list[str] = []
    store = RunStore(tmp_path / "file" / "run.jsonl", notes.append)
    store.append(result())
    assert notes[0].startswith("result not stored: ") and store.path.name in notes[0]
    with pytest.raises(WriteFailed):
        RunStore(store.path).append(result())
