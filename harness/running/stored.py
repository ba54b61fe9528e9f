"""Results by what the user calls them: the last run, a run by its name, its folder, a file of JSON or a folder of them.

The store has two kinds of runs: those of this machine (`store.py`), and those that were imported (`imported.py`).
"""

from __future__ import annotations

import heapq
import re
import shutil
from collections.abc import Iterator
from itertools import dropwhile, islice
from pathlib import Path
from typing import Literal

import msgspec

from harness.document import SCHEMA, RunDocument, run_document
from harness.errors import HarnessError
from harness.hints import list_results
from harness.jsonform import from_json
from harness.project import Project
from harness.running.imported import digest_of, imported_files, read_head, read_imported, store_imported
from harness.running.merging import Shard, merged
from harness.store import PLAN_NAME, RunStart, RunStore

KEPT_RUNS = 100  # a new run removes older ones of the same project, but for those with a name

_LAST = re.compile(r"last(?:~(\d+))?")


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the store. `path` is its folder, or the file of an imported one; its results are not read yet."""

    path: Path
    start: RunStart
    state: Literal["finished", "interrupted", "killed", "running"]
    is_imported: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """What it can be called: the name that the user gave it, and that of its folder or file."""
        return tuple(filter(None, (self.start.name, self.path.stem)))


def results_of(project: Project, text: str) -> RunDocument:
    """The results that `text` means, as one run; those of a folder of files are merged (`merging.py`).

    Planned cases without a result are `not_run`. Raises HarnessError where there are none, or they cannot be read or
    merged.
    """
    found = shards_of(project, text)
    return merged(found) if Path(text) in Path(found[0].name).parents else found[0].run


def shards_of(project: Project, text: str) -> list[Shard]:
    """The results that `text` means, each with what it is called.

    It means "last", "last~2", the name of a run, its folder, a file of `run --json`, or a folder of such files, each of
    which has some. Raises HarnessError where there are none.
    """
    path = Path(text)
    if text and not (path / PLAN_NAME).is_file() and (files := sorted(path.glob("*.json"))):
        return [Shard(str(file), read_document(file)) for file in files]
    return [Shard(text, _one(project, text, path))]


def _one(project: Project, text: str, path: Path) -> RunDocument:
    if path.is_file():
        return read_document(path)
    if (path / PLAN_NAME).is_file():
        return stored_document(path)
    found = stored_run(project, text)
    return read_imported(found.path) if found.is_imported else stored_document(found.path)


def stored_run(project: Project, text: str) -> Stored:
    """The run of the store that "last", "last~2" or a name means. Raises HarnessError where there is none."""
    last = _LAST.fullmatch(text)
    back = int(last[1] or 0) if last else 0
    found = (run for run in runs_of(project) if last or text in run.names)
    for number, run in enumerate(found):
        if number == back:
            return run
    raise HarnessError("there are no such results.", where=text, fix=f"`{list_results()}` shows the stored runs.")


def runs_of(project: Project) -> Iterator[Stored]:
    """The stored runs of a project that ran something or were going to, the latest first."""
    here = reversed(project.stored_runs())
    elsewhere = reversed(imported_files(project.imported))
    for path in heapq.merge(here, elsewhere, key=lambda path: path.name, reverse=True):
        found = _imported(path) if path.parent == project.imported else _stored(path)
        if found is not None:
            yield found


def runs_before(project: Project, document: RunDocument, *, most: int) -> list[Stored]:
    """The last `most` stored runs of any of its cases up to this run, the oldest first; none where it is not stored."""
    ids = {case.id for case in document.cases}
    alike = (run for run in runs_of(project) if not ids.isdisjoint(run.start.cases))
    here = dropwhile(lambda run: (run.start.started, set(run.start.cases)) != (document.started, ids), alike)
    return list(islice(here, most))[::-1]


def _stored(folder: Path) -> Stored | None:
    store = RunStore(folder)
    start = store.read_start()
    if not start.cases and not store.path.exists():
        return None
    end = store.read_end()
    if store.is_running:
        return Stored(path=folder, start=start, state="running")
    if end is None:
        return Stored(path=folder, start=start, state="killed")
    return Stored(path=folder, start=start, state="interrupted" if end.interrupted else "finished")


def _imported(file: Path) -> Stored | None:
    head = read_head(file)
    if head is None:
        return None
    run = head.run
    start = RunStart(
        cases=head.case_ids, environment=run.environment, name=run.name, started=run.started, left_out=run.left_out
    )
    return Stored(path=file, start=start, state="interrupted" if run.interrupted else "finished", is_imported=True)


def import_results(project: Project, document: RunDocument) -> bool:
    """Add results that were made elsewhere to the store; False where they are there. Raises `WriteFailed`."""
    here = (run.path for run in runs_of(project) if not run.is_imported and run.start.started == document.started)
    if any(digest_of(stored_document(folder)) == digest_of(document) for folder in here):
        return False
    return store_imported(project.imported, document) is not None


def remove_run(run: Stored) -> None:
    """Remove a run from the store. Raises HarnessError while it runs."""
    if run.state == "running":
        raise HarnessError("this run has not ended yet.", where=str(run.path), fix="wait for its end, or interrupt it.")
    if run.is_imported:
        run.path.unlink(missing_ok=True)
    else:
        shutil.rmtree(run.path, ignore_errors=True)


def remove_old_runs(project: Project, *, kept: int = KEPT_RUNS) -> None:
    """Remove all but the last `kept` runs of this machine; those with a name, and those that still run, stay."""
    for folder in project.stored_runs()[:-kept]:
        store = RunStore(folder)
        if not store.read_start().name and not store.is_running:
            shutil.rmtree(folder, ignore_errors=True)


def stored_document(folder: Path) -> RunDocument:
    """The results in the folder of a run. Raises HarnessError where it is damaged and cannot say what is missing."""
    stored = RunStore(folder).read()
    if stored.damaged and not stored.planned:
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
