"""The base of a comparison of layouts: the same cases at a git revision, with a version of a package, or in a venv.

What it ran is kept: the same revision in the same environment is not run again. The word about a change follows from
the words of both sides and from their numbers; nothing is judged here.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import msgspec

from harness.checks.measuring import GRADIENT_NORMS, LOSSES, moved
from harness.durable import write_whole
from harness.plugins.parity.revisions import checked_out, has_target, revision_environment, revision_of
from harness.project import Project
from harness.result import CaseResult, Curve, RunResult
from harness.run_options import RunOptions
from harness.running.environments import HARNESS, NamedEnvironment, Versions, python_over, run_in_environment
from harness.running.identity import check_targets, target_digest, witness_key
from harness.running.plan import Plan
from harness.running.stored import read_results
from harness.sources import source_digest
from harness.store import run_lines
from harness.text import counted
from harness.verdict import Verdict

Note = Callable[[str], None]
Change = Literal[
    "same bits", "rounding", "moved", "now wrong", "now right", "wrong in both", "now differs", "now runs",
    "now refused", "new", "not compared", "",
]  # fmt: skip
_RIGHT, _REFUSED = ("equal", "rounding", "known", "changed"), ("refused", "excluded")
_DIGESTS = {"gradients", "parameters"}


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """What the base was, and its results by case; none where it has no such target."""

    name: str  # "3f2a1b0c9d8e (origin/main)", "torch 2.12.1"
    results: Mapping[str, CaseResult] = {}
    kept: bool = False  # of an earlier command


class Against(msgspec.Struct, frozen=True):
    """Runs cases of one target in what `text` means: PACKAGE==VERSION, a virtual environment, or a git revision."""

    text: str
    project: Project
    plan: Plan
    note: Note
    words: tuple[str, ...] = ()  # further options of `run`, such as -j

    def run(self, target: str, case_ids: Sequence[str]) -> Base:
        """Raises HarnessError where there is no such base, or where it ran nothing."""
        check_targets([target], self.project.root)
        package, equal, version = map(str.strip, self.text.partition("=="))
        if equal:
            kept = self._kept((self.text, target_digest(target, self.project.root), *self._given), case_ids)
            return self._version(package, version, kept, case_ids)
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

    @property
    def _given(self) -> tuple[str, ...]:
        return (*self.given.words, *(injection.content for injection in self.plan.injections))

    def _version(self, package: str, version: str, kept: Path, case_ids: Sequence[str]) -> Base:
        name = f"{package} {version}"
        if (results := _stored(kept)) is not None:
            return Base(name=name, results=results, kept=True)
        place = Versions(package, self.project.state / "versions", note=self.note).environment(version)
        return self._run(name, place, case_ids, self.given, kept)

    def _revision(self, target: str, case_ids: Sequence[str]) -> Base:
        """What is injected is a change of this side alone, like all that is not committed."""
        root = self.project.root
        revision = revision_of(self.text, target, root)
        name = revision.name if revision.commit.startswith(self.text) else f"{revision.name} ({self.text})"
        given = msgspec.structs.replace(self.given, inject=())
        kept = self._kept((revision.commit, str(root), *given.words), case_ids)
        if (results := _stored(kept)) is not None:
            return Base(name=name, results=results, kept=True)
        with checked_out(revision, self.project.state) as worktree:
            if not has_target(revision, worktree, root):
                return Base(name=name)
            return self._run(name, revision_environment(revision, worktree, self.project), case_ids, given, kept)

    def _run(
        self, name: str, place: NamedEnvironment, case_ids: Sequence[str], given: RunOptions, kept: Path | None
    ) -> Base:
        self.note(f"base {name}: {counted(len(case_ids), 'case')}")
        root = () if self.plan.root_option is None or place.root is not None else ("--root", self.plan.root_option)
        words = (*case_ids, *root, *given.words, *self.words, "--no-github")
        folder = self.project.state / "environments"
        folder.mkdir(parents=True, exist_ok=True)
        run = run_in_environment(place, words, folder, reports=False)
        if run.end.interrupted:
            raise KeyboardInterrupt
        if kept is not None:
            write_whole(kept, run_lines(run))
        return Base(name=name, results=_by_id(run))

    def _kept(self, depends: Sequence[str], case_ids: Sequence[str]) -> Path:
        """Where the results of these cases are kept: all that they depend on is in the name."""
        packages = sorted(f"{package.name} {package.version}" for package in distributions())
        harness = source_digest(HARNESS / "harness", (HARNESS / "harness").rglob("*.py"))
        parts = (witness_key(self.plan), harness, *packages, *depends, *case_ids)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return self.project.state / "environments" / "bases" / f"{key}.jsonl"


def _stored(file: Path) -> Mapping[str, CaseResult] | None:
    """The results in a file; None without it, and where the machine failed one of them."""
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
    """What a case says that a formula does not, where nobody verified the formula with its versions."""
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
