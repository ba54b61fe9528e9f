"""The base of a comparison of layouts: the same cases at a git revision, with a version of a package, or in a venv.

What it ran is kept: the same revision in the same environment is not run again. The word about a change follows from
the words of both sides and from their numbers; nothing is judged here.

A revision is of the repository that a target is in. It is checked out into a worktree for as long as it runs, in the
environment that runs. But what this one has from the repository, by `pip install -e` or by the working directory, comes
from the worktree, which is first on PYTHONPATH.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import msgspec

from harness.checks.measuring import GRADIENT_NORMS, LOSSES, moved
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.evidence.golden import git
from harness.project import Project, is_project
from harness.registry import module_of, targets
from harness.result import CaseResult, Curve, RunResult
from harness.run_options import AppOptions, RunOptions
from harness.running.environments import (
    CHECKOUT,
    HARNESS,
    NamedEnvironment,
    Versions,
    last_line,
    origins,
    python_over,
    run_in_environment,
)
from harness.running.identity import check_targets, search_path, target_digest, target_file, witness_key
from harness.running.plan import Plan
from harness.running.stored import read_results
from harness.sources import is_editable, package_paths, source_digest
from harness.store import run_lines
from harness.text import counted
from harness.verdict import Verdict

_CHECKOUT_S = 300.0


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """A commit of a repository. `imported`: the top-level packages that come from there, with the target's first."""

    text: str  # as the user wrote it
    commit: str
    repository: Path
    target: str
    imported: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.commit[:12]


def revision_of(text: str, target: str, root: Path) -> Revision:
    """The revision that `text` means in the repository of the target; of torchtitan's, in the one of this folder.

    Raises HarnessError where there is none, or where nothing that the target imports is in that repository.
    """
    where = f"--against {text}"
    if shutil.which("git") is None:
        fix = "install git, or give PACKAGE==VERSION or the folder of a virtual environment."
        raise HarnessError("git is not installed.", where=where, fix=fix)
    start = Path.cwd() if target in targets() else Path(target_file(target, root)).parent
    toplevel = git(start, "rev-parse", "--show-toplevel").strip()
    if not toplevel:
        what = f"{start} is in no git repository, and there is no such environment."
        fix = "give a folder with bin/python, PACKAGE==VERSION, or a revision of the repository that the target is in."
        raise HarnessError(what, where=where, fix=fix)
    commit = "" if text.startswith("-") else git(start, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}")
    if not commit.strip():
        shallow = git(start, "rev-parse", "--is-shallow-repository").strip() == "true"
        fix = "`git fetch --unshallow`, as this clone has not the whole history." if shallow else "see `git log`."
        what = f"no revision of {toplevel}, no PACKAGE==VERSION, and no folder with bin/python."
        raise HarnessError(what, where=where, fix=fix)
    repository = Path(toplevel).resolve()
    imported = tuple(dict.fromkeys(_imported_from(repository, target, root)))
    if not imported:
        what = f"nothing that {target} trains is imported from {repository}."
        fix = "install that package there with `pip install -e`, or give PACKAGE==VERSION or a virtual environment."
        raise HarnessError(what, where=where, fix=fix)
    return Revision(text=text, commit=commit.strip(), repository=repository, target=target, imported=imported)


def _imported_from(repository: Path, target: str, root: Path) -> Iterator[str]:
    """Top-level names whose files are in the repository: the target's own, and those of packages installed with -e."""
    own = () if target in targets() else (module_of(target).partition(".")[0],)
    editable = (package for package in distributions() if is_editable(package))
    names = (*own, *(name for package in editable for name in (package.read_text("top_level.txt") or "").split()))
    for name in names:
        paths = package_paths(name, search_path(root))
        if name != "harness" and any(repository in path.parents for path in paths):
            yield name


@contextlib.contextmanager
def checked_out(revision: Revision, state: Path) -> Iterator[Path]:
    """A worktree with the revision, removed at the end. Hooks of the repository do not run.

    Raises HarnessError where git does not make it.
    """
    folder = state / "revisions" / revision.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove(revision.repository, folder)  # of a run that was killed
    add = ("worktree", "add", "--quiet", "--detach", "--force", str(folder), revision.commit)
    command = ["git", "-C", str(revision.repository), "-c", "core.hooksPath=/dev/null", *add]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECKOUT_S, check=False)
        if done.returncode != 0:
            what = f"git cannot check it out: {last_line(done.stderr)}."
            raise HarnessError(what, where=f"--against {revision.text}", fix=f"make room in {folder.parent}.")
        yield folder
    finally:
        _remove(revision.repository, folder)


def _remove(repository: Path, folder: Path) -> None:
    git(repository, "worktree", "remove", "--force", str(folder))
    shutil.rmtree(folder, ignore_errors=True)


def has_target(revision: Revision, worktree: Path, root: Path) -> bool:
    """Return False if the revision does not have the target yet."""
    folders = _folders(revision, worktree, root)
    if revision.target in targets():
        return True
    names = module_of(revision.target).split(".")
    for at in range(len(names)):
        spec = PathFinder.find_spec(".".join(names[: at + 1]), list(folders))
        if spec is None:
            return False
        folders = tuple(spec.submodule_search_locations or ())
    return True


def revision_environment(revision: Revision, worktree: Path, project: Project) -> NamedEnvironment:
    """This environment, importing from the worktree what this process imports from the repository.

    Raises HarnessError where a hook of an installed package imports from the repository all the same.
    """
    others = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    kept = (folder for folder in others if _moved(revision, worktree, Path(folder)) is None)
    paths = (*CHECKOUT, *_folders(revision, worktree, project.root), *kept)
    python = Path(sys.executable)
    for name, origin in origins(python, revision.imported, paths).items():
        if origin and not Path(origin).resolve().is_relative_to(worktree.resolve()):
            what = f"{name} would be imported from {origin}, not from that revision."
            fix = "install it with `pip install -e . --config-settings editable_mode=compat`."
            raise HarnessError(what, where=f"--against {revision.text}", fix=fix)
    there, root = _moved(revision, worktree, Path.cwd()), _moved(revision, worktree, project.root)
    return NamedEnvironment(
        name=f"base-{revision.name}",
        python=python,
        cwd=there if there is not None and there.is_dir() else worktree,
        root=root if root is not None and is_project(root) else project.root,
        python_path=paths,
    )


def _folders(revision: Revision, worktree: Path, root: Path) -> Sequence[str]:
    """The folders of the worktree that stand for those of the repository in which this process looks for modules."""
    searched = [*map(Path, filter(None, (*sys.path, *search_path(root))))]
    of_hooks = (path.parent for name in revision.imported for path in package_paths(name, search_path(root)))
    here = (_moved(revision, worktree, path) for path in (*searched, *of_hooks) if path.resolve() != HARNESS)
    return tuple(dict.fromkeys(str(path) for path in here if path is not None and path.is_dir()))


def _moved(revision: Revision, worktree: Path, path: Path) -> Path | None:
    """Return the same path in the worktree; None outside of the repository."""
    path = path.resolve()
    if not path.is_relative_to(revision.repository) or path.is_relative_to(worktree.resolve()):
        return None
    return worktree / path.relative_to(revision.repository)


Note = Callable[[str], None]
Change = Literal[
    "same bits", "rounding", "moved", "now wrong", "now right", "wrong in both", "now differs", "now runs",
    "now refused", "new", "not compared", "",
]  # fmt: skip
_RIGHT, _REFUSED = ("equal", "rounding", "drift", "known", "changed"), ("refused", "excluded")
_DIGESTS = {"gradients", "parameters"}


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """What the base was, and its results by case; none where it has no such target."""

    name: str  # "3f2a1b0c9d8e (origin/main)", "torch 2.12.1"
    results: Mapping[str, CaseResult] = {}


class Against(msgspec.Struct, frozen=True):
    """Runs cases of one target in what `text` means: PACKAGE==VERSION, a virtual environment, or a git revision."""

    text: str
    project: Project
    plan: Plan
    note: Note
    words: tuple[str, ...] = ()  # further options of `run`, such as --jobs

    def run(self, target: str, case_ids: Sequence[str]) -> Base:
        """Raises HarnessError where there is no such base, or where it ran nothing."""
        check_targets([target], self.project.root)
        package, equal, version = map(str.strip, self.text.partition("=="))
        if equal:
            injected = (injection.content for injection in self.plan.injections)
            digest = target_digest(target, self.project.root)
            kept = self._kept((self.text, digest, *self.given.words, *injected), case_ids)
            name = f"{package} {version}"
            if (results := _stored(kept)) is not None:
                return Base(name=name, results=results)
            place = Versions(package, self.project.state / "versions", note=self.note).environment(version)
            return self._run(name, place, case_ids, self.given, kept)
        path = Path(self.text)
        if (path / "bin" / "python").exists():  # what is in it may change: nothing is kept
            python = python_over(path, self.project.state / "environments")
            place = NamedEnvironment(name=f"base-{path.resolve().name}", python=python, folder=path)
            return self._run(self.text, place, case_ids, self.given, None)
        return self._revision(target, case_ids)

    @property
    def given(self) -> RunOptions:
        """The options that the base is run with: on the device that was chosen here, whatever it would choose."""
        if not self.plan.chosen:
            return self.plan.given
        return msgspec.structs.replace(self.plan.given, device=self.plan.device, arithmetic=self.plan.arithmetic)

    def _revision(self, target: str, case_ids: Sequence[str]) -> Base:
        """Return what is injected is a change of this side alone, like all that is not committed."""
        root = self.project.root
        revision = revision_of(self.text, target, root)
        name = revision.name if revision.commit.startswith(self.text) else f"{revision.name} ({self.text})"
        given = msgspec.structs.replace(self.given, inject=())
        kept = self._kept((revision.commit, str(root), *given.words), case_ids)
        if (results := _stored(kept)) is not None:
            return Base(name=name, results=results)
        with checked_out(revision, self.project.state) as worktree:
            if not has_target(revision, worktree, root):
                return Base(name=name)
            return self._run(name, revision_environment(revision, worktree, self.project), case_ids, given, kept)

    def _run(
        self, name: str, place: NamedEnvironment, case_ids: Sequence[str], given: RunOptions, kept: Path | None
    ) -> Base:
        self.note(f"base {name}: {counted(len(case_ids), 'case')}")
        words = (*case_ids, *given.words, *self.words, "--no-github")
        folder = self.project.state / "environments"
        folder.mkdir(parents=True, exist_ok=True)
        run = run_in_environment(place, words, folder, given=AppOptions(root=self.plan.root_option), reports=False)
        if run.end.interrupted:
            raise KeyboardInterrupt
        if kept is not None:
            write_whole(kept, run_lines(run))
        return Base(name=name, results=_by_id(run))

    def _kept(self, depends: Sequence[str], case_ids: Sequence[str]) -> Path:
        """Return where the results of these cases are kept: all that they depend on is in the name."""
        packages = sorted(f"{package.name} {package.version}" for package in distributions())
        harness = source_digest(HARNESS / "harness", (HARNESS / "harness").rglob("*.py"))
        parts = (witness_key(self.plan), harness, *packages, *depends, *case_ids)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return self.project.state / "environments" / "bases" / f"{key}.jsonl"


def _stored(file: Path) -> Mapping[str, CaseResult] | None:
    """Return the results in a file; None without it, and where the machine failed one of them."""
    run = read_results(file) if file.is_file() else None
    if run is None or any(result.verdict in (Verdict.INFRA, Verdict.NOT_RUN) for result in run.results):
        return None
    return _by_id(run)


def _by_id(run: RunResult) -> Mapping[str, CaseResult]:
    return {result.case_id: result for result in run.results}


def change(word: str, before: str, now: CaseResult | None, then: CaseResult | None) -> tuple[Change, str]:
    """What became of a layout, by its words on both sides and its results there; and how much its numbers moved."""
    sides = tuple("wrong" if side_word == "wrong" else _side(side_word) for side_word in (before, word))
    if sides == ("right", "right") and now is not None and then is not None:
        return ("now differs", "") if _differences(now) - _differences(then) else _numbers(now, then)
    return _CHANGES.get(sides, "not compared"), ""


def _differences(case: CaseResult) -> set[tuple[object, ...]]:
    """Return what a case says that a formula does not, where nobody verified the formula with its versions."""
    findings = [finding for finding in case.findings if finding.differs]
    return {
        (of.formula, of.rule, of.step, of.rank, of.module, of.operand, of.expected, of.found, *of.values.items())
        for of in findings
    }


def _side(word: str) -> str:
    return "right" if word in _RIGHT else "refused" if word in _REFUSED else ""


_CHANGES: Mapping[tuple[str, ...], Change] = {
    ("right", "wrong"): "now wrong",
    ("refused", "wrong"): "now wrong",
    ("wrong", "wrong"): "wrong in both",
    ("wrong", "right"): "now right",
    ("refused", "right"): "now runs",
    ("right", "refused"): "now refused",
    ("wrong", "refused"): "now refused",
    ("refused", "refused"): "",
}


def _numbers(now: CaseResult, then: CaseResult) -> tuple[Change, str]:
    """Each is as close to its one rank as rounding explains. Where both one ranks are the same, so are they."""
    here, there = now.measured, then.measured
    if here is None or there is None or not here.digests.keys() & there.digests.keys() >= _DIGESTS:
        return "not compared", ""
    if not (_DIGESTS | {LOSSES, GRADIENT_NORMS}) & set(moved(there, here)):
        return "same bits", ""
    if "solo" in here.curves and here.curves["solo"] == there.curves.get("solo"):
        return "rounding", ""
    return "moved", _distance(Curve(losses=now.losses, grad_norms=now.grad_norms), then)


def _distance(now: Curve, then: CaseResult) -> str:
    losses = max(abs(one - other) for one, other in zip(now.losses, then.losses, strict=False))
    norms = max(abs(one - other) / other for one, other in zip(now.grad_norms, then.grad_norms, strict=False) if other)
    return f"one rank trains otherwise; loss by up to {losses:.2g}, norm by {norms:.2g} of it"
