"""Prints the containment table: what a rank does, how its job ends, how soon that is detected, what is left behind.

    python ci/bench/containment.py [--ranks 4] [--deadline-s 2]

One of the ranks misbehaves, the others block as if in a collective. `seen` is from the start of the job to the
detection (a hang is seen at the deadline), `over` to the outcome with the stacks of all ranks, `left` counts processes
and files in /dev/shm that were not there before. Exit code 1 when a verdict is wrong or anything is left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.messages import Job, JobOutcome, Share
from harness.engine.outcome import conclude

TOY_FOLDER = Path(__file__).resolve().parents[2] / "tests" / "worker"

WAYS = [
    ("return", "ok", "every rank returns"),
    ("raise", "crash", "raises"),
    ("exit7", "crash", "os._exit(7)"),
    ("exit0", "crash", "os._exit(0)"),
    ("sigkill", "crash", "SIGKILL"),
    ("segfault", "crash", "SIGSEGV"),
    ("spin", "hang", "infinite Python loop"),
    ("lock", "hang", "waits for a lock"),
    ("block_with_gil", "hang", "blocked in C, holds the GIL"),
    ("sigstop", "hang", "SIGSTOP"),
    ("children_then_sleep", "hang", "leaves child processes"),
]

CONTROLLER = """
import json, sys
from harness.engine.messages import Job, Share
from harness.engine.fork_server_engine import ForkServerEngine
ranks = int(sys.argv[2])
job = Job(job_id="toy", world_size=ranks, payload=b'{"0": "spin", "*": "children_then_sleep"}', deadline_s=600)
ForkServerEngine("toyprogram").run(Share(job=job, count=ranks, folder=sys.argv[1]), print)
"""


class Row(NamedTuple):
    """One line of the table."""

    what: str
    verdict: str
    seen_ms: float | None
    over_ms: float | None
    left: int
    good: bool


def things() -> set[str]:
    """Every process that could be ours and every shared memory file."""
    processes = {f"{p.pid} {p.create_time()}" for p in psutil.process_iter() if "toyprogram" in " ".join(cmdline(p))}
    return processes | {entry.name for entry in Path("/dev/shm").iterdir()}


def cmdline(process: psutil.Process) -> list[str]:
    """Command line of a process; empty when it is gone."""
    try:
        return list(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.NoSuchProcess:
        return []


def run_alone(
    engine: ForkServerEngine, name: str, payload: bytes, folder: str, options: argparse.Namespace
) -> JobOutcome:
    """The outcome of a job that is one share."""
    job = Job(job_id=name, world_size=options.ranks, payload=payload, deadline_s=options.deadline_s)
    return conclude(job, [engine.run(Share(job=job, count=options.ranks, folder=folder), lambda _: None)])


def one_way(engine: ForkServerEngine, way: str, expected: str, description: str, options: argparse.Namespace) -> Row:
    """Let rank 1 end in this way while the others block."""
    ways = {} if way == "return" else {"1": way, "*": "sleep"}
    with tempfile.TemporaryDirectory() as folder:
        before = things()
        began_s = time.monotonic()
        outcome = run_alone(engine, way, json.dumps(ways).encode(), folder, options)
        over_s = time.monotonic() - began_s
        left = len(things() - before)
    seen_ms = None if outcome.detected_s is None else outcome.detected_s * 1e3
    good = outcome.status == expected and left == 0 and explained(outcome)
    return Row(f"rank 1: {description}", outcome.status, seen_ms, over_s * 1e3, left, good)


def explained(outcome: JobOutcome) -> bool:
    """True if every rank that was stuck or stopped shows its stacks."""
    return all(rank.traceback for rank in outcome.ranks if rank.status in ("stuck", "stopped", "raised"))


def killed_parent(victim: str, options: argparse.Namespace) -> Row:
    """SIGKILL the controller, or the fork server under it, while ranks and their children run."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOY_FOLDER.parents[1]), str(TOY_FOLDER)])}
    with tempfile.TemporaryDirectory() as folder:
        before = things()
        command = [sys.executable, "-c", CONTROLLER, folder, str(options.ranks)]
        controller = subprocess.Popen(command, env=environ)
        tree = psutil.Process(controller.pid)
        while len(tree.children(recursive=True)) < 1 + options.ranks + 2:
            time.sleep(0.01)
        time.sleep(0.3)
        family = tree.children(recursive=True)
        began_s = time.monotonic()
        os.kill(controller.pid if victim == "controller" else tree.children()[0].pid, signal.SIGKILL)
        while any(cmdline(member) for member in family) and time.monotonic() - began_s < 10:
            time.sleep(0.002)
        over_s = time.monotonic() - began_s
        controller.wait()
        left = len(things() - before) + sum(bool(cmdline(member)) for member in family)
    return Row(f"{victim}: SIGKILL", "all ended", None, over_s * 1e3, left, left == 0 and over_s < 1)


def main() -> int:
    """Measure all ways and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--deadline-s", type=float, default=2.0)
    options = parser.parse_args()
    sys.path.insert(0, str(TOY_FOLDER))
    with tempfile.TemporaryDirectory() as folder, ForkServerEngine("toyprogram") as engine:
        run_alone(engine, "start", b"{}", folder, options)
        rows = [one_way(engine, way, expected, description, options) for way, expected, description in WAYS]
    rows += [killed_parent(victim, options) for victim in ("controller", "fork")]
    print(f"{options.ranks} ranks, deadline {options.deadline_s:g} s\n")
    print("| what | verdict | seen, ms | over, ms | left |\n|---|---|---:|---:|---:|")
    for row in rows:
        seen = "" if row.seen_ms is None else f"{row.seen_ms:.0f}"
        print(f"| {row.what} | {row.verdict} | {seen} | {row.over_ms:.0f} | {row.left} |{'' if row.good else ' WRONG'}")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
