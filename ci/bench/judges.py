"""Which injected faults torch's own checks find: CommDebugMode counts and DebugMode hashes, beside our checks.

    fp8-harness dev mutate --json matrix.json            what our checks, the loss and SQNR find
    python ci/bench/judges.py --matrix matrix.json       writes that into judges.json
    python ci/bench/judges.py --every 9                  asks torch's checks about every 9th fault, and adds that

Every fault runs in a bfloat16 host. The reference of a judge is a clean run of the same code in the same layout. A
user has none: a bug that the code has is in both runs. Clean runs are repeated, with two threads in a rank and with
another instruction set: what differs there is a false alarm. A judge whose run fails could not watch. Every answer is
written when it is there: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import msgspec
from comparison import CLEAN, RECORD, Alarms, Comparison, Row, read, write

from harness.jsonform import from_json
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.rules import expected_refusal
from harness.plugins.faults.faults import PREFIX, fault_named
from harness.plugins.faults.mutation import MutationMatrix, Trial
from harness.project import Project, find_project
from harness.request import RunRequest
from harness.running.executor import Executor, open_executor
from harness.running.plan import Plan, make_plan
from harness.sources import installed_versions
from harness.trace.record import Patch

HERE = Path(__file__).parent
WATCHERS = ("comm", "hashes")
# How a clean run is repeated: environment of its fork server
REPEATS: Mapping[str, Mapping[str, str]] = {
    "the same again": {},
    "with two threads a rank": {"FP8_HARNESS_RANK_THREADS": "2"},
    "without AVX512": {"ATEN_CPU_CAPABILITY": "avx2"},
}
DEADLINE_S = 300.0
STEPS = 2
REPEATED = 3  # every third clean case is repeated and timed


class Seen(msgspec.Struct, frozen=True):
    """What the checks saw on one rank."""

    comm: str
    hashes: str
    cpu_s: float


class Work(NamedTuple):
    """One run: which judge watches which case, with which fault."""

    judge: str  # "": nobody
    case_id: str
    fault: str = ""


Ranks = Sequence[Seen] | None  # None: the run failed


def of_matrix(matrix: MutationMatrix, before: Comparison) -> Comparison:
    """What a mutation matrix says, with what torch's checks said before of the same faults in the same cases."""
    clean = {trial.case_id: trial for trial in matrix.clean if trial.case_id.endswith("-b16")}
    trials = {trial.fault or "": trial for trial in matrix.trials if trial.case_id in clean and trial.is_proof}
    asked = {(row.fault, row.case_id): row.asked for row in before.rows}
    rows = (
        Row(fault, trial.case_id, found_by(trial, clean[trial.case_id]), asked.get((fault, trial.case_id), {}))
        for fault, trial in trials.items()
    )
    alarms = {CLEAN: called_wrong(clean), **{name: by for name, by in before.alarms.items() if name in REPEATS}}
    software = installed_versions(("torch", "torchao"))
    return Comparison(rows=tuple(rows), alarms=alarms, cpu_s=before.cpu_s, software=software)


def found_by(trial: Trial, clean: Trial) -> tuple[str, ...]:
    """Who found the fault of a trial; nobody finds anything who calls the clean run wrong."""
    both = [
        [
            name
            for name, calls_wrong in (("loss", judged.baseline.by_loss), ("sqnr", judged.baseline.by_sqnr))
            if calls_wrong
        ]
        for judged in (trial, clean)
    ]
    return *(name for name in both[0] if name not in both[1]), *(["checks"] * trial.detected)


def called_wrong(clean: Mapping[str, Trial]) -> dict[str, Alarms]:
    """What the checks of the mutation matrix say of its clean runs."""
    ran = {case: trial for case, trial in clean.items() if not is_refused(case)}
    by = {
        "loss": [case for case, trial in ran.items() if trial.baseline.by_loss],
        "sqnr": [case for case, trial in ran.items() if trial.baseline.by_sqnr],
        "checks": [case for case, trial in ran.items() if not trial.verdict.good],
    }
    return {judge: Alarms(wrong=tuple(cases), of=len(ran)) for judge, cases in by.items()}


def is_refused(case_id: str) -> bool:
    return expected_refusal(parse_case_id(case_id)) is not None


class Asking:
    """Asks torch's checks about a sample of the faults of a record, and keeps every answer at once."""

    def __init__(self, path: Path, project: Project, plan: Plan, every: int) -> None:
        self._path, self._project, self._plan = path, project, plan
        self._record = read(path)
        early = [row for row in self._record.rows if fault_named(row.fault).since_step <= STEPS]
        self._sample = {row.fault: row.case_id for row in early[::every]}
        sound = [case for case in dict.fromkeys(self._sample.values()) if not is_refused(case)]
        self._repeated = tuple(sound[::REPEATED])

    def run(self) -> None:
        self._ask_watchers()
        for name in REPEATS:
            if name not in self._record.alarms:
                self._repeat(name)
        if not self._record.cpu_s:
            self._time()

    def _open(self, fault: str) -> Mapping[str, bool | None]:
        return next(row.asked for row in self._record.rows if row.fault == fault)

    def _keep(self, **changes: object) -> None:
        self._record = msgspec.structs.replace(self._record, **changes)
        write(self._record, self._path)

    def _answer(self, fault: str, judge: str, answer: bool | None) -> None:
        rows = (
            msgspec.structs.replace(row, asked={**row.asked, judge: answer}) if row.fault == fault else row
            for row in self._record.rows
        )
        self._keep(rows=tuple(rows))

    def _watched(self, works: Sequence[Work], repeat: str = "") -> Iterator[Ranks]:
        return watched(works, self._plan, self._project, REPEATS.get(repeat, {}))

    def _ask_watchers(self) -> None:
        """The clean run of a case and judge, then its faults."""
        asked = [
            Work(judge, case, fault)
            for fault, case in self._sample.items()
            for judge in WATCHERS
            if judge not in self._open(fault)
        ]
        clean = dict.fromkeys(work._replace(fault="") for work in asked)
        works = [work for first in clean for work in (first, *(w for w in asked if w._replace(fault="") == first))]
        seen: dict[Work, Ranks] = {}
        for work, ranks in zip(works, self._watched(works), strict=True):
            seen[work] = ranks
            if work.fault:
                self._answer(work.fault, work.judge, differs(work.judge, ranks, seen[work._replace(fault="")]))

    def _repeat(self, name: str) -> None:
        works = [Work(judge, case) for case in self._repeated for judge in WATCHERS]
        first = dict(zip(works, self._watched(works), strict=True))
        again = dict(zip(works, self._watched(works, name), strict=True))
        answers = {work: differs(work.judge, again[work], first[work]) for work in works}
        by = {judge: {work.case_id: answers[work] for work in works if work.judge == judge} for judge in WATCHERS}
        alarms = {
            judge: Alarms(
                wrong=tuple(case for case, wrong in said.items() if wrong),
                of=sum(wrong is not None for wrong in said.values()),
            )
            for judge, said in by.items()
        }
        self._keep(alarms={**self._record.alarms, name: alarms})

    def _time(self) -> None:
        """CPU seconds for a clean case, of all ranks, over the cases that everybody can watch."""
        works = [Work(judge, case) for case in self._repeated for judge in ("", *WATCHERS)]
        seen = dict(zip(works, self._watched(works), strict=True))
        whole = [case for case in self._repeated if None not in [seen[Work(j, case)] for j in ("", *WATCHERS)]]
        self._keep(
            cpu_s={
                judge: sum(rank.cpu_s for case in whole for rank in seen[Work(judge, case)] or ()) / len(whole)
                for judge in (("", *WATCHERS) if whole else ())
            }
        )


def watched(works: Sequence[Work], plan: Plan, project: Project, environment: Mapping[str, str]) -> Iterator[Ranks]:
    """What every rank of each run saw, in order; the fork servers have these variables too."""
    if not works:
        return
    plan = plan.serving([parse_case_id(work.case_id) for work in works])
    with (
        patch.dict(os.environ, environment),
        open_executor(plan, project) as executor,
        ThreadPoolExecutor(plan.jobs) as pool,
    ):
        for number, (work, seen) in enumerate(
            zip(works, pool.map(functools.partial(seen_by_ranks, executor), works), strict=True), 1
        ):
            said = " ".join(filter(None, work))
            print(f"{number}/{len(works)} {'failed' if seen is None else 'ran'} {said}", flush=True)
            yield seen


def seen_by_ranks(executor: Executor, work: Work) -> Ranks:
    case = shortened(parse_case_id(work.case_id))
    with tempfile.TemporaryDirectory() as folder:
        source = (HERE / "judges_observer.py").read_text().replace('FOLDER = ""', f"FOLDER = {folder!r}")
        source = source.replace('JUDGE = ""', f"JUDGE = {work.judge!r}")
        patches = [Patch(text="judges_observer.py:observe", source=source.encode())]
        patches += [Patch(text=PREFIX + work.fault)] if work.fault else []
        ended = executor.serve(RunRequest(case=case, injections=tuple(patches)))
        if ended is None or ended.status != "ok":
            print(f"{' '.join(filter(None, work))}: {'stopped' if ended is None else ended.message[:200]}", flush=True)
            return None
        files = [Path(folder) / f"rank{rank}.json" for rank in range(case.world_size)]
        return tuple(msgspec.json.decode(file.read_bytes(), type=Seen) for file in files)


def shortened(case: Case) -> Case:
    """The case with as many steps as these checks need: what goes wrong later is left out of the sample."""
    if case.train.resume != "none":
        return case
    return msgspec.structs.replace(case, train=msgspec.structs.replace(case.train, steps=STEPS))


def differs(judge: str, seen: Ranks, clean: Ranks) -> bool | None:
    """Whether the judge calls the run wrong; None if it could not watch one of both."""
    if seen is None or clean is None:
        return None
    return [getattr(rank, judge) for rank in seen] != [getattr(rank, judge) for rank in clean]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", type=Path, help="what `dev mutate --json` wrote")
    parser.add_argument("--every", type=int, default=0, help="ask about one fault in so many (default: none)")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--record", type=Path, default=RECORD, help="where the result goes (default: beside this file)")
    options = parser.parse_args()
    if options.matrix is not None:
        before = read(options.record) if options.record.exists() else Comparison()
        write(of_matrix(from_json(options.matrix.read_bytes(), MutationMatrix), before), options.record)
    if options.every:
        plan = make_plan(device="cpu", jobs=options.jobs, timeout_s=DEADLINE_S)
        Asking(options.record, find_project(), plan, options.every).run()


if __name__ == "__main__":
    main()
