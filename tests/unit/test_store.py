"""The store: whatever interrupts a run, what was finished stays readable."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.result import CaseResult
from harness.store import FILE_NAME, RunStore
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
    store = RunStore(tmp_path / "run")
    stored = (result("a"), result("b", Verdict.CRASH))
    for each in stored:
        store.append(each)
    assert store.read().results == stored
    assert store.read().damaged == ()
    assert RunStore(tmp_path / "run").read() == store.read()


def test_losses_that_are_no_numbers_come_back(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.append(result(losses=(math.nan, math.inf, -math.inf, 0.1)))
    run = store.read().results[0].run
    assert run is not None
    assert [repr(step.loss) for step in run.traces[0].steps] == ["nan", "inf", "-inf", "0.1"]


def test_an_empty_folder_is_an_empty_run(tmp_path: Path) -> None:
    assert RunStore(tmp_path / "nowhere").read().results == ()


def test_a_line_cut_short_anywhere_is_reported_and_costs_nothing_else(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.append(result("a"))
    whole = store.path.read_bytes()
    store.append(result("b", Verdict.CRASH))
    both = store.path.read_bytes()
    for length in range(len(whole) + 1, len(both) - 1, 31):
        store.path.write_bytes(both[:length])
        found = store.read()
        assert [each.case_id for each in found.results] == ["a"]
        assert len(found.damaged) == 1 and f"{FILE_NAME}:2: not a result" in found.damaged[0].text


def test_storing_goes_on_after_a_line_cut_short(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.append(result("a"))
    store.path.write_bytes(store.path.read_bytes() + b'{"schema":2,"resu')
    store.append(result("c"))
    found = store.read()
    assert [each.case_id for each in found.results] == ["a", "c"]
    assert len(found.damaged) == 1


@pytest.mark.parametrize("line", [b"[]", b"\xff\xfe", b'{"schema":1,"result":{}}', b"{}"])
def test_a_line_that_is_no_result_is_reported(tmp_path: Path, line: bytes) -> None:
    store = RunStore(tmp_path)
    store.path.write_bytes(line + b"\n")
    assert store.read().results == () and len(store.read().damaged) == 1


def test_another_schema_is_reported_as_such(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.append(result())
    store.path.write_bytes(store.path.read_bytes().replace(b'"schema":2', b'"schema":1'))
    assert "has schema 1, this version reads schema 2" in store.read().damaged[0].text


def test_the_last_result_of_a_case_counts(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for each in (result("a", Verdict.CRASH), result("b"), result("a")):
        store.append(each)
    assert [(each.case_id, each.verdict) for each in store.read().results] == [
        ("b", Verdict.PASSED),
        ("a", Verdict.PASSED),
    ]


def test_everything_that_is_not_good_is_failed(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for verdict in Verdict:
        store.append(result(verdict.value, verdict))
    good = {Verdict.PASSED.value, Verdict.KNOWN.value}
    assert store.read().failed_ids == tuple(verdict.value for verdict in Verdict if verdict.value not in good)


def test_many_threads_store_at_once(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    threads = [threading.Thread(target=store.append, args=(result(f"case{number}"),)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.read().results) == 16 and not store.read().damaged


def test_an_unreadable_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(HarnessError, match="cannot be read"):
        RunStore(tmp_path).read()
