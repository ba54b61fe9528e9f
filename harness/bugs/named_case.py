"""The case that a user names on the command line: by its id, a file, or the name of a bug file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from harness.errors import HarnessError
from harness.matrix.bugfile import BugFile, holds_bugs, read_bug_file
from harness.matrix.case import Case
from harness.project import Project
from harness.running.injection import Injection, parse_injection
from harness.running.selection import one_case


class NamedCase(NamedTuple):
    """A case, and its bug file if one was named."""

    case: Case
    bug: BugFile | None


def named_case(project: Project, text: str) -> NamedCase:
    """The case of an id, of a file with one case, or of the bug `text` in cases/bugs. Raises HarnessError if none."""
    bug = _bug_path(project, text)
    if bug is not None:
        found = read_bug_file(bug)
        return NamedCase(found.runnable(), found)
    return NamedCase(one_case(project, text), None)


def injections_for(named: NamedCase, given: tuple[str, ...], *, planted: bool) -> tuple[Injection, ...]:
    """The injections of --inject, and with `planted` the bug's planted faults. Raises HarnessError if it has none."""
    if not planted:
        return tuple(map(parse_injection, given))
    if named.bug is None or not named.bug.bug.planted:
        where = "--planted" if named.bug is None else named.bug.where
        raise HarnessError("no planted fault brings this bug back.", where=where, fix="give --inject fault:NAME.")
    return tuple(map(parse_injection, (*given, *(f"fault:{name}" for name in named.bug.bug.planted))))


def _bug_path(project: Project, text: str) -> Path | None:
    path = Path(text)
    if path.is_file():
        return path if holds_bugs(path.resolve()) else None
    path = project.bugs / f"{text}.toml"
    return path if path.is_file() else None
