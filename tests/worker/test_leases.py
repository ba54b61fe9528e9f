"""Leases and device names: all or nothing, no starvation, freed by death; and folders of killed runs are removed."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.engine.hardware import count_slots
from harness.engine.leases import Leases
from harness.engine.node import Scratch
from harness.errors import HarnessError
from tests.worker.processes import start_python, wait_until

HOLDER = """
import sys, time
from pathlib import Path
from harness.engine.leases import Leases
with Leases(Path(sys.argv[1]), 4).acquire(int(sys.argv[2])) as slots:
    print(*slots, flush=True)
    time.sleep(60)
"""


def start_holder(folder: Path, count: int) -> subprocess.Popen[str]:
    holder = start_python("-c", HOLDER, str(folder), str(count), stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline(), "the holder has its slots"
    return holder


def end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.communicate()


def test_slots_are_distinct_and_freed(tmp_path: Path) -> None:
    leases = Leases(tmp_path, 4)
    with leases.acquire(3) as first, leases.acquire(1) as second:
        assert (first, second) == ((0, 1, 2), (3,))
    with leases.acquire(4) as every:
        assert every == (0, 1, 2, 3)


def test_zero_slots_wait_for_nobody(tmp_path: Path) -> None:
    with Leases(tmp_path, 1).acquire(1), Leases(tmp_path, 1).acquire(0) as none:
        assert none == ()


def test_unusable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match="cannot use the lease folder"), Leases(tmp_path / "file", 1).acquire(1):
        pass


def test_an_exception_frees_the_slots(tmp_path: Path) -> None:
    leases = Leases(tmp_path, 2)
    with pytest.raises(ValueError, match="inside"), leases.acquire(2):
        raise ValueError("inside")
    with leases.acquire(2):
        pass


def test_same_name_is_the_same_slot(tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES=2,3 and =3,4 share device 3, which is slot 1 of one job and slot 0 of the other."""
    with Leases(tmp_path, 2, names=("2", "3")).acquire(2):
        other = Leases(tmp_path, 2, names=("3", "4"))
        with other.acquire(1) as slots:
            assert slots == (1,)


def test_other_processes_count_and_death_frees(tmp_path: Path) -> None:
    holder = start_holder(tmp_path, 3)
    leases = Leases(tmp_path, 4)
    try:
        with leases.acquire(1) as slots:
            assert slots == (3,)
        assert leases.held_slots() == (0, 1, 2)
    finally:
        end(holder)
    began_s = time.monotonic()
    with leases.acquire(4):
        assert time.monotonic() - began_s < 0.5


def test_who_holds_slots_that_are_waited_for_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.engine.leases._NOTICE_AFTER_S", 0.05)
    notes: list[str] = []
    leases = Leases(tmp_path, 4, note=notes.append)

    def hold_two() -> None:
        with leases.acquire(2):
            pass

    holder = start_holder(tmp_path, 3)
    try:
        with ThreadPoolExecutor(1) as threads, leases.acquire(1):
            waiting = threads.submit(hold_two)
            wait_until(lambda: bool(notes))
            time.sleep(0.3)
            holder.kill()
            waiting.result(5)
    finally:
        end(holder)
    (text,) = notes
    assert f"other runs hold some: pid {holder.pid} (" in text and text.endswith(") 3 of 4.")


def test_a_child_process_does_not_keep_the_lease(tmp_path: Path) -> None:
    leases = Leases(tmp_path, 1)
    with leases.acquire(1):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with leases.acquire(1):
            pass
    finally:
        child.communicate(b"\n")


def test_large_requests_do_not_starve(tmp_path: Path) -> None:
    """Eight threads keep asking for one slot of four; the one that wants all four gets them all the same."""
    leases = Leases(tmp_path, 4)
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            with leases.acquire(1):
                time.sleep(0.01)

    threads = [threading.Thread(target=keep_asking) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            with leases.acquire(4):
                pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_no_slot_is_ever_held_twice(tmp_path: Path) -> None:
    leases = Leases(tmp_path, 4)
    held = [threading.Lock() for _ in range(4)]
    clashes: list[int] = []

    def use(count: int) -> None:
        for _ in range(5):
            with leases.acquire(count) as slots:
                mine = [slot for slot in slots if held[slot].acquire(blocking=False)]
                clashes.extend(set(slots) - set(mine))
                time.sleep(0.001)
                for slot in mine:
                    held[slot].release()

    threads = [threading.Thread(target=use, args=(count,)) for count in (1, 1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []


def test_cpu_slots_hold_the_widest_worlds() -> None:
    assert count_slots("cpu") >= 10


OWNER = """
import sys, time
from pathlib import Path
from harness.engine.node import Scratch
print(Scratch(Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


def test_only_folders_of_killed_runs_are_removed(tmp_path: Path) -> None:
    others = tmp_path / "fp8-harness-jobs-of-nobody"
    others.mkdir()
    with start_python("-c", OWNER, str(tmp_path), stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        (left / "0001").mkdir()
        alive = Scratch(tmp_path)
        assert left.is_dir() and alive.path.is_dir(), "both have owners"
        owner.kill()
    mine = Scratch(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted((others, alive.path, mine.path))
    for scratch in (alive, mine, mine):
        scratch.close()
    assert list(tmp_path.iterdir()) == [others], "without a lock it may be anybody's"
