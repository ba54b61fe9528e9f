"""A run on two devices, with fake ranks on GPUs that are not there: parts, results, repeats and comparisons of it."""

import json

import pytest

from tests.acceptance.conftest import Command
from tests.nvidia import MACHINES

RTX = "NVIDIA GeForce RTX 4090"
OPTIONS = "steps = 3, loss_tolerance = 0.05"
BF16 = f'recipe = "rowwise", dp_shard = 2, dtype = "bfloat16", {OPTIONS}'
FLOAT64 = f'recipe = "rowwise", tp = 2, dtype = "float64", {OPTIONS}'
LARGE = f'recipe = "rowwise", dp_shard = 4, dtype = "bfloat16", lr = 0.002, {OPTIONS}'
RAISES = 'recipe = "tensorwise", dp_shard = 2, steps = 3, dtype = "bfloat16", seed = 1'
ON_CPU = "1 on the CPU: fewer GPUs than ranks"
LINE = f"2 on 2 x {RTX}, 1 of them with the exact matmul; {ON_CPU}"


@pytest.fixture
def on_gpus(project: Command, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Command:
    MACHINES["2 x 4090"].pretend(tmp_path_factory.mktemp("machine"), monkeypatch)
    project.cases("mixed", BF16, FLOAT64, LARGE)
    return project


def test_a_run_on_two_devices_is_one_run(on_gpus: Command) -> None:
    done = on_gpus.call("run", "mixed", "--json", "a.json", "--name", "a")
    assert done.returncode == 0 and LINE in done.stdout.splitlines(), done.stdout + done.stderr
    explained = on_gpus.call("explain", "tp2-rowwise-v2048-s3-f64-tol.0.05").stdout
    assert f"device  2 x {RTX}, with the exact matmul" in " ".join(explained.split()).replace("device ", "device  ")
    start, *cases, end = map(json.loads, (on_gpus.folder / "a.json").read_text().splitlines())
    assert [(case["place"]["device"], case["place"]["exact"]) for case in cases] == [
        (RTX, False),
        (RTX, True),
        ("cpu", False),
    ]
    assert all("--device" not in case["command"] for case in cases)
    assert start["environment"]["device"] == f"2 x {RTX}, cpu" and end["provenance"]["launcher"] == "fork"
    assert LINE in on_gpus.call("show", "a").stdout
    assert on_gpus.call("run", "mixed", "--name", "b").returncode == 0
    assert on_gpus.call("compare", "a", "b").returncode == 0
    forced = on_gpus.call("run", "mixed", "--device", "cpu", "--name", "c")
    verify = f"3 on the CPU: --device cpu; `fp8-harness dev evidence all --device cuda` verifies 2 x {RTX}"
    assert forced.returncode == 0 and verify in forced.stdout.splitlines()
    assert f"device 2 x {RTX}, cpu -> cpu" in on_gpus.call("compare", "a", "c").stdout


def test_what_fails_on_a_gpu_stops_the_run_before_the_cpu_and_runs_again_there(on_gpus: Command) -> None:
    on_gpus.cases("mixed", RAISES, LARGE)
    done = on_gpus.call("run", "mixed", "-x")
    assert done.returncode == 1 and "not run: 1 case" in done.stdout, done.stdout
    assert " on the CPU" not in done.stdout and RTX not in done.stdout, "what did not run was nowhere"
    (command,) = [line.strip() for line in done.stdout.splitlines() if line.strip().startswith("next: ")]
    assert "--device" not in command
    again = on_gpus.call("run", "--lf")
    assert again.returncode == 1 and "not run" not in again.stdout
    assert ON_CPU in again.stdout


def test_shards_of_a_run_on_two_devices_are_merged(on_gpus: Command) -> None:
    for index in (1, 2, 3):
        assert on_gpus.call("run", "mixed", "--shard", f"{index}/3", "--json", f"{index}.json").returncode == 0
    done = on_gpus.call("runs", "merge", "all.json", "1.json", "2.json", "3.json")
    assert done.returncode == 0, done.stderr
    assert LINE in on_gpus.call("show", "all.json").stdout


def test_a_run_that_was_killed_goes_on_with_what_is_left_for_the_cpu(on_gpus: Command) -> None:
    assert on_gpus.call("run", "mixed").returncode == 0
    (stored,) = on_gpus.folder.glob("state/runs/*/*.jsonl")
    start, on_gpu, exact, *_ = stored.read_text().splitlines(keepends=True)
    stored.write_text(start + on_gpu + exact)
    done = on_gpus.call("run", "--resume")
    assert done.returncode == 0 and "1 of 3 cases are left" in done.stderr, done.stdout + done.stderr
    assert LINE in done.stdout.splitlines()


def test_missing_goldens_are_asked_for_on_both_devices(on_gpus: Command) -> None:
    done = on_gpus.call("run", "mixed")
    for device in ("cuda", "cpu"):
        assert f"baseline update mixed --device {device} --missing" in done.stderr, done.stderr
    made = on_gpus.call("baseline", "update", "mixed", "--missing", "--reason", "first goldens")
    assert made.returncode == 0 and "2 goldens stored" in made.stdout, made.stdout + made.stderr


@pytest.mark.sweep  # a pytest of its own
def test_pytest_runs_cases_on_both_devices(on_gpus: Command) -> None:
    done = on_gpus.pytest("cases/mixed.toml", "-q")
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
    assert f"fp8-harness: {LINE}" in done.stdout.splitlines()
