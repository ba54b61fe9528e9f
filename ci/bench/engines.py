"""CPU seconds per case: ranks forked from one fork server, or one torchrun per case, in one run of the same cases.

    python ci/bench/engines.py [--repeats 3]

Reads as ratios: the machine may be shared, so the two ways take turns. The fork server's own start is paid once per
run of the harness and is printed on its own line.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
from pathlib import Path

import msgspec

from harness.engine.cluster import Cluster
from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.hardware import capacity_here
from harness.engine.leases import Leases
from harness.engine.messages import Job
from harness.engine.node import LocalNode
from harness.matrix.case import Case, Float8, Layout
from harness.matrix.caseid import case_id
from harness.plugins.launchers.torchrun import TorchrunEngine
from harness.request import RunRequest

PROGRAM = "harness.worker.main"
SLOTS = 8
TENSORWISE = Float8(recipe="tensorwise")
CASES = (
    Case(float8=TENSORWISE),
    Case(layout=Layout(dp_shard=2), float8=TENSORWISE),
    Case(layout=Layout(dp_shard=8), float8=TENSORWISE),
    Case(layout=Layout(tp=2), float8=TENSORWISE),
    Case(layout=Layout(tp=8), float8=TENSORWISE),
)


def open_cluster(engine: type[ForkServerEngine | TorchrunEngine], folder: str) -> Cluster:
    """This machine, whose ranks are started by this engine."""
    node = LocalNode(lambda preload: engine(PROGRAM, preload), Leases(Path(folder), SLOTS), capacity_here("cpu", SLOTS))
    return Cluster([node])


def cpu_s(cluster: Cluster, case: Case, **preload: str) -> float:
    """CPU seconds of every process of one run of `case`."""
    payload = msgspec.msgpack.encode(RunRequest(case=case))
    job = Job(job_id="bench", world_size=case.world_size, payload=payload, deadline_s=600, preload=preload)
    outcome = cluster.run(job)
    assert outcome.status == "ok", outcome.message
    return outcome.cpu_s


def children_cpu_s() -> float:
    """CPU seconds of all children of this process that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def start_cpu_s() -> float:
    """CPU seconds that starting and warming the fork server costs, once per run: measured with one small case."""
    before = children_cpu_s()
    with tempfile.TemporaryDirectory() as folder, open_cluster(ForkServerEngine, folder) as fork_server:
        case_s = cpu_s(fork_server, CASES[0])
    return children_cpu_s() - before - case_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    print(f"fork server: {start_cpu_s():.1f} CPU s, once per run of the harness")
    print(f"{'case':32} {'ranks':>5} {'torchrun':>9} {'fork server':>7} {'ratio':>6}   (median CPU s of {repeats})")
    with (
        tempfile.TemporaryDirectory() as folder,
        open_cluster(TorchrunEngine, folder) as torchrun,
        open_cluster(ForkServerEngine, folder) as fork_server,
    ):
        for case in CASES:
            pairs = [(cpu_s(torchrun, case, warmup="off"), cpu_s(fork_server, case)) for _ in range(repeats)]
            cold, warm = (statistics.median(side) for side in zip(*pairs, strict=True))
            print(f"{case_id(case):32} {case.world_size:5} {cold:9.1f} {warm:7.1f} {cold / warm:5.1f}x")


if __name__ == "__main__":
    main()
