"""Stored results by what the user calls them: the last run, a run by its name, a folder of a run, or a file of JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from harness.document import SCHEMA, RunDocument, run_document
from harness.errors import HarnessError
from harness.hints import list_results
from harness.jsonform import from_json
from harness.project import Project
from harness.store import PLAN_NAME, RunStore, StoredRun

_LAST = re.compile(r"last(?:~(\d+))?")


def results_of(project: Project, text: str) -> RunDocument:
    """The results that `text` means: "last", "last~2", the name of a run, its folder, or a file of `run --json`.

    Planned cases without a result are `not_run`. Raises HarnessError where there are none or they cannot be read.
    """
    path = Path(text)
    if path.is_file():
        return read_document(path)
    if (path / PLAN_NAME).is_file():
        return stored_document(path)
    found = _LAST.fullmatch(text)
    folders = [folder for folder, _ in runs_of(project)] if found else list(_named(project, text))
    back = int(found[1] or 0) if found else 0
    if back >= len(folders):
        raise HarnessError("there are no such results.", where=text, fix=f"`{list_results()}` shows the stored runs.")
    return stored_document(folders[back])


def runs_of(project: Project) -> Iterator[tuple[Path, StoredRun]]:
    """The stored runs of a project that ran something or were going to, the latest first."""
    for folder in reversed(project.stored_runs()):
        stored = RunStore(folder).read()
        if stored.planned or stored.results:
            yield folder, stored


def _named(project: Project, name: str) -> Iterator[Path]:
    return (folder for folder, stored in runs_of(project) if name in (stored.start.name, folder.name) and name)


def stored_document(folder: Path) -> RunDocument:
    """The results in the folder of a run. Raises HarnessError where a line is damaged."""
    stored = RunStore(folder).read()
    if stored.damaged:
        raise HarnessError(stored.damaged[0].text, where=str(folder), fix="run its cases again.")
    return run_document(stored.as_result())


def read_document(path: Path) -> RunDocument:
    """The results in a file of `run --json`. Raises HarnessError for any other file."""
    fix = "name a file that `run --json FILE` wrote."
    try:
        document = from_json(path.read_bytes(), RunDocument)
    except OSError as error:
        raise HarnessError(f"cannot be read: {error.strerror}.", where=str(path), fix=fix) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HarnessError(f"holds no results ({error}).", where=str(path), fix=fix) from error
    if document.schema != SCHEMA:
        what = f"has schema {document.schema}, this version reads schema {SCHEMA}."
        raise HarnessError(what, where=str(path), fix=fix)
    return document
