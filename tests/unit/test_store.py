"""What is written to disk survives: whole files, JSON with every number, the file of a run."""

import json
import math
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.durable import WriteFailed, append_line, write_whole
from harness.errors import HarnessError
from harness.jsonform import compact, from_json, to_json
from harness.result import CaseResult
from harness.store import RunStore, run_lines
from harness.verdict import NotJudged, Verdict
from tests.builders import a_finding, make_measured, make_result, make_results, make_trace, run_of


def result(case_id: str = "a", verdict: Verdict = Verdict.PASSED) -> CaseResult:
    return make_result(
        case_id,
        verdict,
        findings=(a_finding(check="finite", message="two\nlines\u2028", found="NaN"),),
        run=run_of(make_trace(losses=(7.0,), converted_fqns=("output",))),
        checks=("finite",),
        not_judged=(NotJudged(check="parity", reason="no rank recorded sketches"),),
    )


def test_the_last_result_of_a_case_counts(tmp_path: Path) -> None:
    store, last = RunStore(tmp_path / "run.jsonl"), (result("a"), result("b"))
    for case in (result("a", Verdict.CRASH), *reversed(last)):
        store.append(case)
    assert store.read().results == tuple(replace(case, run=None) for case in last) and not store.read().damaged


def test_files_that_are_not_there_unreadable_or_of_another_schema(tmp_path: Path) -> None:
    assert RunStore(tmp_path / "nowhere").read().results == ()
    with pytest.raises(HarnessError, match="cannot be read"):
        RunStore(tmp_path).read()
    store = RunStore(tmp_path / "run.jsonl")
    store.path.write_bytes(LINES.replace(b'"schema":5', b'"schema":2'))
    (damage,) = store.read().damaged
    assert "it has schema 2, this version reads schema 5" in damage and store.read().results == ()


def test_a_line_cut_short_anywhere_is_reported_and_costs_nothing_else(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    store.append(result("a"))
    whole = store.path.read_bytes()
    store.append(result("b", Verdict.CRASH))
    both = store.path.read_bytes()
    for length in range(len(whole) + 1, len(both) - 1, 31):
        store.path.write_bytes(both[:length])
        run = store.read()
        assert [case.case_id for case in run.results] == ["a"]
        (damage,) = run.damaged
        assert f"{store.path}:2: not a line of results" in damage
    store.append(result("c"))  # storing goes on after such a line
    assert [case.case_id for case in store.read().results] == ["a", "c"] and len(store.read().damaged) == 1


@pytest.mark.parametrize("line", [b"[]", b"\xff\xfe", b'{"line":"case"}', b"{}", b'{"line":"other"}'])
def test_a_line_that_is_no_result_is_reported(tmp_path: Path, line: bytes) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    store.path.write_bytes(line + b"\n")
    assert store.read().results == () and len(store.read().damaged) == 1


A_RUN = make_results(
    make_result("single-rowwise-v2048-f32", measured=make_measured(), run=run_of(make_trace(losses=(8.0, 7.5)))),
    make_result("tp2-rowwise-v2048-f32", Verdict.CRASH, findings=(a_finding(check="finite", message="x"),)),
    started="2026-01-01T00:00:00+00:00",
)
LINES = run_lines(A_RUN)


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changing") / "run.jsonl"


@given(st.integers(0, len(LINES) - 1), st.binary(min_size=1, max_size=4))
def test_bytes_that_change_are_never_read_silently(changing: Path, at: int, new: bytes) -> None:
    changed = LINES[:at] + new + LINES[at + len(new) :]
    assume(changed != LINES)
    changing.write_bytes(LINES)
    before = RunStore(changing).read()
    changing.write_bytes(changed)
    store = RunStore(changing)
    run = store.read()
    assert run.damaged and all(text.startswith(f"{changing}:") for text in run.damaged)
    assert store.read_damage() == tuple(run.damaged)
    assert store.read_start() in (None, before.start) and store.read_end() in (None, before.end)
    whole = {case.case_id: case for case in before.results}
    for case in run.results:
        assert not case.ran or case == whole[case.case_id]
        assert store.result_of(case.case_id) in (None, whole.get(case.case_id))
    assert store.numbers(lambda _: True).keys() <= whole.keys()


@pytest.mark.parametrize("rewritten", [json.dumps, lambda value: json.dumps(value, separators=(",", ":")) + " "])
def test_a_line_that_was_rewritten_is_not_read(tmp_path: Path, rewritten: Callable[[object], str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(rewritten(json.loads(line)) + "\n" for line in LINES.splitlines()))
    run = RunStore(path).read()
    assert len(run.damaged) == 4 and not any(case.ran for case in run.results)


def test_whole_lines_may_be_dropped(tmp_path: Path) -> None:
    start, first, *_ = LINES.splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_bytes(start + first)
    run = RunStore(tmp_path / "run.jsonl").read()
    assert not run.damaged and [case.ran for case in run.results] == [True, False]


def test_many_threads_store_at_once(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    threads = [threading.Thread(target=store.append, args=(result(f"case{number}"),)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.read().results) == 16 and not store.read().damaged


def test_what_cannot_be_written_is_noted_or_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    notes: list[str] = []
    store = RunStore(tmp_path / "file" / "run.jsonl", notes.append)
    store.append(result())
    assert notes[0].startswith("result not stored: ") and store.path.name in notes[0]
    with pytest.raises(WriteFailed):
        RunStore(store.path).append(result())


FULL = Path("/dev/full")


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a/b.json"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"one")
    with pytest.raises(TypeError):
        write_whole(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_written_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "a", []

    def fsync(handle: int) -> None:
        synced.append((os.pread(handle, 99, 0), path.read_bytes() if path.exists() else b""))

    monkeypatch.setattr(os, "fsync", fsync)
    append_line(path, b"one")
    write_whole(path, b"two")
    assert synced == [(b"one\n", b"one\n"), (b"two", b"one\n")], "a file is replaced when its new bytes are safe"


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_clear_error() -> None:
    for write in (write_whole, append_line):
        with pytest.raises(WriteFailed, match=r"^/dev/full: cannot write: No space left on device"):
            write(FULL, b"x")


def test_a_file_in_place_of_a_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    for write in (write_whole, append_line):
        with pytest.raises(WriteFailed) as caught:
            write(tmp_path / "a/b", b"x")
        assert caught.value.where == str(tmp_path / "a/b")


def test_lines_grow_and_an_unfinished_one_is_closed_first(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, b"one")
    append_line(path, b"two")
    assert path.read_bytes() == b"one\ntwo\n"
    path.write_bytes(b"one\ntw")
    append_line(path, b"three")
    assert path.read_bytes() == b"one\ntw\nthree\n"


class Thing(msgspec.Struct, frozen=True):
    """A value with everything that results have."""

    number: float
    numbers: tuple[float, ...]
    named: dict[str, float]
    maybe: float | None
    count: int
    text: str | None


texts = st.text() | st.sampled_from(["NaN", "nan", "null", "None", "Infinity", "1.5", "true", ""])
things = st.builds(
    Thing,
    number=st.floats(),
    numbers=st.lists(st.floats()).map(tuple),
    named=st.dictionaries(texts, st.floats(), max_size=3),
    maybe=st.none() | st.floats(),
    count=st.integers(-(2**53), 2**53),
    text=st.none() | texts,
)


def bits(value: object) -> object:
    """The value with every float spelled so that NaN equals NaN and -0.0 differs from 0.0."""
    match value:
        case float():
            return value.hex()
        case dict():
            return {key: bits(item) for key, item in value.items()}
        case list() | tuple():
            return [bits(item) for item in value]
        case _:
            return value


@given(things, st.sampled_from([0, 2]))
def test_what_is_written_is_read(thing: Thing, indent: int) -> None:
    read_back = from_json(to_json(thing, indent=indent), Thing)
    assert bits(msgspec.to_builtins(read_back)) == bits(msgspec.to_builtins(thing))


scalars = st.text(max_size=99) | st.integers() | st.none()
plain = st.recursive(scalars, lambda some: st.lists(some, min_size=3) | st.dictionaries(texts, some), max_leaves=9)


@given(plain)
def test_compact_json_is_the_same_value(value: object) -> None:
    assert json.loads(compact(value)) == value


@given(things)
def test_it_is_strict_json_on_one_line(thing: Thing) -> None:
    text = to_json(thing)
    assert b"\n" not in text

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)


def test_not_a_number_is_never_null_and_null_is_no_number() -> None:
    thing = Thing(math.nan, (math.inf, -math.inf), {}, math.nan, 1, None)
    plain = json.loads(to_json(thing))
    assert (plain["number"], plain["numbers"], plain["maybe"]) == ("NaN", ["Infinity", "-Infinity"], "NaN")
    assert plain["text"] is None
    text = to_json(Thing(1.0, (), {}, None, 1, None)).replace(b'"number":1.0', b'"number":null')
    with pytest.raises(msgspec.ValidationError):
        from_json(text, Thing)
