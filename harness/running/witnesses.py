"""Witness runs: solo, reference and partner runs that cases are compared with, each run once and kept by content.

A witness depends on nothing but its own case and what computes it (`identity.py`). So it is kept on disk under a
digest of these, and shared by all cases, runs and processes. Damaged or unreadable files count as absent.
"""

import contextlib
import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from harness.checks.judge import run_from_outcome
from harness.checks.scales import with_cast_shares
from harness.durable import WriteFailed, write_whole
from harness.engine.messages import JobOutcome
from harness.expect.relations import partner, stands_for_modules
from harness.matrix.case import Case, Float8
from harness.matrix.caseid import case_id, reference_case, solo_case
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics
from harness.project import Project
from harness.request import RunRequest, noise_of
from harness.result import WitnessMade
from harness.running.executor import Executor
from harness.running.identity import target_digest, witness_key
from harness.running.plan import Injection, Plan
from harness.trace import RankFailure, Run

_SEAL_SIZE = hashlib.sha256().digest_size
_RUNS = msgspec.msgpack.Decoder(Run)  # made before any thread decodes, like the one of `judge.py`


class WitnessLost(Exception):
    """The machine ended a witness, at every attempt: its case cannot be judged. The text says which, and why."""


class WitnessCache:
    """Hands out witnesses, running each at most once at a time. Thread-safe.

    `content` stands for what computes those of a target: kept witnesses of another content are not used. `numerics`:
    which bits the runs promise.

    A run that did not finish is handed out without traces, with its failures, and is not kept; None when stopped. Each
    method that runs one raises WitnessLost.
    """

    def __init__(
        self,
        executor: Executor,
        folder: Path,
        content: Callable[[str], str],
        numerics: Numerics = VIRTUAL_DEVICE,
    ) -> None:
        self._executor = executor
        self._numerics = numerics
        self._folder = folder
        self._content = content
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._kept: dict[str, Run] = {}
        self._made_here: list[WitnessMade] = []

    @property
    def made(self) -> tuple[WitnessMade, ...]:
        """The witnesses that were run here, by name."""
        return tuple(sorted(self._made_here, key=lambda witness: witness.name))

    def solo(self, case: Case) -> Run | None:
        """Return the solo witness of a case, sketched, with what its casts lost in place of its operands."""
        return self._witness(*_solo(case), keep=with_cast_shares)

    def solo_with_operands(self, case: Case) -> Run | None:
        """Return the same with its operands, too large to be kept in memory: read from its file, or else run again."""
        name, request = _solo(case)
        path = self._path(name, request)
        return self._stored(path) or self._made(name, path, self._run(name, request))

    def reference(self, case: Case) -> Run | None:
        """Return the BF16 reference of a case on one rank, for want of a stored golden."""
        witness = reference_case(case)
        return self._witness(f"reference {case_id(witness)}", RunRequest(case=witness, probes=("sketches",)))

    def noisy(self, case: Case, draw: int, converted: tuple[str, ...]) -> Run | None:
        """Return the reference with random errors where the case casts to float8.

        `converted`: the linears that the case converts.
        """
        witness, float8 = reference_case(case), case.float8
        rounded = Float8(recipe=float8.recipe, output_layer=float8.output_layer, filter_fqns=float8.filter_fqns)
        name = f"noise {draw} {case_id(msgspec.structs.replace(witness, float8=rounded))}"
        noise = noise_of(case, draw, converted)
        return self._witness(name, RunRequest(case=witness, probes=("sketches",), noise=noise))

    def partner(self, case: Case, fixes: Sequence[Injection] = ()) -> Run | None:
        """Return the run of the partner of a case (`relations.py`), sketched; None when there is none.

        `fixes` are those that the case runs with: its partner may run into the same fault. A partner that stands for
        the modules of a compiled case has their distances from a replay as well.
        """
        relation = partner(case, self._numerics)
        if relation is None:
            return None
        other, replayed = relation.partner, stands_for_modules(case, relation, self._numerics)
        name = " with ".join([f"{'replayed ' * replayed}partner {case_id(other)}", *(fix.content for fix in fixes)])
        probes = ("sketches", "module_tensors") if replayed else ("sketches",)
        request = RunRequest(case=other, probes=probes, injections=tuple(fix.patch for fix in fixes))
        return self._witness(name, request, lambda run: self._with_distances(other, run) if replayed else run)

    def _with_distances(self, case: Case, run: Run) -> Run | None:
        again = self.replay(case, run)
        if again is None or not again.complete:
            return again
        first, *others = (msgspec.structs.replace(trace, module_tensors=None) for trace in run.traces)
        first = msgspec.structs.replace(first, module_distances=again.traces[0].module_distances)
        return msgspec.structs.replace(run, traces=(first, *others))

    def replay(self, case: Case, run: Run) -> Run | None:
        """Return the replay of this very run, module by module; never kept. Incomplete when it did not finish."""
        recorded = tuple(trace.module_tensors or () for trace in run.traces)
        name = f"replay {case_id(case)}"
        outcome = self._run(name, RunRequest(case=case, replayed=recorded))
        return None if outcome is None else _ended(outcome)

    def unprobed(self, case: Case) -> Run | None:
        """Return the run of this case without probes; never kept. None when it did not finish."""
        outcome = self._run(f"unprobed {case_id(case)}", RunRequest(case=case))
        return None if outcome is None or outcome.status != "ok" else run_from_outcome(outcome)

    def _witness(
        self,
        name: str,
        request: RunRequest,
        finish: Callable[[Run], Run | None] = lambda run: run,
        keep: Callable[[Run], Run] = lambda run: run,
    ) -> Run | None:
        """The kept run of this name, or a new one after `finish`, which is stored; in memory is what `keep` leaves."""
        with self._locks[name]:
            if name not in self._kept:
                path = self._path(name, request)
                run = self._stored(path) or self._made(name, path, self._run(name, request), finish)
                if run is None or not run.complete:
                    return run
                self._kept[name] = keep(run)
            return self._kept[name]

    def _run(self, name: str, request: RunRequest) -> JobOutcome | None:
        """What ranks did for this witness; None when stopped. Raises WitnessLost where the machine ended them."""
        outcome = self._executor.serve(request)
        if outcome is None:
            return None
        cpu_s = sum(attempt.cpu_s for attempt in outcome.attempts)
        retried = tuple(attempt.message for attempt in outcome.earlier)
        self._made_here.append(WitnessMade(name=name, cpu_s=cpu_s, retried=retried))
        if outcome.status == "infra":
            raise WitnessLost(f"{name}, with which this case is compared: {outcome.message}")
        return outcome

    def _path(self, name: str, request: RunRequest) -> Path:
        key = f"{name} {self._content(request.case.target)}"
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.msgpack"

    def _stored(self, path: Path) -> Run | None:
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            stored = path.read_bytes()
            seal, content = stored[:_SEAL_SIZE], stored[_SEAL_SIZE:]
            run = _RUNS.decode(content) if seal == _seal(content) else None
            return run if run is not None and run.complete else None
        return None

    def _made(
        self,
        name: str,
        path: Path,
        outcome: JobOutcome | None,
        finish: Callable[[Run], Run | None] = lambda run: run,
    ) -> Run | None:
        if outcome is None:
            return None
        made = _ended(outcome)
        run = finish(made) if made.complete else made
        if run is None or not run.complete:
            return run
        with contextlib.suppress(WriteFailed):  # a full disk costs time, not correctness
            content = msgspec.msgpack.encode(run)
            write_whole(path, _seal(content) + content)
        return run


def _solo(case: Case) -> tuple[str, RunRequest]:
    witness = solo_case(case)
    probes = (
        "sketches",
        *(["operands"] if witness.float8.enabled else []),
        *(["experts"] if witness.model.experts else []),
    )
    return f"solo {case_id(witness)}", RunRequest(case=witness, probes=probes, solo=True)


def _ended(outcome: JobOutcome) -> Run:
    """Return the run of a witness; without traces where it did not finish, with at least one failure that says why."""
    run = run_from_outcome(outcome)
    if outcome.status == "ok" and run.complete:
        return run
    message = outcome.message or f"it ended as {outcome.status} and left no trace"
    ended = RankFailure(rank=0, kind=outcome.status, message=message, traceback="", phase="", consequence=False)
    return Run(traces=(), failures=run.failures or (ended,))


def open_witnesses(project: Project, plan: Plan, executor: Executor) -> WitnessCache:
    """Return the witnesses of this machine, as what is installed now computes them for this plan."""
    key = witness_key(plan)

    def content(target: str) -> str:
        return f"{key}{target_digest(target, project.root)}"

    return WitnessCache(executor, project.witness_folder(), content, plan.numerics)


def _seal(content: bytes) -> bytes:
    """Return the checksum that precedes the content of a file: a corrupt witness would fail good runs forever."""
    return hashlib.sha256(content).digest()
