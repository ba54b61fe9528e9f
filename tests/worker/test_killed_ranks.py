"""Whatever kills a rank, in whichever run and whenever: a fault of the machine is retried once and is never a verdict.

Real processes and a rank program without torch. The judge stands for any: it compares a case with one reference, and
calls it wrong where there is none.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import psutil
import pytest

from harness.checks.judge import Judgement, judge
from harness.checks.parity import NO_REFERENCE
from harness.engine import linux
from harness.engine import outcome as retry
from harness.engine.cluster import Cluster
from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.hardware import NodeCapacity
from harness.engine.leases import Leases
from harness.engine.messages import JobStatus
from harness.engine.node import LocalNode
from harness.engine.symptoms import MACHINE_SIGNALS
from harness.evidence.references import (
    Reference,
    RunsByRole,
    bf16_reference,
    noisy_reference,
    partner_reference,
    replay_reference,
    solo_reference,
)
from harness.expect.expectations import Expectations
from harness.expect.relations import partner
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id, reference_case
from harness.matrix.numerics import VIRTUAL_DEVICE
from harness.request import RunRequest
from harness.result import CaseResult
from harness.running.case_runner import NONE, CaseRunner, Judge
from harness.running.executor import Executor
from harness.running.plan import Injection, Plan
from harness.running.references import ReferenceLost, ReferenceRunner
from harness.trace import Run
from harness.verdict import Verdict
from tests.builders import make_witnesses
from tests.worker import killedprogram
from tests.worker.killedprogram import Kind, Moment
from tests.worker.processes import nothing_is_left, wait_until

__all__ = ["nothing_is_left"]  # after every test

PROGRAM = "tests.worker.killedprogram"
CASE = parse_case_id("tp2-tensorwise-ac.full-v2048-s2-b16")
FIX = Injection(text="fix.py:apply", target="/fix.py:apply")
SLOTS = 12
killed_ranks = sys.modules[__name__]
PLAN = Plan(probed=True)

KINDS: tuple[Kind, ...] = get_args(Kind)
MOMENTS: tuple[Moment, ...] = get_args(Moment)
ON_ONE_RANK = ("solo", "golden", "noise", "replay")
BY_MACHINE = tuple(number.name for number in MACHINE_SIGNALS if number != signal.SIGINT)  # which ranks ignore
BY_ITSELF = ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL", "exit", "exception")


class Killed(NamedTuple):
    """A rank that is killed: in which run, when, how, and how often before it is left alone."""

    kind: Kind
    moment: Moment
    how: str
    times: int


class Ending(NamedTuple):
    """How the case ended, and how many attempts the run took of which a rank was killed."""

    verdict: Verdict
    attempts: int
    text: str


REFERENCES: Mapping[str, Callable[[Case, Run], Reference]] = {
    "replay": replay_reference,
    "noise": lambda case, run: noisy_reference(case, ()),
    "golden": lambda case, run: bf16_reference(case),
    "solo": lambda case, run: solo_reference(case),
    "partner": lambda case, run: partner_reference(Expectations(case)),
    "unprobed": lambda case, run: Reference(
        role="unprobed", name="unprobed", case=case, request=RunRequest(case=case), kept=False
    ),
}


class Comparing(Judge):
    """Compares a case with the reference of this kind."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def fixes(self, case: Case) -> tuple[Injection, ...]:
        return (FIX,) if self._kind == "with fix" else ()

    def needs(
        self, case: Case, run: Run | None = None, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
    ) -> tuple[Reference, ...]:
        if run is None or not run.complete or self._kind not in REFERENCES:
            return ()
        return (REFERENCES[self._kind](case, run),)

    def judge(
        self, case: Case, run: Run, status: JobStatus, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
    ) -> Judgement:
        if status != "ok" or not run.complete:
            return judge(case, run, status, make_witnesses(case))
        if self._kind == "with fix" and not fixes:
            return Judgement(verdict=Verdict.KNOWN, findings=())
        if any(other is None or not other.complete for other in have.values()):
            missing = NO_REFERENCE.finding(who=self._kind, why=": it did not finish")
            return Judgement(verdict=Verdict.INVARIANT, findings=(missing,))
        return Judgement(verdict=Verdict.PASSED, findings=())


class Machine:
    """A machine with one warm fork server, on which cases are run whose ranks are killed."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        self._folder = folder
        self._plans = folder / "plans"
        self._plans.mkdir()
        self._seeds = itertools.count(1)
        self.leases = Leases(folder / "leases", SLOTS)
        capacity = NodeCapacity(host="here", slots=SLOTS, device="cpu", device_name="cpu")
        given = {"plans": str(self._plans)}
        node = LocalNode(lambda options: ForkServerEngine(PROGRAM, {**options, **given}), self.leases, capacity)
        self.executor = Executor(PLAN, Cluster([node], note=self.notes.append), folder)

    def run(self, killed: Killed | None, judge: Comparing | None = None) -> Ending:
        case = self._planned(killed)
        folder = self._folder / "references" / str(case.train.seed)
        references = ReferenceRunner(self.executor, folder, lambda _: "")
        judge = judge or Comparing(killed.kind if killed else "case")
        result = CaseRunner(PLAN, self.executor, judge, references).run(case)
        assert result is not None
        made = [len(reference.retried) + 1 for reference in references.log]
        attempts = made[0] if made else len(result.attempts)
        return Ending(result.verdict, attempts, _text(result))

    def _planned(self, killed: Killed | None) -> Case:
        seed = next(self._seeds)
        case = msgspec.structs.replace(CASE, train=msgspec.structs.replace(CASE.train, seed=seed))
        if killed is not None:
            relation = partner(case, VIRTUAL_DEVICE)
            assert relation is not None
            ids: dict[str, Kind] = {
                case_id(relation.partner): "partner",
                case_id(reference_case(case)): "golden",
            }
            plan = killedprogram.Plan(**killed._asdict(), ids=ids)
            (self._plans / f"{seed}.json").write_bytes(msgspec.json.encode(plan))
        return case


def _text(result: CaseResult) -> str:
    return " ".join(finding.message for finding in result.findings)


def possible(killed: Killed) -> bool:
    """A single rank is not waited for after it has returned, and nothing is raised by then."""
    if killed.kind in ON_ONE_RANK and killed.moment in ("in a collective", "after returning"):
        return False
    return killed.how not in ("exception", "out of memory") or "returning" not in killed.moment


def promised(killed: Killed) -> tuple[Verdict, int]:
    """The verdict on the case, and how many attempts the killed run took."""
    if killed.how in BY_ITSELF:
        return _own_fault(killed.kind), 1
    most = 3 if killed.how == "fork server killed" else 2
    if killed.times < most:
        return (Verdict.KNOWN if killed.kind == "with fix" else Verdict.PASSED), killed.times + 1
    return (_own_fault(killed.kind) if most == 3 else Verdict.INFRA), most


def _own_fault(kind: Kind) -> Verdict:
    return Verdict.CRASH if kind in ("case", "with fix") else Verdict.INVARIANT


def wrong(machine: Machine, rows: Iterable[Killed], *, threads: int = 6) -> list[str]:
    """What did not end as promised."""
    with ThreadPoolExecutor(threads) as pool:
        endings = list(pool.map(lambda row: (row, machine.run(row)), rows))
    assert len(endings) > 0
    return [f"{row} ended as {ending}" for row, ending in endings if promised(row) != ending[:2]]


def left(machine: Machine) -> tuple[object, ...]:
    """Slots that are held, and processes but idle fork servers."""
    return machine.leases.held_slots(), [rank.pid for fork_server in fork_servers() for rank in fork_server.children()]


def fork_servers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # gone by now
            found += [child] if PROGRAM in child.cmdline() else []
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    with machine.executor:
        yield machine
        assert left(machine) == ((), [])


ROWS = [
    row
    for row in (
        *itertools.starmap(Killed, itertools.product(KINDS, MOMENTS, (*BY_MACHINE, "out of memory"), (1, 2))),
        *itertools.starmap(Killed, itertools.product(KINDS, MOMENTS, BY_ITSELF, (1,))),
    )
    if possible(row)
]
OF_FORK_SERVERS = [
    Killed(kind, "before training", "fork server killed", times) for kind in KINDS for times in (1, 2, 3)
]


def some(rows: Sequence[Killed]) -> list[Killed]:
    """Few of them, in which every kind, moment, signal and number of times is."""
    chosen: list[Killed] = []
    for row in random.Random(0).sample(rows, len(rows)):
        if {*row} - {value for other in chosen for value in other}:
            chosen.append(row)
    return chosen


def test_a_killed_rank_is_retried_once_and_never_a_verdict(machine: Machine) -> None:
    assert wrong(machine, some(ROWS)) == []
    assert len([note for note in machine.notes if note.startswith("infra, trying again: ")]) > 5


@pytest.mark.sweep
def test_every_kind_of_run_signal_and_moment(machine: Machine) -> None:
    assert wrong(machine, ROWS) == []
    assert wrong(machine, OF_FORK_SERVERS, threads=1) == []


def test_a_fork_server_that_a_rank_kills_twice_costs_a_reference_nothing(machine: Machine) -> None:
    assert wrong(machine, [Killed("solo", "before training", "fork server killed", times=2)], threads=1) == []


def test_a_neighbor_on_the_fork_server_that_a_rank_kills_gets_its_own_verdict(machine: Machine) -> None:
    neighbors = [Killed("case", "before training", "waits", times=1)] * 3
    with ThreadPoolExecutor(len(neighbors)) as pool:
        running = [pool.submit(machine.run, row) for row in neighbors]
        wait_until(lambda: len(left(machine)[1]) == 2 * len(neighbors), 30)
        culprit = machine.run(Killed("case", "in a collective", "fork server killed", times=3))
        endings = [future.result()[:2] for future in running]
    assert culprit[:2] == (Verdict.CRASH, 3) and "its fork server was lost 3 times" in culprit.text
    assert endings == [(Verdict.PASSED, 2)] * len(neighbors)


def test_out_of_memory_is_no_crash_however_often_it_takes_the_fork_server(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = itertools.count()
    monkeypatch.setattr(linux, "oom_kills", lambda: next(kills))  # here: ranks do not see it
    assert machine.run(OF_FORK_SERVERS[2])[:2] == (Verdict.INFRA, 3)


def test_a_fork_server_that_dies_while_a_case_is_judged_costs_nothing(machine: Machine) -> None:
    class Killing(Comparing):
        def judge(self, *args: Any, **given: Any) -> Judgement:
            for fork_server in fork_servers():
                fork_server.kill()
            return super().judge(*args, **given)

    assert machine.run(None, Killing("solo")).verdict is Verdict.PASSED


class AsBefore(ReferenceRunner):
    """Hands a reference that the machine ended to the judge, as one that did not finish."""

    def get(self, reference: Reference, *, ahead: bool = False) -> Run | None:
        with suppress(ReferenceLost):
            return super().get(reference, ahead=ahead)
        return Run(traces=(), failures=())


def test_the_rows_tell_a_machine_that_does_not_retry(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    of_references = [Killed(kind, "before training", "SIGKILL", times=1) for kind in KINDS]
    monkeypatch.setattr(retry, "MACHINE_ATTEMPTS", 1)
    assert len(wrong(machine, of_references)) == len(KINDS)
    monkeypatch.setattr(killed_ranks, "ReferenceRunner", AsBefore)
    ending = machine.run(Killed("solo", "before training", "SIGKILL", times=1))
    assert ending.verdict is Verdict.INVARIANT, "what a judge says of a reference that is not there"
