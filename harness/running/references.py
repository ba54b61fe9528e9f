"""Runs references (`evidence/references.py`), each once for all cases of a run, and keeps them by content.

A reference depends on nothing but its own case and what computes it (`identity.py`). So it is kept on disk under a
digest of these, and shared by all cases, runs and processes. Damaged or unreadable files count as absent.
"""

import contextlib
import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from harness.checks.judge import run_from_outcome
from harness.checks.scales import with_cast_shares
from harness.durable import WriteFailed, write_whole
from harness.engine.messages import JobOutcome
from harness.evidence.references import OPERANDS, SOLO, Reference, RunsByRole, replay_reference
from harness.project import Project
from harness.request import Noise, RunRequest
from harness.result import ReferenceRun
from harness.running.executor import Executor
from harness.running.identity import target_digest, witness_key
from harness.running.plan import Plan
from harness.trace import RankFailure, Run

_SEAL_SIZE = hashlib.sha256().digest_size
_RUNS = msgspec.msgpack.Decoder(Run)  # made before any thread decodes, like the one of `judge.py`


class ReferenceLost(Exception):
    """The machine ended a reference, at every attempt: its case cannot be checked. The text says which, and why."""


class ReferenceRunner:
    """Hands out references, running each at most once. Thread-safe.

    `content` stands for what computes those of a target: kept references of another content are not used.
    """

    def __init__(self, executor: Executor, folder: Path, content: Callable[[str], str]) -> None:
        self._executor = executor
        self._folder = folder
        self._content = content
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._runs: dict[str, Run] = {}  # those that did not finish, too: nothing would change
        self._asked: Counter[tuple[str, str]] = Counter()  # by kind and name
        self._outcomes: dict[tuple[str, str], list[JobOutcome]] = defaultdict(list)
        self._written: set[tuple[str, str]] = set()

    @property
    def log(self) -> tuple[ReferenceRun, ...]:
        """Return every reference that was asked for, by name: how often, and what it cost where it had to be run."""
        return tuple(
            ReferenceRun(
                kind=kind,
                name=name,
                asked=times,
                cpu_s=sum(attempt.cpu_s for outcome in self._outcomes[kind, name] for attempt in outcome.attempts),
                ran=len(self._outcomes[kind, name]),
                stored=(kind, name) in self._written,
                retried=tuple(attempt.message for outcome in self._outcomes[kind, name] for attempt in outcome.earlier),
            )
            for (kind, name), times in sorted(self._asked.items())
        )

    def is_kept(self, reference: Reference) -> bool:
        """Return True if it needs not be run: a file may turn out to be damaged."""
        return reference.name in self._runs or self._path(reference).exists()

    def get(self, reference: Reference, *, ahead: bool = False) -> Run | None:
        """Return the run, without traces where it did not finish; None when stopped. Raises `ReferenceLost`.

        `ahead`: no case asks for it yet.
        """
        self._asked[reference.role, reference.name] += not ahead
        if not reference.kept:
            return self._finished(reference)
        with self._locks[reference.name]:
            if reference.role == OPERANDS:
                return self._stored(reference) or self._finished(reference)
            if reference.name not in self._runs:
                run = self._stored(reference) or self._finished(reference)
                if run is None:
                    return None
                self._runs[reference.name] = with_cast_shares(run) if reference.role == SOLO and run.complete else run
            return self._runs[reference.name]

    def get_all(self, references: Sequence[Reference]) -> RunsByRole:
        """Return the runs by role. Those that have to be run run at the same time, where there are slots."""
        if len(references) == 1:  # the usual one needs no thread
            return {references[0].role: self.get(references[0])}
        with ThreadPoolExecutor(max(1, len(references))) as threads:
            runs = [(reference.role, threads.submit(self.get, reference)) for reference in references]
        return {role: run.result() for role, run in runs}

    def _finished(self, reference: Reference) -> Run | None:
        """Return a new run, stored where it finished."""
        request = reference.request
        assert request is not None, f"{reference.name} waits for the run of its case"
        run = self._served(reference, request)
        if run is not None and request.noise is not None and run.complete and run.traces[0].draws is None:
            run = self._drawn_apart(reference, request, request.noise)
        if run is not None and run.complete and reference.replayed:
            run = self._with_distances(reference, run)
        if run is not None and run.complete and reference.kept:
            with contextlib.suppress(WriteFailed):  # a full disk costs time, not correctness
                content = msgspec.msgpack.encode(run)
                write_whole(self._path(reference), _seal(content) + content)
                self._written.add((reference.role, reference.name))
        return run

    def _served(self, reference: Reference, request: RunRequest) -> Run | None:
        outcome = self._executor.serve(request)
        if outcome is None:
            return None
        self._outcomes[reference.role, reference.name].append(outcome)
        if outcome.status == "infra":
            raise ReferenceLost(f"{reference.name}, with which this case is compared: {outcome.message}")
        # the run of a reference; without traces where it did not finish, with at least one failure: why
        run = run_from_outcome(outcome)
        if outcome.status == "ok" and run.complete:
            return run
        message = outcome.message or f"it ended as {outcome.status} and left no trace"
        ended = RankFailure(rank=0, kind=outcome.status, message=message, traceback="", phase="", consequence=False)
        return Run(traces=(), failures=run.failures or (ended,))

    def _drawn_apart(self, reference: Reference, request: RunRequest, noise: Noise) -> Run | None:
        """Run each draw in a process of its own: what this target builds changes what it builds next."""
        draws = [None, *(msgspec.structs.replace(noise, draws=(draw,)) for draw in noise.draws)]
        runs = list[Run]()
        for draw in draws:
            run = self._served(reference, msgspec.structs.replace(request, noise=draw))
            if run is None or not run.complete:
                return run
            runs.append(run)
        plain, *drawn = (run.traces[0] for run in runs)
        return msgspec.structs.replace(runs[0], traces=(msgspec.structs.replace(plain, draws=tuple(drawn)),))

    def _with_distances(self, reference: Reference, run: Run) -> Run | None:
        again = self.get(replay_reference(reference.case, run))
        if again is None or not again.complete:
            return again
        first, *others = (msgspec.structs.replace(trace, module_tensors=None) for trace in run.traces)
        first = msgspec.structs.replace(first, module_distances=again.traces[0].module_distances)
        return msgspec.structs.replace(run, traces=(first, *others))

    def _path(self, reference: Reference) -> Path:
        key = f"{reference.name} {self._content(reference.case.target)}"
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.msgpack"

    def _stored(self, reference: Reference) -> Run | None:
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            stored = self._path(reference).read_bytes()
            seal, content = stored[:_SEAL_SIZE], stored[_SEAL_SIZE:]
            run = _RUNS.decode(content) if seal == _seal(content) else None
            return run if run is not None and run.complete else None
        return None


def open_references(project: Project, plan: Plan, executor: Executor) -> ReferenceRunner:
    """Return the references of this machine, as what is installed now computes them for this plan."""
    key, root = witness_key(plan), project.root
    return ReferenceRunner(executor, project.witness_folder(), lambda target: f"{key}{target_digest(target, root)}")


def _seal(content: bytes) -> bytes:
    """Return the checksum that precedes the content of a file: a corrupt reference would fail good runs forever."""
    return hashlib.sha256(content).digest()
