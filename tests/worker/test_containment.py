"""Whatever a rank does, its job ends with the right status, the right culprit and its stacks, and nothing is left."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.checks.failures import advice
from harness.engine import fork_server_engine
from harness.engine.fork_server_engine import ForkServerEngine, StartLimits
from harness.engine.messages import JobOutcome
from harness.engine.processes import LOG_IS_CUT, MAX_LOG_BYTES
from tests.jobs import make_share, run_alone
from tests.worker.processes import nothing_is_left, start_python, wait_until

__all__ = ["nothing_is_left"]  # after every test

TOY = "tests.worker.toyprogram"
DEADLINE_S = 0.6


@pytest.fixture(scope="module")
def engine() -> Iterator[ForkServerEngine]:
    with ForkServerEngine(TOY) as engine:
        yield engine


class Runner:
    """Runs a toy job: `run({"0": "raise", "*": "sleep"})`."""

    def __init__(self, engine: ForkServerEngine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder

    def __call__(
        self,
        ways: dict[str, str],
        *,
        world_size: int = 3,
        deadline_s: float = 10.0,
        devices: tuple[int, ...] = (),
        folder: Path | None = None,
    ) -> JobOutcome:
        payload = json.dumps(ways).encode()
        share = make_share(folder or self._folder, world_size, payload, deadline_s=deadline_s, devices=devices)
        return run_alone(self._engine, share)


@pytest.fixture
def run(engine: ForkServerEngine, tmp_path: Path) -> Runner:
    return Runner(engine, tmp_path)


def fork_server_process() -> psutil.Process:
    """The one fork server that has a toy program preloaded and this process as its parent."""
    commands = {child: child.cmdline() for child in psutil.Process().children()}
    (fork_server,) = (child for child, words in commands.items() if {"harness.engine.fork_server", TOY} <= set(words))
    return fork_server


def test_all_return(run: Runner) -> None:
    outcome = run({}, devices=(4, 2, 7))
    assert (outcome.status, outcome.message, outcome.detected_s) == ("ok", "", None)
    assert [rank.payload for rank in outcome.ranks] == [b"0/3/4", b"1/3/2", b"2/3/7"]
    assert {rank.status for rank in outcome.ranks} == {"returned"}
    assert outcome.cpu_s > 0


def test_ranks_are_fresh_and_settled(run: Runner, tmp_path: Path) -> None:
    facts = [json.loads(rank.payload or b"") for rank in run({"*": "surroundings"}).ranks]
    assert len({fact["pid"] for fact in facts}) == 3
    for fact in facts:
        assert fact["session"] == fact["pid"]
        assert fact["stdin"] == ""
        assert fact["tempdir"] == str(tmp_path / "tmp")
        assert fact["sigint"]
        assert fact["threads"] == "1"
        assert fact["fds"].count("socket") == 1, "its own socket and nobody else's"
        assert len(fact["fds"]) <= 6, fact["fds"]  # 0, 1, 2, its socket, its dump file, the listing itself


def test_large_results_come_whole(run: Runner) -> None:
    outcome = run({"*": "return_big"})
    assert [rank.payload for rank in outcome.ranks] == [bytes([rank]) * (5 << 20) for rank in range(3)]


def test_output_is_kept_in_order(run: Runner) -> None:
    (rank,) = run({"*": "print"}, world_size=1).ranks
    assert rank.log_tail.splitlines() == ["to stdout", "to stderr", "from below Python"]


FAILURES = [
    ("raise", "raised", "ValueError: rank 1 has a problem"),
    ("exit0", "exited", "exited with code 0 without a result"),
    ("sigabrt", "signaled", "killed by SIGABRT"),
    ("garbage", "raised", "sent unreadable data to its supervisor"),
]
# The same of a rank without peers, for whose end nobody waits.
ALONE = [
    ("sys_exit", "raised", "SystemExit: 3"),
    ("wrong_type", "raised", "TypeError: rank_main returned str, not bytes"),
    ("exit7", "exited", "exited with code 7 without a result"),
    ("segfault", "signaled", "killed by SIGSEGV"),
]


BY_MACHINE = ("sigkill", "signaled", "killed by SIGKILL, not by the harness: possibly the kernel's OOM killer")


@pytest.mark.parametrize(("way", "status", "message"), [*FAILURES, BY_MACHINE])
def test_failure_of_one_rank_ends_the_job(run: Runner, way: str, status: str, message: str) -> None:
    outcome = run({"1": way, "*": "sleep"})
    assert outcome.status == ("infra" if way == "sigkill" else "crash")
    assert outcome.message.startswith(f"rank 1 in 'doing {way}': {message}")
    assert outcome.detected_s is not None
    assert outcome.detected_s < 1.0
    assert outcome.wall_s < outcome.detected_s + 1.5
    first, culprit, last = outcome.ranks
    assert (culprit.status, culprit.consequence, culprit.payload) == (status, False, None)
    for peer in (first, last):
        assert (peer.status, peer.consequence) == ("stuck", True)
        assert "in _sleep" in peer.traceback


@pytest.mark.parametrize(("way", "status", "message"), ALONE)
def test_failure_of_the_only_rank_is_that_of_the_job(run: Runner, way: str, status: str, message: str) -> None:
    outcome = run({"*": way}, world_size=1)
    assert outcome.status == "crash"
    assert outcome.message.startswith(f"rank 0 in 'doing {way}': {message}")
    assert [(rank.status, rank.consequence, rank.payload) for rank in outcome.ranks] == [(status, False, None)]


def test_tracebacks_and_last_words_are_kept(run: Runner) -> None:
    raised, exited, faulted = (run({"*": way}, world_size=1).ranks[0] for way in ("raise", "exit7", "segfault"))
    assert "in _raise" in raised.traceback
    assert exited.log_tail == "last words"
    assert "Segmentation fault" in faulted.traceback
    assert "in _segfault" in faulted.traceback


HANGS = [
    ("spin", "stuck", "in _spin"),
    ("sleep", "stuck", "in _sleep"),
    ("lock", "stuck", "in _lock"),
    ("block_with_gil", "stuck", "in _block_with_gil"),
    ("sigstop", "stopped", "in kill"),
]


def test_hang_is_found_at_the_deadline_with_stacks(run: Runner) -> None:
    """Of ranks that hang in every way at once."""
    outcome = run({str(rank): way for rank, (way, _, _) in enumerate(HANGS)}, world_size=7, deadline_s=DEADLINE_S)
    assert outcome.status == "hang"
    assert outcome.detected_s == pytest.approx(DEADLINE_S, abs=0.3)
    for rank, (way, status, place) in zip(outcome.ranks, HANGS, strict=False):
        assert (rank.status, rank.phase) == (status, f"doing {way}")
        assert place in rank.traceback
    assert [rank.payload for rank in outcome.ranks[5:]] == [b"5/7/None", b"6/7/None"]


@pytest.mark.parametrize(("way", "status"), [("spin", "stuck"), ("sigstop", "stopped")])
def test_the_only_rank_that_hangs_is_named(run: Runner, way: str, status: str) -> None:
    outcome = run({"1": way, "*": "return"}, deadline_s=DEADLINE_S)
    assert outcome.message == f"deadline of 0.6 s passed: rank 1 in 'doing {way}' {status}; 2 of 3 ranks had returned"
    assert (outcome.ranks[1].status, outcome.ranks[1].consequence) == (status, False)
    assert [outcome.ranks[rank].payload for rank in (0, 2)] == [b"0/3/None", b"2/3/None"]


def test_stopped_rank_is_the_cause_of_its_stuck_peers(run: Runner) -> None:
    outcome = run({"1": "sigstop", "*": "sleep"}, deadline_s=DEADLINE_S)
    assert [rank.status for rank in outcome.ranks] == ["stuck", "stopped", "stuck"]
    assert [rank.consequence for rank in outcome.ranks] == [True, False, True]


@pytest.mark.parametrize("way", ["raise", "exit7", "sigkill"])
def test_first_failure_in_time_is_the_cause(run: Runner, way: str) -> None:
    outcome = run({"2": way, "*": "raise_later"})
    assert outcome.message.startswith("rank 2 ")
    assert [rank.consequence for rank in outcome.ranks] == [True, True, False]
    assert outcome.ranks[0].message == "RuntimeError: connection closed by peer"
    assert outcome.wall_s < 1.5, "all have reported: nobody waits for a grace period"


def test_what_ranks_leave_behind_is_ended(run: Runner) -> None:
    assert run({"*": "children"}, world_size=2).status == "ok"
    outcome = run({"0": "children_then_sleep", "1": "raise_later"}, world_size=2)
    assert outcome.status == "crash"
    assert fork_server_process().children(recursive=True) == []


def test_shared_memory_of_ranks_is_removed(run: Runner) -> None:
    before = set(Path("/dev/shm").iterdir())
    assert run({"*": "shared_memory"}).status == "ok"
    assert run({"*": "shared_memory_then_sleep"}, deadline_s=DEADLINE_S).status == "hang"
    assert {path.name for path in set(Path("/dev/shm").iterdir()) - before if "fp8-harness-test" in path.name} == set()


def test_jobs_run_side_by_side(run: Runner, tmp_path: Path) -> None:
    outcomes: dict[str, JobOutcome] = {}

    def start(name: str, ways: dict[str, str], deadline_s: float) -> None:
        outcomes[name] = run(ways, deadline_s=deadline_s, folder=tmp_path / name)

    plan = [("good", {}, 10.0), ("bad", {"1": "exit7", "*": "sleep"}, 10.0), ("slow", {"*": "spin"}, DEADLINE_S)]
    threads = [threading.Thread(target=start, args=entry) for entry in plan]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "good": "ok",
        "bad": "crash",
        "slow": "hang",
    }


def test_unusable_folder_is_infra(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = run({}, folder=tmp_path / "file")
    assert (outcome.status, outcome.ranks) == ("infra", ())
    assert "could not start rank 0 of 3" in outcome.message


def test_no_growth_over_many_jobs(run: Runner) -> None:
    for _ in range(20):
        run({}, world_size=2)
    here, fork_server = psutil.Process(), fork_server_process()

    def size() -> tuple[int, int, int, int]:
        return (
            here.num_fds(),
            fork_server.num_fds(),
            fork_server.memory_info().rss >> 20,
            len(list(Path("/dev/shm").iterdir())),
        )

    fds, fork_server_fds, fork_server_mib, shm = size()
    for number in range(100):
        assert run({"1": "exit7"} if number % 50 == 49 else {}, world_size=2).status in ("ok", "crash")
    after = size()
    assert after[:2] == (fds, fork_server_fds)
    assert after[2] <= fork_server_mib + 1
    assert after[3] == shm


def own_engine(**options: str) -> ForkServerEngine:
    return ForkServerEngine(TOY, options)


def test_a_python_without_pidfds_watches_and_signals_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of uv and conda are: built for old kernels."""
    (tmp_path / "sitecustomize.py").write_text("import os, signal\ndel os.pidfd_open, signal.pidfd_send_signal\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with own_engine(ready=str(tmp_path / "ready")) as engine:
        died = Runner(engine, tmp_path / "died")({"1": "exit7", "*": "sleep"})
        hung = Runner(engine, tmp_path / "hung")({"*": "sleep"}, deadline_s=DEADLINE_S)
    assert (died.status, "exited with code 7" in died.message) == ("crash", True)
    assert hung.status == "hang"
    assert all("toyprogram.py" in rank.traceback for rank in hung.ranks)


def test_an_exception_in_the_preload_is_the_crash_of_every_job(tmp_path: Path) -> None:
    with own_engine(**{"raise": "no such library"}) as broken:
        outcomes = [Runner(broken, tmp_path)({}, world_size=2) for _ in range(2)]
    for outcome in outcomes:
        assert outcome.status == "crash"
        assert outcome.message.endswith("in 'preload': ImportError: no such library")  # of the rank that was first
        assert any("toyprogram.py" in rank.traceback for rank in outcome.ranks)


def test_a_machine_that_fails_in_the_preload_is_infra_and_tried_twice(tmp_path: Path) -> None:
    with own_engine(ready=str(tmp_path / "no folder" / "file")) as broken:
        outcomes = [Runner(broken, tmp_path)({}) for _ in range(3)]
    for outcome in outcomes:
        assert outcome.status == "infra"
        assert "the fork server did not start: exited with code 1" in outcome.message
        assert "FileNotFoundError" in outcome.message


def test_a_missing_program_is_a_crash_that_names_it(tmp_path: Path) -> None:
    with ForkServerEngine("no_such_program") as broken:
        assert "No module named 'no_such_program'" in Runner(broken, tmp_path)({}).message


def test_threads_in_the_fork_server_process_are_infra(tmp_path: Path) -> None:
    with own_engine(thread="yes") as threaded:
        outcome = Runner(threaded, tmp_path)({})
    assert outcome.status == "infra"
    assert "single-threaded" in outcome.message
    assert outcome.message.endswith(f"(since preload() of {TOY})")


def test_a_device_that_is_open_in_the_fork_server_process_is_infra(tmp_path: Path) -> None:
    device = tmp_path / "dev" / "nvidia-uvm"
    device.parent.mkdir()
    with own_engine(device=str(device)) as poisoned:
        outcome = Runner(poisoned, tmp_path)({})
    reason = "the fork server must use no device before it forks, but it has open"
    assert (outcome.status, outcome.ranks) == ("infra", ())
    assert outcome.message == f"{reason}: {device} (since preload() of {TOY})"
    advised = advice(outcome.message)
    assert advised.fix is not None and "use no GPU at import" in advised.fix


def test_files_that_asking_for_devices_leaves_open_are_no_obstacle(tmp_path: Path) -> None:
    device = tmp_path / "dev" / "nvidiactl"  # NVML's
    device.parent.mkdir()
    with own_engine(device=str(device)) as harmless:
        assert Runner(harmless, tmp_path)({}).status == "ok"


def test_machine_out_of_resources_is_infra_and_passes(tmp_path: Path) -> None:
    with own_engine(files="24") as small:
        run = Runner(small, tmp_path)
        outcome = run({"*": "sleep"}, world_size=40)
        assert outcome.status == "infra"
        assert "of 40: [Errno 24] Too many open files" in outcome.message
        assert run({}).status == "ok", "nothing of it is left, so a small job fits"


def test_death_of_the_fork_server_process_is_infra_and_it_is_replaced(tmp_path: Path) -> None:
    with own_engine(own="1") as mine:
        run = Runner(mine, tmp_path)
        assert run({}).status == "ok"
        before = {child.pid for child in psutil.Process().children()}
        (victim,) = (child for child in psutil.Process().children() if "own=1" in child.cmdline())
        killer = threading.Timer(0.3, victim.kill)
        killer.start()
        outcome = run({"*": "children_then_sleep"})
        killer.join()
        assert outcome.status == "infra"
        assert "the fork server died: killed by SIGKILL" in outcome.message
        assert run({}).status == "ok"
        assert {child.pid for child in psutil.Process().children()} - before, "it is another process"


def test_a_fork_server_that_does_not_come_up_is_told_of_and_given_up_when_it_is_stopped(tmp_path: Path) -> None:
    notes: list[str] = []
    limits = StartLimits(told_s=0.4, stopped_s=0.6, given_up_s=1.0)

    def stop_at_once() -> None:
        wait_until(lambda: any("stopped=yes" in child.cmdline() for child in psutil.Process().children()))
        for child in psutil.Process().children():
            if "stopped=yes" in child.cmdline():
                child.suspend()

    with ForkServerEngine(TOY, {"stopped": "yes", "sleep_s": "60"}, note=notes.append, limits=limits) as stopped:
        stopping = threading.Thread(target=stop_at_once)
        stopping.start()
        outcome = Runner(stopped, tmp_path)({})
        stopping.join()
    with ForkServerEngine(TOY, {"sleep_s": "60"}, note=notes.append, limits=limits) as slow:
        late = Runner(slow, tmp_path)({})
    assert (outcome.status, late.status) == ("infra", "infra")
    assert re.search(r"did not finish its preload within \d s: it is stopped by a signal", outcome.message)
    assert "did not finish its preload within 1 s: it still runs" in late.message
    waits = f"which has not imported {TOY} after 0.4 s: it"
    assert [note.count(waits) for note in notes] == [1, 1]
    assert re.search(r"and `kill -CONT \d+` continues it\.$", notes[0])
    assert re.search(r"and `py-spy dump --pid \d+` shows where it is\.$", notes[1])


def test_a_fork_server_that_is_slow_to_start_serves_all_the_same(tmp_path: Path) -> None:
    limits = StartLimits(told_s=0.01, stopped_s=0.02, given_up_s=60.0)
    with ForkServerEngine(TOY, {"sleep_s": "0.3"}, limits=limits) as slow:
        assert Runner(slow, tmp_path)({}).status == "ok"


def test_the_log_of_a_rank_is_bounded(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run({"0": "print_much", "1": "print"}, world_size=2)
    assert outcome.status == "ok"
    log = (tmp_path / "rank0.log").read_text()
    assert len(log) < MAX_LOG_BYTES and log.startswith("first\n") and log.endswith("last\n")
    assert log.count(LOG_IS_CUT) == 1 and "is cut here" in LOG_IS_CUT
    assert LOG_IS_CUT not in (tmp_path / "rank1.log").read_text()


def test_a_fork_server_that_falls_silent_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server_engine, "REPLY_MARGIN_S", 0.2)
    with own_engine(silent="yes") as mine:
        mine.warm()
        (fork_server,) = (child for child in psutil.Process().children() if "silent=yes" in child.cmdline())
        fork_server.suspend()
        outcome = Runner(mine, tmp_path)({}, deadline_s=0.3)
        assert (outcome.status, outcome.fork_server_lost) == ("infra", True)
        assert "the fork server sent no outcome within 0.2 s of the deadline" in outcome.message
        assert Runner(mine, tmp_path)({}).status == "ok"


def test_close_ends_jobs_in_flight(tmp_path: Path) -> None:
    mine = own_engine()
    mine.warm()
    threading.Timer(0.5, mine.close).start()
    outcome = Runner(mine, tmp_path)({"*": "sleep"}, deadline_s=30)
    assert (outcome.status, outcome.message) == ("infra", "the engine was closed")
    assert Runner(mine, tmp_path)({}).message == "the engine is closed"


def test_close_does_not_wait_for_the_preload(tmp_path: Path) -> None:
    mine = own_engine(sleep_s="30")
    threading.Timer(0.5, mine.close).start()
    began_s = time.monotonic()
    assert Runner(mine, tmp_path)({}).status == "infra"
    assert time.monotonic() - began_s < 3


CONTROLLER = f"""
import json, sys
from pathlib import Path
from harness.engine.fork_server_engine import ForkServerEngine
from tests.jobs import make_share, run_alone
options = json.loads(sys.argv[2])
engine = ForkServerEngine("{TOY}", options)
ways = json.dumps({{"0": "spin", "*": "children_then_sleep"}}).encode()
run_alone(engine, make_share(Path(sys.argv[1]), 3, ways))
"""


def start_controller(folder: Path, options: dict[str, str]) -> subprocess.Popen[bytes]:
    return start_python("-c", CONTROLLER, str(folder), json.dumps(options))


def kill_and_wait_for_family(controller: subprocess.Popen[bytes], timeout_s: float) -> None:
    family = psutil.Process(controller.pid).children(recursive=True)
    controller.kill()
    controller.wait()
    wait_until(lambda: not any(member.is_running() and member.status() != "zombie" for member in family), timeout_s)


def test_killed_controller_takes_ranks_and_their_children_along(tmp_path: Path) -> None:
    controller = start_controller(tmp_path, {})
    tree = psutil.Process(controller.pid)
    wait_until(lambda: len(tree.children(recursive=True)) >= 8, 10)
    time.sleep(0.2)  # let the grandchildren detach
    kill_and_wait_for_family(controller, 1.0)


def test_killed_controller_ends_a_preload(tmp_path: Path) -> None:
    controller = start_controller(tmp_path, {"ready": str(tmp_path / "ready"), "sleep_s": "60"})
    wait_until((tmp_path / "ready").exists, 10)
    kill_and_wait_for_family(controller, 1.0)


def test_controller_killed_before_the_fork_server_process_is_up(tmp_path: Path) -> None:
    controller = start_controller(tmp_path, {"sleep_s": "60"})
    wait_until(lambda: bool(psutil.Process(controller.pid).children()), 10)
    kill_and_wait_for_family(controller, 5.0)  # the interpreter has to start before it can notice
