"""CPU seconds per case: ranks forked from one zygote against one torchrun per case. Same cases, same run.

    python ci/bench/engines.py [--repeats 3]

Reads as ratios: the machine may be shared, so the two ways take turns. The zygote's own start is paid once per
run of the harness and is printed on a line of its own.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
from pathlib import Path

import msgspec

from harness.engine.messages import Job
from harness.engine.torchrun import TorchrunEngine
from harness.engine.zygote_engine import ZygoteEngine
from harness.matrix.case import Case, Float8, Layout
from harness.matrix.caseid import case_id
from harness.request import RunRequest

PROGRAM = "harness.worker.main"
TENSORWISE = Float8(recipe="tensorwise")
CASES = (
    Case(float8=TENSORWISE),
    Case(layout=Layout(dp_shard=2), float8=TENSORWISE),
    Case(layout=Layout(dp_shard=8), float8=TENSORWISE),
    Case(layout=Layout(tp=2), float8=TENSORWISE),
    Case(layout=Layout(tp=8), float8=TENSORWISE),
)


def cpu_s(engine: ZygoteEngine | TorchrunEngine, case: Case) -> float:
    """CPU seconds of every process of one run of `case`."""
    with tempfile.TemporaryDirectory() as folder:
        payload = msgspec.msgpack.encode(RunRequest(case=case))
        outcome = engine.run(
            Job(job_id=Path(folder).name, world_size=case.world_size, payload=payload, deadline_s=600, folder=folder)
        )
    assert outcome.status == "ok", outcome.message
    return outcome.cpu_s


def children_cpu_s() -> float:
    """CPU seconds of all children of this process that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def start_cpu_s() -> float:
    """CPU seconds that starting and warming the zygote costs, once per run: measured with one small case."""
    before = children_cpu_s()
    with ZygoteEngine(PROGRAM) as engine:
        case_s = cpu_s(engine, CASES[0])
    return children_cpu_s() - before - case_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    print(f"zygote: {start_cpu_s():.1f} CPU s, once per run of the harness")
    print(f"{'case':32} {'ranks':>5} {'torchrun':>9} {'zygote':>7} {'ratio':>6}   (median CPU s of {repeats})")
    torchrun = TorchrunEngine(PROGRAM, {"warmup": "off"})
    with ZygoteEngine(PROGRAM) as zygote:
        for case in CASES:
            pairs = [(cpu_s(torchrun, case), cpu_s(zygote, case)) for _ in range(repeats)]
            cold, warm = (statistics.median(side) for side in zip(*pairs, strict=True))
            print(f"{case_id(case):32} {case.world_size:5} {cold:9.1f} {warm:7.1f} {cold / warm:5.1f}x")


if __name__ == "__main__":
    main()
