"""How busy other numbers of cores would be in a run: its recorded CPU seconds on a schedule that is played through.

    python ci/bench/cores.py RESULT.json [--cores 4 8]

RESULT.json is of `run --json`, with fresh references (`FP8_HARNESS_STATE` of an empty folder). The longest cases
start first, on a thread a core, each behind the references that no earlier one has run; a job uses at most a core a
rank, and running jobs share the cores evenly. What the controller does beside them is not played.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.evidence.costs import read_costs
from harness.matrix.caseid import parse_case_id
from harness.project import find_project
from harness.result import RunResult
from harness.running.stored import read_results

Work = Sequence[tuple[int, float]]  # ranks and CPU seconds, one behind the other


def main() -> None:
    """Print a line for each number of cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    works = works_of(read_results(options.result))
    cpu_s = sum(seconds for work in works for _, seconds in work)
    for cores in options.cores:
        wall_s = wall_of(works, cores=cores, jobs=cores)
        print(f"{cores} cores: {wall_s:.0f} s of wall clock, busy {cpu_s / cores / wall_s:.0%}")


def works_of(run: RunResult) -> list[Work]:
    """Return the work of each case in the order of starting, its references first where no earlier case needs them."""
    costs, known = read_costs(find_project().root), {each.name: each for each in run.end.references if each.ran}
    results = sorted(run.results, key=lambda result: -costs.case_s(parse_case_id(result.case_id)))
    works = []
    for result in results:
        case = parse_case_id(result.case_id)
        needed = [known.pop(name) for name in costs.price(case).shared_s if name in known]
        works.append([*((1, each.cpu_s) for each in needed), (case.world_size, result.cpu_s)])
    return [*works, *([(1, each.cpu_s)] for each in known.values())]


def wall_of(works: Iterable[Work], *, cores: int, jobs: int) -> float:
    """Return the seconds that the works take."""
    pending = deque(deque([ranks, cpu_s] for ranks, cpu_s in work) for work in works)
    running, now_s = list[deque[list[float]]](), 0.0
    while pending or running:
        while pending and len(running) < jobs:
            running.append(pending.popleft())
        rates = _rates([int(work[0][0]) for work in running], cores)
        step_s = min(work[0][1] / rate for work, rate in zip(running, rates, strict=True))
        now_s += step_s
        for work, rate in zip(running, rates, strict=True):
            work[0][1] -= rate * step_s
        for work in running:
            while work and work[0][1] <= 1e-9:
                work.popleft()
        running = [work for work in running if work]
    return now_s


def _rates(ranks: Sequence[int], cores: float) -> list[float]:
    """Return how many cores each job has: an even share, but none more than it has ranks."""
    rates = [0.0] * len(ranks)
    left = sorted(range(len(ranks)), key=lambda at: ranks[at])
    for number, at in enumerate(left):
        rates[at] = min(float(ranks[at]), cores / (len(left) - number))
        cores -= rates[at]
    return rates


if __name__ == "__main__":
    main()
