"""The case that a command about a bug is asked for: by its id, a file, or the name of a bug file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from harness.errors import HarnessError
from harness.matrix.bugfile import BugFile, holds_bugs, read_bug_file
from harness.matrix.case import Case
from harness.project import Project
from harness.running.injection import Injection, parse_injection
from harness.running.selection import one_case


class Asked(NamedTuple):
    """A case, and the bug that it is of, where a bug file was named."""

    case: Case
    bug: BugFile | None


def asked_case(project: Project, text: str) -> Asked:
    """The case of a case id, of a file with one case, or of the bug `text` in cases/bugs. HarnessError for no case."""
    bug = _bug_path(project, text)
    if bug is not None:
        found = read_bug_file(bug)
        return Asked(found.runnable(), found)
    return Asked(one_case(project, text), None)


def injections_of(asked: Asked, given: tuple[str, ...], *, planted: bool) -> tuple[Injection, ...]:
    """What is injected: what is given, and the planted faults of the bug where that is asked for."""
    if not planted:
        return tuple(map(parse_injection, given))
    if asked.bug is None or not asked.bug.bug.planted:
        where = "--planted" if asked.bug is None else asked.bug.where
        raise HarnessError("no planted fault brings this bug back.", where=where, fix="give --inject fault:NAME.")
    return tuple(map(parse_injection, (*given, *(f"fault:{name}" for name in asked.bug.bug.planted))))


def _bug_path(project: Project, text: str) -> Path | None:
    path = Path(text)
    if path.is_file():
        return path if holds_bugs(path.resolve()) else None
    path = project.bugs / f"{text}.toml"
    return path if path.is_file() else None
