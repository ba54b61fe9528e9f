"""How much CPU time the probes add to the ranks, over a tier and for every case.

    python ci/bench/probes.py                                  a sample of all kinds of cases
    python ci/bench/probes.py pr --rounds 3 --sort             the whole tier, the most expensive cases last
    python ci/bench/probes.py --probes operands --case ID      one probe, one case

Every round runs a case without and with probes, one right after the other, on ranks forked from one fork server, and
takes the ratio of their CPU seconds. A shared machine is noisy even so: of the rounds the smallest, the median and the
largest ratio are printed, and beside them how far the runs without probes lie apart, which is nothing but noise.

Cases that must be refused, or that a fault of torch stops, train no step and are left out.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.checks.catalogue import probes_of
from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.messages import Job, Share
from harness.engine.outcome import conclude
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.records import matching
from harness.matrix.rules import expected_refusal
from harness.project import find_project
from harness.request import Backend, RunRequest
from harness.running.case_judge import known_here
from harness.running.plan import DEFAULT_PROGRAM
from harness.running.selection import Query, select_cases
from harness.verdict import Verdict

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
    "single-tensorwise-graph-v2048-f64",
    "fsdp2-rowwise-graph-v2048-b16",
    "atp2-fallback-tensorwise-tpstyle.fp8-ac.op-graph-v2048-b16",
    "atp4-rowwise-ac.full-graph-v2048-b16",
)
_ROW = "{:72} {:>5} {:>8} {:>6} {:>7} {:>7} {:>7} {:>6}"


class Cost(NamedTuple):
    """CPU seconds of all ranks of one case, one pair for every round."""

    case: Case
    pairs: tuple[tuple[float, float], ...]  # without probes, with them

    @property
    def ratios(self) -> list[float]:
        """What the probes added, in every round."""
        return [watched / plain - 1 for plain, watched in self.pairs]

    @property
    def noise(self) -> float:
        """How far apart the runs without probes are, relative to their median."""
        plain = [pair[0] for pair in self.pairs]
        return (max(plain) - min(plain)) / statistics.median(plain)

    def row(self) -> str:
        """One line of the table."""
        plain, watched = (statistics.median(side) for side in zip(*self.pairs, strict=True))
        ratios = (f"{ratio:+.0%}" for ratio in (min(self.ratios), statistics.median(self.ratios), max(self.ratios)))
        seconds = f"{plain:.2f}", f"{watched:.2f}"
        return _ROW.format(case_id(self.case), self.case.world_size, *seconds, *ratios, f"{self.noise:.0%}")


def measure(ask: Callable[[Case, tuple[str, ...]], float], case: Case, probes: tuple[str, ...], rounds: int) -> Cost:
    """Run one case alternately without and with probes; the order alternates too."""
    pairs = []
    for number in range(rounds):
        ways = [(), probes] if number % 2 == 0 else [probes, ()]
        spent = {way: ask(case, way) for way in ways}
        pairs.append((spent[()], spent[probes]))
    return Cost(case, tuple(pairs))


def cpu_s(engine: ForkServerEngine, backend: Backend, case: Case, probes: tuple[str, ...]) -> float:
    """CPU seconds of all ranks of one run of `case`, watched by `probes`."""
    with tempfile.TemporaryDirectory() as folder:
        payload = msgspec.msgpack.encode(RunRequest(case=case, backend=backend, probes=probes))
        job = Job(job_id=Path(folder).name, world_size=case.world_size, payload=payload, deadline_s=600)
        outcome = engine.run(Share(job=job, count=case.world_size, folder=folder), lambda _: None)
    ended = conclude(job, [outcome])
    assert ended.status == "ok", f"{case_id(case)}: {ended.message}"
    return ended.cpu_s


def training_cases(names: list[str], case_ids: list[str]) -> tuple[Case, ...]:
    """The cases of these tiers and case ids that train."""
    project = find_project(None)
    query = Query(sources=(*names, *case_ids))
    stops = [fault for fault in known_here(project) if fault.verdict in (Verdict.CRASH, Verdict.HANG)]
    return tuple(
        case for case in select_cases(project, query) if expected_refusal(case) is None and not matching(stops, case)
    )


def summary(costs: list[Cost]) -> str:
    """One line. Cases are weighted by cost: their seconds are summed, round by round, before they are divided."""
    by_round = zip(*(cost.pairs for cost in costs), strict=True)
    rounds = [[sum(side) for side in zip(*pairs, strict=True)] for pairs in by_round]
    shares = [1 - plain / watched for plain, watched in rounds]
    added = statistics.median(watched / plain - 1 for plain, watched in rounds)
    worst = max(costs, key=lambda cost: statistics.median(cost.ratios))
    return (
        f"probes: {statistics.median(shares):.1%} of the ranks' CPU over {len(costs)} cases"
        f" ({min(shares):.1%} to {max(shares):.1%} in {len(shares)} rounds): they add {added:.1%},"
        f" to one case up to {statistics.median(worst.ratios):.1%} ({case_id(worst.case)})"
    )


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TIER | CASE", help="what is run; a sample, if nothing is given")
    parser.add_argument("--case", action="append", default=[], metavar="ID", help="one more case")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs of every case (default 3)")
    parser.add_argument("--probes", default="", help="separated by commas (default: those that checks read)")
    parser.add_argument("--backend", choices=("shared", "gloo"), default="shared", help="what collectives run on")
    parser.add_argument("--sort", action="store_true", help="print the table again, the dearest cases last")
    return parser.parse_args()


def main() -> None:
    """Print the table and the summary."""
    options = parse_options()
    names = options.names or ([] if options.case else list(SAMPLE))
    cases = training_cases(names, options.case)
    compiles = "on" if any(case.compile != "none" for case in cases) else "off"  # as a run prepares its fork server
    header = _ROW.format("case", "ranks", "without", "with", "least", "median", "most", "noise")
    print(header)
    costs = []
    with ForkServerEngine(DEFAULT_PROGRAM, {"device": "cpu", "compile": compiles}) as engine:
        ask = functools.partial(cpu_s, engine, options.backend)
        for case in cases:
            probes = tuple(options.probes.split(",")) if options.probes else probes_of(Expectations(case), "cpu")
            costs.append(measure(ask, case, probes, options.rounds))
            print(costs[-1].row(), flush=True)
    if options.sort:
        print("", header, sep="\n")
        for cost in sorted(costs, key=lambda cost: statistics.median(cost.ratios)):
            print(cost.row())
    print(summary(costs))


if __name__ == "__main__":
    main()
