"""Which planted faults torch's own judges find: CommDebugMode counts and DebugMode hashes, beside our checks.

    fp8-harness dev mutate --json matrix.json            what our checks, the loss and SQNR find
    python ci/bench/judges.py --matrix matrix.json       the same faults, before the judges; writes judges.json

Every fault runs in a bfloat16 host. The reference of a judge is a clean run of the same code in the same layout. A
user has none: a bug that the code has is in both runs. Clean runs are repeated, with two threads in a rank and with
another instruction set: what differs there is a false alarm. A judge whose run fails could not watch.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
from comparison import CLEAN, RECORD, Alarms, Comparison, Row, write

from harness.engine.messages import Job, Share
from harness.engine.outcome import conclude
from harness.engine.zygote_engine import ZygoteEngine
from harness.jsonform import from_json
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.faults import PREFIX, fault_named
from harness.matrix.rules import expected_refusal
from harness.request import RunRequest
from harness.running.plan import DEFAULT_PROGRAM
from harness.sources import installed_versions
from harness.studies.judges import PROGRAM, VALIDATION
from harness.studies.mutation import MutationMatrix, Trial
from harness.trace.operator_checks import StrategyQuestion
from harness.trace.record import Patch

HERE = Path(__file__).parent
JUDGES = ("comm", "hashes")
# How a clean run is repeated: environment of its zygote
REPEATS: Mapping[str, Mapping[str, str]] = {
    "the same again": {},
    "with two threads a rank": {"FP8_HARNESS_RANK_THREADS": "2"},
    "without AVX512": {"ATEN_CPU_CAPABILITY": "avx2"},
}
DEADLINE_S = 300.0
OPERATORS = ("mm", "embedding", "amax", "abs", "_log_softmax", "t", "view", "cat")
STEPS = 2
TIMED = 3  # every third clean case is repeated and timed


class Seen(msgspec.Struct, frozen=True):
    """What the judges saw on one rank."""

    comm: str
    hashes: str
    cpu_s: float


class Work(NamedTuple):
    """One run: which judge watches which case, with which fault."""

    judge: str  # "": nobody
    case_id: str
    fault: str | None = None


def shortened(case: Case) -> Case:
    """The case with as many steps as these judges need: what goes wrong later is left out of the sample."""
    if case.train.resume != "none":
        return case
    return msgspec.structs.replace(case, train=msgspec.structs.replace(case.train, steps=STEPS))


def watched(engine: ZygoteEngine, work: Work) -> tuple[Seen, ...] | None:
    """What every rank saw; None where the run failed."""
    case = shortened(parse_case_id(work.case_id))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as seen:
        source = (HERE / "judges_observer.py").read_text().replace('FOLDER = ""', f"FOLDER = {seen!r}")
        source = source.replace('JUDGE = ""', f"JUDGE = {work.judge!r}")
        patches = [Patch(text="judges_observer.py:observe", source=source.encode())]
        patches += [Patch(text=PREFIX + work.fault)] if work.fault is not None else []
        job = Job(
            job_id=Path(folder).name,
            world_size=case.world_size,
            payload=msgspec.msgpack.encode(RunRequest(case=case, injections=tuple(patches))),
            deadline_s=DEADLINE_S,
        )
        ended = conclude(job, [engine.run(Share(job=job, count=case.world_size, folder=folder), lambda _: None)])
        if ended.status != "ok":
            print(f"{' '.join(filter(None, work))}: {ended.message[:200]}", flush=True)
            return None
        files = [Path(seen) / f"rank{rank}.json" for rank in range(case.world_size)]
        return tuple(msgspec.json.decode(file.read_bytes(), type=Seen) for file in files)


def run_all(works: Sequence[Work], environment: Mapping[str, str], jobs: int) -> dict[Work, tuple[Seen, ...] | None]:
    """All runs on ranks forked from one zygote, which has these variables too."""
    os.environ.update(environment)
    compiles = any(parse_case_id(work.case_id).compile != "none" for work in works)
    with (
        ZygoteEngine(DEFAULT_PROGRAM, {"device": "cpu", "compile": "on" if compiles else "off"}) as engine,
        ThreadPoolExecutor(jobs) as pool,
    ):
        found = {}
        for work, seen in zip(works, pool.map(functools.partial(watched, engine), works), strict=True):
            found[work] = seen
            print(
                f"{len(found)}/{len(works)} {'failed' if seen is None else 'ran'} {' '.join(filter(None, work))}",
                flush=True,
            )
    for name in environment:
        del os.environ[name]
    return found


def validations(faults: Sequence[str | None], jobs: int) -> dict[str | None, bytes | None]:
    """Torch's validation of the strategies that TP needs, with each fault; None where it does not end."""

    def validated(fault: str | None) -> bytes | None:
        patches = (Patch(text=PREFIX + fault),) if fault is not None else ()
        question = StrategyQuestion(module=VALIDATION, operators=OPERATORS, injections=patches)
        with tempfile.TemporaryDirectory() as folder:
            payload = msgspec.msgpack.encode(question)
            job = Job(job_id=Path(folder).name, world_size=1, payload=payload, deadline_s=DEADLINE_S)
            ended = conclude(job, [engine.run(Share(job=job, count=1, folder=folder), lambda _: None)])
        print(f"{ended.status} strategies {fault or 'clean'} {ended.cpu_s:.1f} s", flush=True)
        return ended.ranks[0].payload if ended.status == "ok" else None

    with ZygoteEngine(PROGRAM, {"validation": VALIDATION}) as engine, ThreadPoolExecutor(jobs) as pool:
        return dict(zip(faults, pool.map(validated, faults), strict=True))


def differs(judge: str, seen: Sequence[Seen] | None, clean: Sequence[Seen] | None) -> bool | None:
    """Whether the judge calls the run wrong; None if it could not watch one of both."""
    if seen is None or clean is None:
        return None
    return [getattr(each, judge) for each in seen] != [getattr(each, judge) for each in clean]


def found_by(trial: Trial, clean: Trial) -> list[str]:
    """Who found the fault of a trial in the mutation matrix; nobody finds anything who calls the clean run wrong."""
    both = [
        [name for name, found in (("loss", each.baseline.by_loss), ("sqnr", each.baseline.by_sqnr)) if found]
        for each in (trial, clean)
    ]
    return [*(name for name in both[0] if name not in both[1]), *(["checks"] * trial.detected)]


def measure(matrix: MutationMatrix, jobs: int, every: int) -> Comparison:
    """Run everything."""
    clean = {trial.case_id: trial for trial in matrix.clean if trial.case_id.endswith("-b16")}
    trials = {trial.fault or "": trial for trial in matrix.trials if trial.case_id in clean and trial.is_proof}
    early = [fault for fault in trials if fault_named(fault).since_step <= STEPS]
    sample = {fault: trials[fault].case_id for fault in (early[::every] if every else ())}
    cases = tuple(dict.fromkeys(sample.values()))
    repeated = tuple(case for case in cases if not is_refused(case))[::TIMED]
    timed = [Work(judge, case) for case in repeated for judge in ("", *JUDGES)]
    works = [Work(judge, case) for judge in JUDGES for case in cases]
    works += [Work(judge, case, fault) for judge in JUDGES for fault, case in sample.items()]
    seen = run_all(tuple(dict.fromkeys((*timed, *works))), {}, jobs)
    said = validations((None, *sample), jobs) if sample else {}
    rows = []
    for fault, trial in trials.items():
        case = trial.case_id
        asked: dict[str, bool | None] = {}
        if fault in sample:
            asked = {judge: differs(judge, seen[Work(judge, case, fault)], seen[Work(judge, case)]) for judge in JUDGES}
            asked["strategies"] = None if None in (said[fault], said[None]) else said[fault] != said[None]
        rows.append(
            Row(
                fault=fault,
                case_id=case,
                found=(*found_by(trial, clean[case]), *(judge for judge, found in asked.items() if found)),
                unwatched=tuple(judge for judge in asked if asked[judge] is None) if asked else None,
            )
        )
    wrong = {CLEAN: called_wrong(clean)}
    for name, environment in REPEATS.items() if sample else ():
        again = run_all([Work(judge, case) for case in repeated for judge in JUDGES], environment, jobs)
        found = {work: differs(work.judge, other, seen[work]) for work, other in again.items()}
        wrong[name] = {
            judge: Alarms(
                wrong=tuple(case for case in repeated if found[Work(judge, case)]),
                of=sum(found[Work(judge, case)] is not None for case in repeated),
            )
            for judge in JUDGES
        }
    installed = installed_versions(("torch", "torchao"))
    return Comparison(
        rows=tuple(rows),
        alarms=wrong,
        cpu_s=costs(repeated, seen),
        software={name: version for name, version in installed.items() if version is not None},
    )


def called_wrong(clean: Mapping[str, Trial]) -> dict[str, Alarms]:
    """What the judges of the mutation matrix say of its clean runs."""
    ran = {case: trial for case, trial in clean.items() if not is_refused(case)}
    by = {
        "loss": [case for case, trial in ran.items() if trial.baseline.by_loss],
        "sqnr": [case for case, trial in ran.items() if trial.baseline.by_sqnr],
        "checks": [case for case, trial in ran.items() if not trial.verdict.good],
    }
    return {judge: Alarms(wrong=tuple(cases), of=len(ran)) for judge, cases in by.items()}


def costs(cases: Sequence[str], seen: Mapping[Work, Sequence[Seen] | None]) -> dict[str, float]:
    """CPU seconds by judge for a clean case, of all ranks, over the cases that everybody can watch."""
    runs = {case: {judge: seen[Work(judge, case)] for judge in ("", *JUDGES)} for case in cases}
    whole = [by for by in runs.values() if None not in by.values()]
    return {
        judge: sum(each.cpu_s for by in whole for each in by[judge] or ()) / len(whole)
        for judge in (("", *JUDGES) if whole else ())
    }


def is_refused(case_id: str) -> bool:
    return expected_refusal(parse_case_id(case_id)) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", type=Path, required=True, help="what `dev mutate --json` wrote")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        help="a sample of one fault in so many (default 1: all; 0: what the matrix has, and nothing runs)",
    )
    parser.add_argument("--record", type=Path, default=RECORD, help="where the result goes (default: beside this file)")
    options = parser.parse_args()
    matrix = from_json(options.matrix.read_bytes(), MutationMatrix)
    write(measure(matrix, options.jobs, options.every), options.record)


if __name__ == "__main__":
    main()
