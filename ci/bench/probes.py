"""CPU seconds of all ranks with probes against without them. Same cases, same warm process.

    python ci/bench/probes.py [--repeats 3] [--probes operands,sketches] [TIER | CASE ...]

Reads as ratios: the machine may be shared, so the two ways take turns. Cases that must be refused, or that a fault of
torch stops, train no step and are left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import msgspec

from harness.engine.wire import Job
from harness.engine.zygote import ZygoteEngine
from harness.project import find_project
from harness.request import RunRequest
from harness.running.briefs import known_here
from harness.running.plan import CPU_PROBES, DEFAULT_PROGRAM
from harness.running.selection import Query, select_cases
from harness.spec.case import Case
from harness.spec.caseid import case_id
from harness.spec.known import match_known
from harness.spec.rules import expected_refusal

SAMPLE = (
    "single-bf16-v2048-b16",
    "single-tensorwise-v2048-f64",
    "single-rowwise-v2048-b16",
    "fsdp2-rowwise-head.fp8-pad-ac.op-v2256-gb16-b16",
    "fsdp4-tensorwise-ag.fp8-head.fp8-pad-ac.full-v2560-sl40-b16",
    "fsdp8-tensorwise-ag.fp8-ac.op-v2256-f64",
    "tp2-tensorwise-head.fp8-v2560-f64",
    "tp4-rowwise_with_gw_hp-ac.op-v2050-f64",
    "tp8-nolp-tensorwise-tpstyle.fp8-head.fp8-pad-ac.op-v2048-gb16-b16",
    "hsdp2x2-rowwise-v2050-sl40-f64",
    "hsdp4x2-tensorwise-ag.fp8pre-v2048-f64",
    "fsdp4-tp2-nolp-rowwise-v2050-f64",
    "hsdp2x2-tp2-nolp-rowwise_with_gw_hp-head.fp8-pad-ac.layer2-v2560-b16",
)


def cpu_s(engine: ZygoteEngine, case: Case, probes: tuple[str, ...]) -> float:
    """CPU seconds of all ranks of one run of `case`, watched by `probes`."""
    with tempfile.TemporaryDirectory() as folder:
        payload = msgspec.msgpack.encode(RunRequest(case=case, probes=probes))
        outcome = engine.run(
            Job(job_id=Path(folder).name, world_size=case.world_size, payload=payload, deadline_s=600, folder=folder)
        )
    assert outcome.status == "ok", outcome.message
    return outcome.cpu_s


def training_cases(names: list[str]) -> tuple[Case, ...]:
    """The cases of these tiers and case ids that train."""
    project = find_project(None)
    query = Query(
        sources=tuple(name for name in names if name in project.tiers),
        case_ids=tuple(name for name in names if name not in project.tiers),
    )
    stops = [fault for fault in known_here(project) if fault.verdict in ("crash", "hang")]
    return tuple(
        case
        for case in select_cases(project, query)
        if expected_refusal(case) is None and match_known(stops, case) is None
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TIER | CASE", default=list(SAMPLE))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--probes", default=",".join(CPU_PROBES))
    options = parser.parse_args()
    probes, repeats = tuple(options.probes.split(",")), options.repeats
    print(f"{'case':70} {'ranks':>5} {'without':>8} {'with':>6} {'more':>6}   (median CPU s of {repeats})")
    plain_s = watched_s = 0.0
    with ZygoteEngine(DEFAULT_PROGRAM) as engine:
        for case in training_cases(options.names):
            pairs = [(cpu_s(engine, case, ()), cpu_s(engine, case, probes)) for _ in range(repeats)]
            plain, watched = (statistics.median(side) for side in zip(*pairs, strict=True))
            plain_s, watched_s = plain_s + plain, watched_s + watched
            row = f"{case_id(case):70} {case.world_size:5} {plain:8.2f} {watched:6.2f}"
            print(f"{row} {watched / plain - 1:+6.0%}", flush=True)
    print(f"{'all':76} {plain_s:8.2f} {watched_s:6.2f} {watched_s / plain_s - 1:+6.0%}")


if __name__ == "__main__":
    main()
