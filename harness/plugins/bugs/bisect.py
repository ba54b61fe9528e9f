"""Bisects versions of a package, nightlies too: finds the first one with a failure, or without it.

Every version gets an environment of its own that has this version and sees all other packages of the one that runs.
`bug repro` runs there, and looks for the failure that the bad version shows. Versions that cannot be installed, or that
show something else, are skipped and named. Answers are kept, so that a search that was stopped goes on.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.plugins.bugs.reproduce import Reproduced
from harness.plugins.bugs.trials import Journal, key_of
from harness.project import Project
from harness.running.environments import last_line
from harness.running.versions import NotInstalled, Source, Versions
from harness.sources import source_digest

Answer = Literal["good", "bad", "skipped"]

_LIST_S = 120.0
_TRIAL_S = 1800.0  # of one case and its witnesses
_HARNESS = Path(__file__).parents[2]
_NOT_IMPORTED = re.compile(r"ModuleNotFoundError|ImportError")
_ANSWERS: dict[int, Answer] = {0: "good", 1: "bad"}


class VersionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What one version shows: good without the failure, bad with it, skipped where it is inconclusive; and why."""

    version: str
    answer: Answer
    why: str
    says: str = ""  # the message of what failed
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
            version_answer = answered[version]
            note(
                f"{package} {version}: {version_answer.answer}{' (kept)' * version_answer.cached}: {version_answer.why}"
            )
        return answered[version]

    other = versions[0] if versions[-1] == bad else versions[-1]
    for version, expected in ((bad, "bad"), (other, "good")):
        end_answer = answer_of(version)
        if end_answer.answer != expected:
            fix = f"give another --{expected} version."
            what = f"{package} {version} is {end_answer.answer}, not {expected}: {end_answer.why}."
            raise HarnessError(what, where=f"--{expected} {version}", fix=fix)
    low, high = 0, len(versions) - 1
    while free := [at for at in range(low + 1, high) if versions[at] not in answered]:
        _, middle = min((abs(at - (low + high) / 2), at) for at in free)
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


class Range(NamedTuple):
    """The versions to search, oldest first. One end is good, the other is `bad`."""

    versions: tuple[str, ...]
    bad: str


def versions_between(package: str, good: str, bad: str, source: Source, *, given: Collection[str] = ()) -> Range:
    """The versions that are listed between `good` and `bad`, both included. HarnessError for one that is not.

    A version without a build tag stands for a build of it, and a date such as 2026-11-20 for the newest nightly of that
    day or before. `given` are versions that need not be listed. Between two nightlies only nightlies count, and other
    versions before a release only where `good` or `bad` is one.
    """
    listed = set(
        _in_folder(package, source.find_links) if source.find_links is not None else _in_index(package, source)
    )
    listed |= set(map(_version, given))
    ends = [_end(text, listed, package) for text in (good, bad)]
    low, high = sorted(ends)
    between = [version for version in sorted(listed) if low <= version <= high]
    if low.is_devrelease and high.is_devrelease:
        between = [version for version in between if version.is_devrelease]
    elif not any(end.is_prerelease for end in ends):
        between = [version for version in between if not version.is_prerelease]
    # One build of each version: of those at the ends the one that is asked for, else one without a tag if there is any.
    others = {version.public: version for version in reversed(between)}
    for end in ends:
        others.pop(end.public, None)
    return Range(tuple(map(str, sorted({*ends, *others.values()}))), str(ends[1]))


def _end(text: str, listed: Collection[Version], package: str) -> Version:
    """The listed version that one end of a search stands for."""
    where = f"--package {package}"
    try:
        day = datetime.date.fromisoformat(text)
    except ValueError:
        wanted = _version(text)
        builds = sorted(version for version in listed if wanted in (version, Version(version.public)))
        if builds:
            return wanted if wanted in builds else builds[0]
        known = ", ".join(map(str, sorted(listed, reverse=True)[:8])) or "none"
        fix = f"the newest are {known}." if listed else "check its name and the index."
        raise HarnessError(f"{package} {wanted} is not released there.", where=where, fix=fix) from None
    nightlies = {night: version for version in sorted(listed) if (night := _night(version)) is not None}
    until = [night for night in nightlies if night <= day]
    if until:
        return nightlies[max(until)]
    fix = f"the first is of {min(nightlies)}." if nightlies else "give versions, or an index of nightlies."
    raise HarnessError(f"no nightly of {package} is listed until {day}.", where=where, fix=fix)


def _night(version: Version) -> datetime.date | None:
    """The date in the version of a nightly: 2.16.0.dev20261120."""
    try:
        return datetime.datetime.strptime(str(version.dev), "%Y%m%d").date()
    except ValueError:
        return None


def _in_index(package: str, source: Source) -> Iterable[Version]:
    where = f"--package {package}"
    command = [sys.executable, "-m", "pip", "index", "versions", "--pre", *source.options, package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_S, check=False)
    except subprocess.TimeoutExpired as error:
        what = f"pip named no versions in {_LIST_S:.0f} s."
        raise HarnessError(what, where=where, fix="give another --index-url, or --find-links.") from error
    match = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if match is None:
        what = f"pip names no versions: {last_line(done.stderr) or 'it says nothing'}."
        raise HarnessError(what, where=where, fix="check the name, or give --index-url or --find-links.")
    return [_version(text) for text in match[1].split(", ")]


def _in_folder(package: str, folder: Path) -> Iterable[Version]:
    wheels = folder.glob("*.whl") if folder.is_dir() else ()
    for wheel in wheels:
        with contextlib.suppress(InvalidWheelFilename):
            name, version, *_ = parse_wheel_filename(wheel.name)
            if name == canonicalize_name(package):
                yield version


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion as error:
        raise HarnessError(f"'{text}' is no version.", fix="write it as pip does: 0.14.1.") from error


class VersionTrial:
    """Runs one case with versions of one package by `bug repro CASE_WORD WORDS`."""

    def __init__(
        self, project: Project, case_word: str, case: Case, versions: Versions, *, bad: str, words: Sequence[str] = ()
    ) -> None:
        self._case_word, self._versions, self._words = case_word, versions, tuple(words)
        self._folder = project.state / "versions"
        # What the answers depend on besides the version: the case, the failure to look for, which is that of the bad
        # version, the injections, and the harness itself.
        sources = source_digest(_HARNESS, _HARNESS.rglob("*.py"))
        self.depends_on = (case_id(case), versions.package, bad, *words, sources)

    def run(self, version: str) -> VersionAnswer:
        """Install the version and run the case with it. An inconclusive version is skipped, with the reason."""
        try:
            return self._repro(self._versions.environment(version).python, version)
        except NotInstalled as error:
            why = f"not installed: {error}"
        except subprocess.TimeoutExpired as error:
            why = f"took longer than {error.timeout:.0f} s"
        return VersionAnswer(version=version, answer="skipped", why=why)

    def _repro(self, python: Path, version: str) -> VersionAnswer:
        """What `bug repro --exit-code` answers, and what it says. The first failure is what others must be like."""
        self._folder.mkdir(parents=True, exist_ok=True)
        result = self._folder / f"{self._versions.package}-{version}.json"
        first = self._folder / f"{key_of(self.depends_on)}.json"
        result.unlink(missing_ok=True)
        like = ("--like", str(first)) if first.exists() else ()
        repro = ("-m", "harness", "bug", "repro", self._case_word, "--exit-code", "-q", "--json", str(result))
        done = subprocess.run(
            [str(python), *repro, *like, *self._words], capture_output=True, text=True, timeout=_TRIAL_S, check=False
        )
        answer = _ANSWERS.get(done.returncode, "skipped")
        if not result.exists():
            why = last_line(done.stderr) or f"it ended with {done.returncode}"
            return VersionAnswer(version=version, answer="skipped", why=why)
        trial_result = msgspec.json.decode(result.read_bytes(), type=Reproduced).found
        if trial_result.signature is not None and _NOT_IMPORTED.match(trial_result.signature.what):
            why = f"not imported: {trial_result.signature.what}"
            return VersionAnswer(version=version, answer="skipped", why=why)
        if answer == "bad" and not like:
            first.write_bytes(result.read_bytes())
        return VersionAnswer(version=version, answer=answer, why=trial_result.text, says=trial_result.message)
