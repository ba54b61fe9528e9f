"""`fp8-harness run` as its users meet it: verdicts, reports, exit codes, interruption."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import psutil
import pytest

from harness.checks.failures import STUCK
from harness.checks.judge import CHECKS
from tests.acceptance.conftest import Inside
from tests.acceptance.fake_program import EXITS, FAR, HANGS, NAN, ONE_CALL, RAISES
from tests.fork_servers import ForkServers
from tests.lines import read_run, tree

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def common(shared: Command, warm: ForkServers) -> Inside:
    """The project of tests that do not change it."""
    return Inside(shared.folder, fork_servers=warm)


@pytest.fixture
def project(project: Command, warm: ForkServers) -> Inside:
    return Inside(project.folder, fork_servers=warm)


def test_good_run(project: Inside, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What one run says and leaves: results, a command for each, logs, times, and nothing in the temporary folder."""
    left = tmp_path_factory.mktemp("tmp")
    out, junit = project.folder / "result.json", project.folder / "junit.xml"
    files = ("--json", str(out), "--junit", str(junit), "--keep-logs", "logs", "--durations", "1")
    before_s = ended_children_s()
    done = project.having(TMPDIR=str(left)).apart.run("run", "smoke", *CPU, "--timeout-s", "90", *files)
    used_s = ended_children_s() - before_s
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 cases: 4 passed" in done.stdout
    assert "[cases 4/4]" in done.stderr
    (slowest,) = done.stdout.partition("\nslowest 1 case\n")[2].splitlines()
    assert " s  " in slowest
    assert not list(left.iterdir()) and len(list((project.folder / "logs").iterdir())) == 4
    document = read_run(out)
    assert {case["verdict"] for case in document["cases"]} == {"passed"}
    told_s = sum(document["all_cpu_s"].values())  # without what prints and writes it, half of what these ranks take
    assert 0.5 * used_s < told_s < used_s + 0.1 and f" s wall, {told_s:.1f} s CPU (" in done.stdout
    listed = json.loads(project.run("list", "smoke", "--json", "-").stdout)
    assert [case["id"] for case in document["cases"]] == [case["id"] for case in listed]
    for case in document["cases"]:
        program = "FP8_HARNESS_PROGRAM=tests.acceptance.fake_program"
        assert case["command"] == f"{program} fp8-harness run {case['id']} --timeout-s 90"
        asked, left_out = set(case["checks"]), {skipped["check"]: skipped["reason"] for skipped in case["not_judged"]}
        if case["expectation"] is None:
            assert asked | left_out.keys() == {check.name for check in CHECKS} and "matmuls" in asked
            assert left_out["parity"] == "the ranks were not asked to record sketches"
        else:
            assert (asked, left_out) == ({"alignment"}, {})
    assert len(ElementTree.parse(junit).findall(".//testcase")) == 4
    again = project.shell(case["command"])
    assert again.returncode == 0 and "1 case: 1 passed" in again.stdout, again.stderr


def ended_children_s() -> float:
    """User + system seconds of all that this process has started and waited for."""
    return sum(os.times()[2:4])


def failing(project: Inside, seed: int, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the case document and stderr of a run of one planted case."""
    project.planted("bad", seed)
    update = project.run("baseline", "update", "bad", *CPU, "--reason", "bad seed")
    assert update.returncode == 0, update.stdout + update.stderr
    out = project.folder / "bad.json"
    done = project.run("run", "bad", *CPU, "--json", str(out), *arguments)
    return done.returncode, read_run(out)["cases"][0], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("seed", "verdict", "says"),
    [
        (RAISES, "crash", "ValueError: planted failure"),
        (NAN, "numeric", "step 2"),
        (FAR, "numeric", "loss_vs_golden/loss: the loss differs by +0.3"),
        (EXITS, "crash", "7"),
    ],
)
def test_what_goes_wrong_on_ranks_is_told(project: Inside, seed: int, verdict: str, says: str) -> None:
    code, case, text = failing(project, seed)
    assert (code, case["verdict"]) == (1, verdict) and says in text
    assert "reproduce: FP8_HARNESS_PROGRAM=tests.acceptance.fake_program fp8-harness run " in text
    assert ("NaN" in case["losses"]) is (seed == NAN)


def test_rank_hangs(project: Inside) -> None:
    code, case, text = failing(project, HANGS, "--timeout-s", "2")
    assert (code, case["verdict"]) == (1, "hang")
    first = case["findings"][0]
    assert (first["rule"], first["ranks"]) == (STUCK.name, [0]) and first["values"]["end"].startswith(
        "stuck: in _behave ("
    )
    assert "in no collective" in text and "most recent call first" not in text
    assert "in rank_main" in case["failures"][0]["traceback"]


def test_what_disagrees_with_a_formula_is_a_fault_with_a_verified_torch_and_changed_with_another(
    project: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, case, _ = failing(project, ONE_CALL)
    assert (code, case["verdict"]) == (1, "invariant")
    metadata = project.folder / "torch-2.99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n")
    monkeypatch.syspath_prepend(str(project.folder))
    code, case, text = failing(project, ONE_CALL)
    assert (code, case["verdict"]) == (5, "changed")
    (finding,) = case["findings"]
    assert finding["formula"] == "matmuls"
    assert finding["differs"] == "torch 2.99.0 differs from what holds since 2.13.0"
    assert finding["differs"] in text


def test_without_a_golden_the_reference_is_run_and_named(project: Inside) -> None:
    project.planted("new", 0, steps=4)
    done = project.run("run", "new", "--json", str(project.folder / "new.json"), *CPU)
    assert done.returncode == 0
    assert "1 golden not stored: " in done.stderr and "baseline update new --device cpu --missing" in done.stderr
    assert "1 case compared with BF16 references that were run here" in done.stdout
    (case,) = read_run(project.folder / "new.json")["cases"]
    assert case["golden"] == "run here"


def test_shards_run_every_case_once_and_say_which_they_are(common: Inside, tmp_path: Path) -> None:
    ran: list[str] = []
    for index in range(1, 6):
        out = tmp_path / f"{index}.json"
        done = common.run("run", "smoke", *CPU, "--shard", f"{index}/5", "--json", str(out))
        assert done.returncode == 0, done.stdout + done.stderr
        document = read_run(out)
        ids = [case["id"] for case in document["cases"]]
        assert document["shard"] == f"{index}/5" and document["exit_code"] == 0
        listed = common.run("list", "smoke", "--shard", f"{index}/5")
        assert (listed.returncode, [line.split()[1] for line in listed.stdout.splitlines()]) == (0, ids)
        assert ("no case: fewer cases than shards" in done.stderr) is (not ids)
        ran += ids
    listed = json.loads(common.run("list", "smoke", "--json", "-").stdout)
    assert sorted(ran) == sorted(case["id"] for case in listed) and len(ran) == 4
    assert common.run("run", "smoke", *CPU, "--shard", "6/5").returncode == 2
    assert common.run("run", "smoke", *CPU, "--select", "tp=16", "--shard", "1/2").returncode == 3


def test_rerun_failed(project: Inside) -> None:
    failing(project, 1)
    done = project.run("run", "--lf", *CPU)
    assert done.returncode == 1
    assert "1 case: 1 crash" in done.stdout
    assert project.run("run", "smoke", *CPU).returncode == 0
    again = project.run("run", "--lf", *CPU)
    assert again.returncode == 3
    assert "nothing failed in the last run" in again.stderr


def test_rerun_failed_runs_what_a_killed_run_never_reached_in_the_same_way(project: Inside) -> None:
    """The patch raises in every rank that it is called in: what passes without it fails again with it."""
    project.planted("slow", *[10] * 4)
    (project.folder / "patch.py").write_text("import time\ndef apply():\n    time.sleep(1)\n    raise ValueError(1)\n")
    patched = ("--inject", "patch.py:apply", "--timeout-s", "77")
    process = project.start_until("crash ", "run", "slow", *CPU, "-j", "1", *patched)
    process.kill()
    process.communicate(timeout=30)
    elsewhere = project.folder / "cases" / "deep"
    elsewhere.mkdir()
    again = Inside(elsewhere, {"FP8_HARNESS_STATE": str(project.folder / "state")}, fork_servers=project.fork_servers)
    done = again.run("run", "--lf", "-x")
    patch = project.folder.resolve() / "patch.py"
    assert f"note: repeats --device cpu --timeout-s 77 --inject {patch}:apply of the last run." in done.stderr
    assert "3 of 4 cases of the last run have no result" in done.stderr
    assert done.returncode == 1 and "--timeout-s 77 --inject" in done.stdout and "4 cases: " in done.stdout
    (project.folder / "mended.py").write_text("def apply():\n    pass\n")
    mended = project.run("run", "--lf", "--inject", "mended.py:apply")
    assert "note: repeats --device cpu --timeout-s 77 of the last run." in mended.stderr
    assert mended.returncode == 0 and "4 cases: 4 passed" in mended.stdout


def test_an_injection_that_raises_and_a_program_that_cannot_be_imported_are_crashes_that_name_them(
    project: Inside,
) -> None:
    patch = project.folder / "patch.py"
    patch.write_text("def apply():\n    raise RuntimeError('no such kernel')\n")
    done = project.run("run", "smoke", *CPU, "--select", "recipe=tensorwise", "--inject", "patch.py:apply")
    assert done.returncode == 1
    assert "patch.py:apply raised" in done.stdout
    assert "--inject patch.py:apply" in done.stdout
    project.environment["FP8_HARNESS_PROGRAM"] = "no_such_program"
    out = project.folder / "result.json"
    done = project.run("run", "smoke", *CPU, "--select", "recipe=tensorwise", "--json", str(out))
    assert done.returncode == 1
    case = read_run(out)["cases"][0]
    assert (case["verdict"], len(case["attempts"])) == ("crash", 1)
    assert "No module named 'no_such_program'" in done.stdout


def test_full_disk_for_json_loses_nothing(common: Inside) -> None:
    done = common.run("run", "smoke", *CPU, "--json", "/dev/full")
    assert done.returncode == 2
    assert "4 cases: 4 passed" in done.stdout
    line = next(line for line in done.stderr.splitlines() if line.startswith("fp8-harness: error:"))
    assert "/dev/full" in line
    stored = Path(line.split("kept in ")[1].rstrip("."))
    assert len(read_run(stored)["cases"]) == 4


@pytest.mark.plugin("launchers")
def test_torchrun_engine_is_chosen(project: Inside) -> None:
    out = project.folder / "result.json"
    arguments = ("--select", "dp_shard=2", "--launcher", "torchrun", "--keep-logs", "logs", "--json", str(out))
    done = project.run("run", "smoke", *CPU, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    document = read_run(out)
    assert document["provenance"]["launcher"] == "torchrun"
    assert [case["verdict"] for case in document["cases"]] == ["passed"]
    assert len(list((project.folder / "logs").glob("*-fsdp2-rowwise-*/torchrun.log"))) == 1


def test_interrupt_leaves_a_valid_partial_result(project: Inside) -> None:
    project.planted("slow", *[6] * 8)
    assert project.run("baseline", "update", "slow", *CPU, "--reason", "slow").returncode == 0
    out = project.folder / "partial.json"
    process = project.start_until("passed ", "run", "slow", *CPU, "-j", "1", "--json", str(out))
    time.sleep(0.3)
    ours = psutil.Process(process.pid).children(recursive=True)
    assert ours
    process.send_signal(signal.SIGINT)
    started_s = time.monotonic()
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - started_s < 10
    verdicts = [case["verdict"] for case in read_run(out)["cases"]]
    assert len(verdicts) == 8
    assert set(verdicts) == {"passed", "not_run"}
    assert read_run(out)["interrupted"] is True
    _, alive = psutil.wait_procs(ours, timeout=5)
    assert not alive


def test_two_runs_at_once_share_the_slots(project: Inside) -> None:
    first = project.start("run", "smoke", *CPU, "--slots", "2")
    second = project.start("run", "smoke", *CPU, "--slots", "2")
    for process in (first, second):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err


def test_the_first_failure_ends_the_run_and_json_goes_to_stdout(project: Inside) -> None:
    good = 'recipe = "tensorwise", dp_shard = 2, steps = 3, loss_tolerance = 0.05'
    raises = 'recipe = "tensorwise", dp_shard = 4, steps = 3, loss_tolerance = 0.05, seed = 1'  # largest worlds first
    project.cases("many", raises, *(f"{good}, seed = {seed}" for seed in range(9, 15)))
    done = project.run("run", "many", "-x", "-j", "1", "--json", "-", *CPU)
    assert done.returncode == 1
    document = tree(done.stdout)
    assert (document["totals"]["crash"], document["interrupted"]) == (1, False)
    assert document["totals"]["not_run"] >= 4
    assert "enough cases failed: stopping" in done.stderr
    assert "1 crash" in done.stderr and "not_run" in done.stderr
    again = project.run("-q", "run", "many", "--maxfail", "2", *CPU)
    assert again.returncode == 1 and "6 passed, 1 crash" in again.stdout


def test_github_is_told_what_failed_and_obeys_no_rank(project: Inside) -> None:
    project.planted("bad", 1)
    summary = project.folder / "summary.md"
    summary.write_text("before\n")
    inside = project.having(GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary))
    done = inside.run("run", "bad", *CPU)
    assert done.returncode == 1
    stop, *said, end, annotation = [line for line in done.stdout.splitlines() if line]
    assert stop.startswith("::stop-commands::") and end == f"::{stop.removeprefix('::stop-commands::')}::"
    assert any("planted failure" in line for line in said)
    assert annotation.startswith("::error title=fsdp2-tensorwise-") and "%0Areproduce: " in annotation
    assert summary.read_text().startswith("before\n## fp8-harness: not good")
    assert "::" not in inside.run("run", "smoke", *CPU, "--no-github").stdout
    out = inside.run("run", "bad", *CPU, "--json", "-")
    assert tree(out.stdout)["exit_code"] == 1 and "::error" in out.stderr
