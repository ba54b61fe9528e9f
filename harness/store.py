"""Results on disk: `results.jsonl` in the folder of a run, one line of JSON per case; `cases.json`, what it runs, with
which options and where; and `ended.json` of a run that came to its end.

Every line is on disk before the next case is reported, so an interrupted run keeps the results of all finished cases.
The list of cases is there before the first rank starts: a case in it without a result was never reached by a run that
was killed, or its line is damaged.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from harness.durable import append_line, write_whole
from harness.environment import Environment
from harness.errors import HarnessError
from harness.jsonform import from_json, to_json
from harness.matrix.caseid import case_id, parse_case_id
from harness.result import CaseResult, RunResult, WitnessMade
from harness.run_options import RunOptions
from harness.verdict import Verdict

SCHEMA = 2
FILE_NAME = "results.jsonl"
PLAN_NAME = "cases.json"
END_NAME = "ended.json"
LOCK_NAME = "running.lock"
_TRIES, _PAUSE_S = 5, 0.02
_CASE_ID = re.compile(rb'"case_id":"([\w.+-]+)"')


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """Something that could not be read. `case_id` is the case that it names; None where it names none."""

    text: str  # file, line, what is wrong
    case_id: str | None = None


_DEFAULTS = RunOptions()


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run before its first rank starts. `left_out`: ids that did not fit into the budget."""

    cases: tuple[str, ...]  # ids of all cases, in order
    options: RunOptions = _DEFAULTS
    environment: Environment | None = None  # None in runs of earlier versions
    name: str = ""  # that the user gave it
    started: str = ""  # UTC, ISO 8601, seconds
    left_out: tuple[str, ...] = ()
    shard: str = ""  # "2/4"; empty: all of it
    asked: tuple[str, ...] = ()  # the words of a command line that asks for these cases, run in this way


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run when it ends: its wall clock seconds so far, resumed ones included."""

    wall_s: float
    interrupted: bool
    provenance: dict[str, str] = {}
    witnesses: tuple[WitnessMade, ...] = ()


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """The results in a folder. `damaged` says what could not be read: these cases did not pass."""

    results: tuple[CaseResult, ...]  # the last one of every case, in the order of storing
    damaged: tuple[Damage, ...] = ()
    start: RunStart = RunStart(cases=())  # of no cases where it was not recorded
    end: RunEnd | None = None  # None: the run was killed, or still runs

    @property
    def planned(self) -> tuple[str, ...]:
        """Ids of all cases of the run, in order; empty where they were not recorded."""
        return self.start.cases

    @property
    def failed_ids(self) -> tuple[str, ...]:
        """Ids of the cases with a result that is not good, in the order of storing."""
        return tuple(result.case_id for result in self.results if not result.verdict.good)

    @property
    def unfinished_ids(self) -> tuple[str, ...]:
        """Ids of the planned cases without a result, in the order of the plan."""
        return self._without_result(self.planned)

    @property
    def damaged_ids(self) -> tuple[str, ...]:
        """Ids that damaged lines name, of cases without a result."""
        return self._without_result([damage.case_id for damage in self.damaged if damage.case_id is not None])

    def as_result(self) -> RunResult:
        """The result of the run so far, in the order of the plan; planned cases without a result are `not_run`."""
        found = {result.case_id: result for result in self.results}
        ids = dict.fromkeys((*self.planned, *found))
        end = self.end or RunEnd(wall_s=sum(result.seconds for result in self.results), interrupted=True)
        result = RunResult(
            results=tuple(found.get(name) or _not_run(name) for name in ids),
            wall_s=end.wall_s,
            interrupted=end.interrupted,
            provenance=end.provenance,
            witnesses=end.witnesses,
        )
        return with_start(result, self.start)

    def _without_result(self, case_ids: Sequence[str]) -> tuple[str, ...]:
        ended = {result.case_id for result in self.results}
        return tuple(case_id for case_id in dict.fromkeys(case_ids) if case_id not in ended)


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    result: CaseResult


def _not_run(name: str) -> CaseResult:
    ranks = parse_case_id(name).world_size
    return CaseResult(case_id=name, verdict=Verdict.NOT_RUN, findings=(), attempts=(), world_size=ranks)


def with_start(result: RunResult, start: RunStart) -> RunResult:
    """The result with what was known before the run."""
    facts = {name: getattr(start, name) for name in ("environment", "name", "started", "left_out", "shard")}
    return msgspec.structs.replace(result, **facts)


class _Start(RunStart, frozen=True, kw_only=True):
    schema: int


class _End(RunEnd, frozen=True, kw_only=True):
    schema: int


class RunStore:
    """The results of one run, in one folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._start = folder / PLAN_NAME
        self._end = folder / END_NAME
        self._held = folder / LOCK_NAME
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        """The file of the results; it may not exist yet."""
        return self._path

    def begin(self, start: RunStart) -> None:
        """Store what the run is going to run, where and how, before it starts. Raises `WriteFailed`."""
        write_whole(self._start, to_json(_Start(schema=SCHEMA, **msgspec.structs.asdict(start))))

    def finish(self, end: RunEnd) -> None:
        """Store how the run ended. Raises `WriteFailed`."""
        write_whole(self._end, to_json(_End(schema=SCHEMA, **msgspec.structs.asdict(end))))

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Lock the folder: no other process runs into it until the context ends. Yields False if one does already.

        The kernel releases the lock with its holder. On file systems without locks any process may run.
        """
        with contextlib.ExitStack() as until_end:
            yield self._take(until_end)

    def _take(self, until_end: contextlib.ExitStack) -> bool:
        try:
            file = until_end.enter_context(self._held.open("ab"))
            for _ in range(_TRIES):  # `is_running` of another process holds it for a moment
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                time.sleep(_PAUSE_S)
        except OSError:
            return True
        return False

    @property
    def is_running(self) -> bool:
        """True while a process runs into this folder."""
        try:
            with self._held.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def append(self, result: CaseResult) -> None:
        """Append one result and fsync. Raises `WriteFailed`."""
        with self._lock:
            append_line(self._path, to_json(_Line(schema=SCHEMA, result=result)))

    def read(self) -> StoredRun:
        """All results stored so far; empty if none are. Raises `HarnessError` if a file cannot be read."""
        damaged: list[Damage] = []
        start = _read_part(self._start, _Start, damaged) or RunStart(cases=())
        end = _read_part(self._end, _End, damaged)
        results: dict[str, CaseResult] = {}
        for number, line in enumerate(_content(self._path).split(b"\n"), 1):
            if not line:
                continue
            try:
                result = _read_line(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                text = f"{self._path}:{number}: not a result: {error}"
                damaged.append(Damage(text=text, case_id=_named_case(line)))
            else:
                results.pop(result.case_id, None)
                results[result.case_id] = result
        return StoredRun(results=tuple(results.values()), damaged=tuple(damaged), start=start, end=end)

    def read_start(self) -> RunStart:
        """What was known before the run; of no cases where it cannot be read. Cheap: no result is read."""
        return _read_part(self._start, _Start, []) or RunStart(cases=())

    def read_end(self) -> RunEnd | None:
        """How the run ended; None where it was killed or still runs. Cheap: no result is read."""
        return _read_part(self._end, _End, [])

    def result_of(self, case_id: str) -> CaseResult | None:
        """The last result of one case; None where none can be read. Cheap: other lines are not decoded."""
        named = f'"case_id":"{case_id}"'.encode()
        for line in reversed(_content(self._path).split(b"\n")):
            if named in line:
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    return _read_line(line)
        return None


Part = TypeVar("Part")


def _read_part(path: Path, kind: type[Part], damaged: list[Damage]) -> Part | None:
    """What a file holds besides the results; None where there is none, or where it is `damaged` now."""
    content = _content(path)
    if not content:
        return None
    try:
        return from_json(content, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        damaged.append(Damage(text=f"{path}: cannot be read: {error}"))
        return None


def _content(path: Path) -> bytes:
    """The bytes of a file; empty if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        what = f"cannot be read: {error.strerror}."
        raise HarnessError(what, where=str(path), fix="check its permissions.") from error


def _named_case(line: bytes) -> str | None:
    """The id that a damaged line names; None where it names none."""
    found = _CASE_ID.search(line)
    if found is None:
        return None
    try:
        return case_id(parse_case_id(found[1].decode()))
    except (HarnessError, UnicodeDecodeError):
        return None


def _read_line(line: bytes) -> CaseResult:
    stored = from_json(line, _Line)
    if stored.schema != SCHEMA:
        raise msgspec.ValidationError(f"has schema {stored.schema}, this version reads schema {SCHEMA}")
    return stored.result
