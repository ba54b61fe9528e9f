"""Jobs under torchrun end like those of the fork server: with the right culprit and its stacks, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from harness.engine.messages import JobOutcome
from harness.plugins.launchers import torchrun
from harness.plugins.launchers.torchrun import TorchrunEngine
from tests.jobs import make_share, run_alone
from tests.worker.processes import listening, nothing_is_left, wait_until

TOY = "tests.worker.toyprogram"
DEADLINE_S = 0.6

__all__ = ["nothing_is_left"]  # after every test


def run_under_torchrun(folder: Path, ways: dict[str, str], deadline_s: float) -> JobOutcome:
    payload = json.dumps(ways).encode()
    with contextlib.closing(TorchrunEngine(TOY)) as engine:
        return run_alone(engine, make_share(folder, 2, payload, deadline_s=deadline_s))


def test_torchrun_names_the_rank_that_raised(tmp_path: Path) -> None:
    outcome = run_under_torchrun(tmp_path, {"0": "sleep", "1": "raise"}, 60)
    assert (outcome.status, outcome.message) == ("crash", "rank 1 in 'doing raise': ValueError: rank 1 has a problem")
    assert [rank.consequence for rank in outcome.ranks] == [True, False]


def test_a_rank_that_is_killed_is_infra_and_nothing_listens_meanwhile(tmp_path: Path) -> None:
    """Only the log of torchrun says how such a rank ended."""
    seen: set[tuple[str, int]] = set()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run_under_torchrun, tmp_path, {"1": "sigkill", "*": "sleep"}, 60)
        while not running.done():
            seen |= listening(psutil.Process().children(recursive=True))
            time.sleep(0.05)
    outcome = running.result()
    assert outcome.status == "infra"
    assert outcome.message.startswith("rank 1 in 'doing sigkill': killed by SIGKILL, not by the harness")
    assert [rank.consequence for rank in outcome.ranks] == [True, False]
    assert seen == set()


class Clock:
    """The time of a launch whose deadline passes a second after every rank has said that it sleeps."""

    sleep = staticmethod(time.sleep)

    def __init__(self, phases: list[Path]) -> None:
        self._phases = phases
        self._asleep_s = float("inf")

    def monotonic(self) -> float:
        now_s = time.monotonic()
        if all(path.exists() and "doing" in path.read_text() for path in self._phases):
            self._asleep_s = min(self._asleep_s, now_s)
        return now_s + (1000 if now_s - self._asleep_s > 1 else 0)


def test_torchrun_is_ended_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "time", Clock([tmp_path / f"rank{rank}.phase" for rank in range(2)]))
    outcome = run_under_torchrun(tmp_path, {"*": "children_then_sleep"}, 500)
    assert outcome.status == "hang"
    assert all("in _sleep" in rank.traceback for rank in outcome.ranks)


def marked_processes(name: str) -> list[int]:
    """Pids of the processes whose environment says that an engine started them for a job in the folder `name`."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            if "FP8_HARNESS_ENGINE" in environ and environ.get("TMPDIR", "").startswith(name):
                pids.append(process.pid)
    return pids


def close_while_it_runs(engine: TorchrunEngine, folder: Path, ready: Callable[[], bool]) -> JobOutcome:
    """The outcome of a job of two ranks that sleep, on an engine that is closed once the job is `ready`."""
    payload = json.dumps({"*": "children_then_sleep"}).encode()
    share = make_share(folder, 2, payload)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run_alone, engine, share)
        try:
            wait_until(ready, 30)
            assert marked_processes(str(folder)) != []
        finally:
            engine.close()
        assert marked_processes(str(folder)) == [], "`close` returns when no process is left"
        outcome = running.result(timeout=2)
    assert run_alone(engine, share).message == "the engine is closed"
    return outcome


def test_close_ends_torchrun_and_all_its_ranks(tmp_path: Path) -> None:
    phases = [tmp_path / f"rank{rank}.phase" for rank in range(2)]

    def asleep() -> bool:
        return all(path.exists() and "doing" in path.read_text() for path in phases)

    outcome = close_while_it_runs(TorchrunEngine(TOY), tmp_path, asleep)
    assert (outcome.status, outcome.message) == ("infra", "the engine was closed")


FakeTorchrun = Callable[[str], TorchrunEngine]


@pytest.fixture
def fake_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTorchrun:
    """An engine that starts a script instead of torchrun; `$folder` is the folder of the job."""

    def started(script: str) -> TorchrunEngine:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\nfor folder; do :; done\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        return TorchrunEngine(TOY)

    return started


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_torchrun_that_is_killed_is_infra(tmp_path: Path, fake_torchrun: FakeTorchrun, number: signal.Signals) -> None:
    says = (
        'echo "torch.SignalException: Process 7 got signal: 15"; exit 1' if number == signal.SIGTERM else "kill -9 $$"
    )
    outcome = run_alone(fake_torchrun(says), make_share(tmp_path / "job", 2))
    assert outcome.status == "infra" and outcome.message.startswith(f"torchrun was killed by {number.name}, not by")


def test_close_reaches_what_has_left_the_group_of_torchrun(tmp_path: Path, fake_torchrun: FakeTorchrun) -> None:
    script = 'setsid sleep 60 & touch "$folder/up"; trap "" TERM; sleep 60'
    engine = fake_torchrun(script)
    assert close_while_it_runs(engine, tmp_path / "job", (tmp_path / "job" / "up").exists).status == "infra"


def test_a_process_that_got_the_pid_of_a_rank_is_not_signalled(tmp_path: Path, fake_torchrun: FakeTorchrun) -> None:
    bystander = subprocess.Popen(["sleep", "60"])  # it dies of SIGUSR1
    try:
        script = f'echo {bystander.pid} > "$folder/rank0.pid"; sleep 60'
        engine = fake_torchrun(script)
        share = make_share(tmp_path / "job", 1, deadline_s=DEADLINE_S)
        assert run_alone(engine, share).status == "hang"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_pid_file_without_a_pid_is_no_error(tmp_path: Path, fake_torchrun: FakeTorchrun) -> None:
    write = 'printf "" > "$folder/rank0.pid"; echo no number > "$folder/rank1.pid"; echo 99999999999999999999'
    engine = fake_torchrun(f'{write} > "$folder/rank2.pid"; sleep 60')
    assert run_alone(engine, make_share(tmp_path / "job", 3, deadline_s=DEADLINE_S)).status == "hang"
