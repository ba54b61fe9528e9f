"""Results that outlive their run: the list of runs, resuming one, shards that become one, imports and history."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.jsonform import with_checksum
from tests.acceptance.conftest import REPOSITORY, Command
from tests.lines import lines_of, read_run

CPU = ("--device", "cpu")


def waiting_tier(project: Command, good: int, waiting: int) -> None:
    """A tier of cases that end at once, and of cases that go on when the run was stopped: `stop_after` lets them."""
    project.environment["GO"] = str(project.folder / "go")
    project.planted("waiting", *[0] * good, *[8] * waiting)


def stop_after(project: Command, done: int, *arguments: str, sign: signal.Signals = signal.SIGINT) -> None:
    """Run the tier and end the run by a signal once so many cases are done. Its ranks are gone then."""
    process = project.start_until(f"[cases {done}/", "run", "waiting", *arguments, *CPU, "-j", "1")
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(sign)
    process.communicate(timeout=30)
    psutil.wait_procs(family, timeout=30)
    Path(project.environment["GO"]).touch()


def stored_lines(project: Command) -> list[str]:
    """The ids in the results of the only stored run, in the order of storing."""
    lines = map(json.loads, stored_file(project).read_text().splitlines())
    return [line["id"] for line in lines if line["line"] == "case"]


def stored_file(project: Command) -> Path:
    (file,) = (project.folder / "state").glob("runs/*/*.jsonl")
    return file


def listed(project: Command) -> list[Any]:
    runs: list[Any] = json.loads(project.call("runs", "list", "--json", "-").stdout)
    return runs


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_is_finished(project: Command, sign: signal.Signals) -> None:
    waiting_tier(project, 2, 3)
    stop_after(project, 2, "--name", "v1", "--timeout-s", "77", sign=sign)
    before = stored_lines(project)
    assert len(before) == 2
    assert listed(project)[0]["state"] == ("killed" if sign is signal.SIGKILL else "interrupted")
    out = project.folder / "whole.json"
    done = project.call("run", "--resume", "--json", str(out), "-j", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 5 cases are left" in done.stderr and "the run v1, started 20" in done.stderr
    after = stored_lines(project)
    assert after[:2] == before and len(set(after)) == len(after) == 5
    document = read_run(out)
    ids = [case["id"] for case in json.loads(project.call("list", "waiting", "--json", "-").stdout)]
    assert [case["id"] for case in document["cases"]] == ids
    assert (document["totals"]["passed"], document["interrupted"], document["name"]) == (5, False, "v1")
    assert all(case["command"].endswith("--timeout-s 77") for case in document["cases"])
    assert "5 cases: 5 passed" in done.stdout
    (run,) = listed(project)
    assert (run["state"], run["totals"]["passed"]) == ("finished", 5)
    again = project.call("run", "--resume")
    assert again.returncode == 3 and "no run that was interrupted or killed has cases left" in again.stderr


def test_a_resumed_run_fails_for_what_failed_before(project: Command) -> None:
    project.environment["GO"] = str(project.folder / "go")
    axes = 'recipe = "tensorwise", steps = 3, loss_tolerance = 0.05'
    layouts = ("dp_shard = 4, seed = 1", "dp_shard = 2", "dp_shard = 2, seed = 8")  # largest worlds first
    project.cases("waiting", *(f"{axes}, {layout}" for layout in layouts))
    stop_after(project, 1)
    done = project.call("run", "--resume")
    assert done.returncode == 1 and "1 crash" in done.stdout and "ValueError: planted failure" in done.stdout


def test_the_seconds_and_the_budget_are_those_of_the_whole_run(project: Command) -> None:
    (project.folder / "golden" / "evidence").mkdir(exist_ok=True)
    costs = REPOSITORY / "golden" / "evidence" / "costs.json"
    shutil.copy(costs, project.folder / "golden" / "evidence")
    waiting_tier(project, 1, 5)
    stop_after(project, 1, "--budget-s", "16")
    file = stored_file(project)
    start, *cases, end = file.read_text().splitlines(keepends=True)
    left_out, first = json.loads(start)["left_out"], json.loads(end)
    del first["crc32"]
    longer = with_checksum(json.dumps(first | {"wall_s": first["wall_s"] + 1000}).encode()).decode()
    file.write_text("".join((start, *cases, longer, "\n")))
    out = project.folder / "whole.json"
    assert project.call("run", "--resume", "--json", str(out)).returncode == 0
    document = read_run(out)
    assert left_out and document["left_out"] == left_out
    assert {case["id"] for case in document["cases"]}.isdisjoint(left_out)
    assert document["wall_s"] == json.loads(file.read_text().splitlines()[-1])["wall_s"]
    assert 1000 + first["wall_s"] + max(case["seconds"] for case in document["cases"][1:]) < document["wall_s"] < 1100


def test_a_run_of_another_environment_or_with_an_edited_patch_is_not_resumed(project: Command) -> None:
    waiting_tier(project, 1, 2)
    patch = project.folder / "patch.py"
    patch.write_text("def apply():\n    pass\n")
    stop_after(project, 1, "--name", "v1", "--inject", "patch.py:apply")
    other = Command(project.folder, project.environment | {"FP8_HARNESS_RANK_THREADS": "2"})
    done = other.call("run", "--resume")
    assert done.returncode == 2
    assert "this changed: limits none -> FP8_HARNESS_RANK_THREADS=2" in done.stderr
    assert f"`fp8-harness run waiting --device cpu --inject {patch}:apply --name v1`" in done.stderr, done.stderr
    patch.write_text("def apply():\n    return 1\n")
    done = project.call("run", "--resume")
    assert done.returncode == 2 and "injected patch.py:apply " in done.stderr
    assert len(stored_lines(project)) < 3
    patch.write_text("def apply():\n    pass\n")
    assert project.call("run", "--resume").returncode == 0


@pytest.mark.parametrize(
    "more", ["smoke", "single-bf16-v2048-f32", "--select tp=1", "--lf", "--name x", "--timeout-s 9"]
)
def test_nothing_else_is_selected_besides(shared: Command, more: str) -> None:
    done = shared.call("run", "--resume", *more.split())
    assert done.returncode == 2 and "a resumed run keeps its cases" in done.stderr


def test_a_run_that_goes_on_is_listed_and_not_resumed(project: Command) -> None:
    project.planted("hanging", 2)
    process = project.start("run", "hanging", *CPU)
    while not (runs := listed(project)):
        assert process.poll() is None
    assert [(run["state"], run["cases"], run["totals"]["not_run"]) for run in runs] == [("running", 1, 1)]
    assert project.call("run", "--resume").returncode == 3
    refused = project.call("runs", "remove", "last")
    assert refused.returncode == 2 and "has not ended yet" in refused.stderr
    while not psutil.Process(process.pid).children():  # from then on it has a handler, whatever its parent ignores
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert project.call("runs", "remove", "last").returncode == 0


def test_list_of_runs(project: Command) -> None:
    assert project.call("runs", "list").stdout == "no runs are stored\n"
    assert project.call("run", "smoke", *CPU, "--select", "recipe=bf16", "--name", "v1").returncode == 0
    assert project.call("run", "smoke", *CPU, "--select", "recipe=rowwise").returncode == 0
    lines = project.call("runs", "list").stdout.splitlines()
    assert len(lines) == 2 and "finished  2 cases: 2 passed  " in lines[0] and "finished  " in lines[1]
    assert lines[0].startswith("0  20") and lines[1].startswith("1  20") and "  v1; " in lines[1]
    assert listed(project)[1]["argv"] == ["smoke", "--select", "recipe=bf16", "--device", "cpu", "--name", "v1"]
    assert "removed: v1, started 20" in project.call("runs", "remove", "v1").stdout
    assert len(listed(project)) == 1


def test_shards_of_two_machines_become_one_run_and_are_imported(project: Command) -> None:
    shards = project.folder / "shards"
    shards.mkdir()
    for name, select in (("a", "recipe=bf16"), ("b", "recipe!=bf16")):
        machine = Command(project.folder, {"FP8_HARNESS_STATE": str(project.folder / f"state-{name}")})
        done = machine.call("run", "smoke", *CPU, "--select", select, "--json", str(shards / f"{name}.json"))
        assert done.returncode == 0, done.stderr
    done = project.call("runs", "merge", "all.json", "shards/")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all.json: 2 shards, 4 cases: 4 passed\n"
    document = read_run(project.folder / "all.json")
    assert document["exit_code"] == 0 and document["environment"] is not None
    for words in (("compare", "shards", "all.json"), ("show", "shards/")):
        answer = project.call(*words)
        assert answer.returncode == 0 and ("GO" if words[0] == "compare" else "4 cases: 4 passed") in answer.stdout, (
            answer.stderr
        )
    first, again = (project.call("runs", "import", "all.json", "--name", "v1") for _ in range(2))
    assert "all.json: imported: 4 cases" in first.stdout and "all.json: is there already" in again.stdout
    assert "shards/: is there already as v1: 4 cases" in project.call("runs", "import", "shards/").stdout
    (run,) = listed(project)
    assert (run["name"], run["imported"], run["totals"]["passed"]) == ("v1", True, 4)
    case = document["cases"][0]["id"]
    assert project.call("run", *CPU, case).returncode == 0
    shown = project.call("runs", "history", case)
    assert shown.returncode == 0 and len([line for line in shown.stdout.splitlines() if line.startswith("20")]) == 2
    assert "FLAKY" not in shown.stdout and "NONDETERMINISTIC" not in shown.stdout
    assert project.call("runs", "remove", "v1").returncode == 0 and len(listed(project)) == 1


def contradiction(project: Command, **changes: str) -> Any:
    """Results in good.json, and others of the same case in bad.json, which are returned."""
    project.planted("bad", 0)
    assert project.call("run", "bad", *CPU, "--json", "good.json").returncode == 0
    document = read_run(project.folder / "good.json") | changes
    document["cases"][0]["verdict"] = "hang"
    (project.folder / "bad.json").write_text(lines_of(document))
    return document


def test_shards_that_contradict_are_refused(project: Command) -> None:
    document = contradiction(project, started="2999-01-01T00:00:00+00:00")
    merge = ("runs", "merge", "all.json", "good.json", "bad.json")
    done = project.call(*merge)
    assert done.returncode == 2
    assert "good.json and bad.json have different results of it: passed and hang" in done.stderr
    assert not (project.folder / "all.json").exists()
    assert project.call(*merge, "--latest").returncode == 0
    assert read_run(project.folder / "all.json")["exit_code"] == 1
    document["environment"]["cpu"] = "another"
    (project.folder / "bad.json").write_text(lines_of(document))
    refused = project.call(*merge, "--latest")
    assert refused.returncode == 2 and "the environments differ: good.json and bad.json: cpu " in refused.stderr
    mixed = project.call(*merge, "--latest", "--mixed")
    assert mixed.returncode == 0 and "note: the environments differ: " in mixed.stderr


def test_history_of_a_flaky_case_and_of_what_never_ran(project: Command, shared: Command) -> None:
    name = contradiction(project)["cases"][0]["id"]
    assert project.call("runs", "import", "bad.json").returncode == 0
    assert "FLAKY" in project.call("runs", "history", name).stdout
    summary = project.call("runs", "history", "--select", "dp_shard=2")
    assert summary.stdout.startswith(f"{name}  2 runs  1 ") and "  FLAKY  last change 20" in summary.stdout
    (history,) = json.loads(project.call("runs", "history", "--json", "-").stdout)
    assert history["flaky"] and len(history["runs"]) == 2
    (last,) = json.loads(project.call("runs", "history", name, "--runs", "1", "--json", "-").stdout)
    assert len(last["runs"]) == 1 and not last["flaky"]
    done = shared.call("runs", "history", "tp8-rowwise-v2048-f32")
    assert done.returncode == 3 and "no run of it is stored" in done.stderr
    assert shared.call("runs", "history", "no-case").returncode == 2
