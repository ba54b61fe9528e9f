"""Runs of other machines in the store: what `run --json` wrote there, one file per run.

The first line is the run without its cases, then every case has a line, so that one can be read without the others. The
name of a file is when its run started and a digest of the results: what is there already is not added again. Estimates,
budgets and `--rerun-failed` do not look here: they are about this machine.
"""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

import msgspec

from harness.document import CaseDocument, RunDocument
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.jsonform import from_json, to_json

_SUFFIX = ".jsonl"


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file: the run, and the ids of the cases that it is stored without."""

    run: RunDocument
    case_ids: tuple[str, ...]


def digest_of(document: RunDocument) -> str:
    """Equal for equal results, whatever the run is called."""
    return hashlib.sha256(to_json(msgspec.structs.replace(document, name=""))).hexdigest()[:16]


def imported_files(folder: Path) -> tuple[Path, ...]:
    """The files of all imported runs, by the time at which these started."""
    return tuple(sorted(folder.glob(f"*{_SUFFIX}")))


def store_imported(folder: Path, document: RunDocument) -> Path | None:
    """Store the results of a run; returns the file, or None where they are there already. Raises `WriteFailed`."""
    ending = f"-{digest_of(document)}{_SUFFIX}"
    if any(path.name.endswith(ending) for path in imported_files(folder)):
        return None
    head = Head(run=msgspec.structs.replace(document, cases=()), case_ids=tuple(case.id for case in document.cases))
    path = folder / f"{_started_ns(document):020d}{ending}"
    write_whole(path, b"".join(to_json(each) + b"\n" for each in (head, *document.cases)))
    return path


def read_head(path: Path) -> Head | None:
    """The first line of a file; None where it cannot be read. Cheap: no case is read."""
    try:
        with path.open("rb") as file:
            return from_json(file.readline(), Head)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_imported(path: Path) -> RunDocument:
    """The results in a file. Raises HarnessError where it cannot be read."""
    try:
        head, *lines = path.read_bytes().splitlines()
        cases = tuple(from_json(line, CaseDocument) for line in lines)
        return msgspec.structs.replace(from_json(head, Head).run, cases=cases)
    except (OSError, ValueError, RecursionError) as error:
        fix = "remove it, and import its results again."
        raise HarnessError(f"cannot be read: {error}.", where=str(path), fix=fix) from error


def _started_ns(document: RunDocument) -> int:
    """When the run started; 0 where it does not say: before all others."""
    try:
        started = datetime.datetime.fromisoformat(document.started)
    except ValueError:
        return 0
    return int(started.timestamp()) * 10**9
