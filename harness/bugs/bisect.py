"""Bisects released versions of a package: finds the first one with a failure, or without it.

Every version gets an environment of its own that has this version and sees all other packages of the one that runs.
`bug repro` runs there, and looks for the failure that the bad version shows. Versions that cannot be installed, or that
show something else, are skipped and named. Answers are kept, so that a search that was stopped goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from harness.bugs.journal import Journal, key_of
from harness.errors import HarnessError
from harness.project import Project

Answer = Literal["good", "bad", "skipped"]


class VersionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What one version shows: good without the failure, bad with it, skipped where it tells nothing; and why.

    `says` is the message of what failed.
    """

    version: str
    answer: Answer
    why: str
    says: str = ""
    cached: bool = False


class Bisected(msgspec.Struct, frozen=True, kw_only=True):
    """Between which versions the failure comes or goes. `unknown`: versions between them that tell nothing."""

    package: str
    before: VersionAnswer
    after: VersionAnswer  # the first version that shows the other answer
    unknown: tuple[VersionAnswer, ...]
    tried: tuple[VersionAnswer, ...]  # in the order of the search


RunVersion = Callable[[str], VersionAnswer]  # one version, installed and run


def open_answers(project: Project, parts: Sequence[str]) -> Journal[VersionAnswer]:
    """The answers for a search. `parts` is all that they depend on besides the version."""
    return answers_in(project.state / "bisects" / f"{key_of(parts)}.jsonl")


def answers_in(path: Path) -> Journal[VersionAnswer]:
    """The stored answers, by version."""
    return Journal(path, VersionAnswer, lambda answer: answer.version)


def bisect(
    versions: Sequence[str],
    bad: str,
    run_version: RunVersion,
    answers: Journal[VersionAnswer],
    *,
    package: str,
    note: Callable[[str], None] = lambda text: None,
) -> Bisected:
    """The two neighbours among `versions`, oldest first, between which the answer changes.

    One end is good, the other is `bad`, which runs first because its failure is the one to look for. Raises
    HarnessError when the answer of either end is another.
    """
    if len(versions) < 2:
        what = f"there are {len(versions)} versions from the good to the bad one; a search needs two."
        raise HarnessError(what, where=f"--package {package}", fix=f"see `pip index versions {package}`.")
    answered: dict[str, VersionAnswer] = {}

    def answer_of(version: str) -> VersionAnswer:
        if version not in answered:
            kept = answers.get(version)
            answered[version] = run_version(version) if kept is None else msgspec.structs.replace(kept, cached=True)
            if kept is None and answered[version].answer != "skipped":  # the machine may have been to blame
                answers.keep(answered[version])
            found = answered[version]
            note(f"{package} {version}: {found.answer}{' (kept)' * found.cached}: {found.why}")
        return answered[version]

    other = versions[0] if versions[-1] == bad else versions[-1]
    for version, expected in ((bad, "bad"), (other, "good")):
        found = answer_of(version)
        if found.answer != expected:
            fix = f"give another --{expected} version."
            what = f"{package} {version} is {found.answer}, not {expected}: {found.why}."
            raise HarnessError(what, where=f"--{expected} {version}", fix=fix)
    low, high = 0, len(versions) - 1
    while (middle := _next(versions, low, high, answered)) is not None:
        answer = answer_of(versions[middle]).answer
        if answer != "skipped":
            low, high = (middle, high) if answer == answered[versions[low]].answer else (low, middle)
    return Bisected(
        package=package,
        before=answered[versions[low]],
        after=answered[versions[high]],
        unknown=tuple(answered[version] for version in versions[low + 1 : high]),
        tried=tuple(answered.values()),
    )


def _next(versions: Sequence[str], low: int, high: int, answered: Mapping[str, VersionAnswer]) -> int | None:
    """The index to run next: the one nearest to the middle without an answer; None if all have one."""
    middle = (low + high) / 2
    free = [at for at in range(low + 1, high) if versions[at] not in answered]
    return min(free, key=lambda at: (abs(at - middle), at), default=None)
