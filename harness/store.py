"""Results on disk: `results.jsonl` in the folder of a run, one line of JSON per case.

Every line is on disk before the next case is reported, so an interrupted run keeps the results of all finished cases.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from harness.durable import append_line
from harness.errors import HarnessError
from harness.jsonform import from_json, to_json
from harness.result import CaseResult

SCHEMA = 1
FILE_NAME = "results.jsonl"


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """The results in a folder. `damaged` lists the lines that could not be read: these cases did not pass."""

    results: tuple[CaseResult, ...]  # the last one of every case, in the order of storing
    damaged: tuple[str, ...] = ()

    @property
    def failed_ids(self) -> tuple[str, ...]:
        """Ids of the cases that are not good, in the order of storing."""
        return tuple(result.case_id for result in self.results if not result.verdict.good)


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    result: CaseResult


class RunStore:
    """The results of one run, in one folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        """The file of the results; it may not exist yet."""
        return self._path

    def append(self, result: CaseResult) -> None:
        """Append one result and fsync. Raises `WriteFailed`."""
        with self._lock:
            append_line(self._path, to_json(_Line(schema=SCHEMA, result=result)))

    def read(self) -> StoredRun:
        """All results stored so far; empty if none are. Raises `HarnessError` if the file cannot be read."""
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return StoredRun(results=())
        except OSError as error:
            what = f"cannot be read: {error.strerror}."
            raise HarnessError(what, where=str(self._path), fix="check its permissions.") from error
        results: dict[str, CaseResult] = {}
        damaged = []
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                result = _read_line(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                damaged.append(f"{self._path}:{number}: not a result: {error}")
            else:
                results.pop(result.case_id, None)
                results[result.case_id] = result
        return StoredRun(results=tuple(results.values()), damaged=tuple(damaged))


def _read_line(line: bytes) -> CaseResult:
    stored = from_json(line, _Line)
    if stored.schema != SCHEMA:
        raise msgspec.ValidationError(f"has schema {stored.schema}, this version reads schema {SCHEMA}")
    return stored.result
