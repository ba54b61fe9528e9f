"""The commands that messages suggest, one function each; the returned text runs as printed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

_PROGRAM = "fp8-harness"
_REASON = ("--reason", "why they change")


def list_words() -> str:
    """Lists the words of case ids."""
    return _command("explain", "--ids")


def explain_case(case_id: str) -> str:
    """Describes a case with its rules and recorded faults."""
    return _command("explain", case_id)


def list_cases(sources: Sequence[str]) -> str:
    """Lists the cases of tiers or files."""
    return _command("list", *sources)


def run_cases(case_ids: Sequence[str]) -> str:
    """Runs cases by their ids."""
    return _command("run", *(word for name in case_ids for word in ("--case", name)))


def gate_runs(baseline: str, candidate: str) -> str:
    """Says whether one stored run is as good as another."""
    return _command("gate", "--baseline", baseline, "--candidate", candidate)


def bisect_versions(case_id: str, package: str, *, good: str, bad: str, words: Sequence[str] = ()) -> str:
    """Finds the released version of a package with which a case starts or stops to fail."""
    return _command("bug", "bisect", case_id, "--package", package, "--good", good, "--bad", bad, *words)


def run_file(file: str) -> str:
    """Runs the cases of a file."""
    return _command("run", file)


def list_faults() -> str:
    """Lists the planted faults."""
    return _command("power", "--list")


def list_checks() -> str:
    """Lists the checks of `conformance`."""
    return _command("conformance", "--list")


def list_goldens() -> str:
    """Lists the stored goldens."""
    return _command("golden", "list")


def list_results() -> str:
    """Lists the stored runs."""
    return _command("results", "list")


def run_again(asked: Sequence[str]) -> str:
    """Repeats an earlier run from its words on the command line."""
    return _command("run", *asked)


def resume_run(*, root: str | None) -> str:
    """Finishes the last run of a project that was interrupted. `root` is what was given as --root."""
    return _command("run", *(() if root is None else ("--root", root)), "--resume")


def rerun_failed(*, root: str | None) -> str:
    """Runs what was not good, or never ran, in the last run of a project. `root` is what was given as --root."""
    return _command("run", *(() if root is None else ("--root", root)), "--rerun-failed")


def update_golden(case_id: str, *, root: Path) -> str:
    """Makes the golden that a case is compared with."""
    return _command("golden", "update", *_root(root), "--case", case_id, *_REASON)


def update_missing_goldens(asked: Sequence[str]) -> str:
    """Makes the goldens that are not stored; `asked` are the words that selected the cases."""
    return _command("golden", "update", *asked, "--missing", "--reason", "first goldens")


def update_signature(case_id: str, *, root: Path) -> str:
    """Records what a run of a case does, by which later runs are judged."""
    where = (*_root(root), "--device", "cpu")
    return _command("signature", "update", *where, "--case", case_id, "--reason", "why it changes")


def update_missing_signatures(asked: Sequence[str]) -> str:
    """Records the signatures that are not stored; `asked` are the words that selected the cases."""
    return _command("signature", "update", *asked, "--missing", "--reason", "first signatures")


def save_trace(case_id: str, folder: Path) -> str:
    """Writes the saved trace of a case."""
    return _command("run", "--case", case_id, "--save-trace", str(folder))


def choose_tier(file: str) -> str:
    """Chooses the cases of a tier again."""
    return _command("tier", "choose", file)


def fit_costs() -> str:
    """Measures what the cases of tier pr cost, witnesses included, and stores it."""
    measure = _command("run", "pr", "--json", "result.json")
    return f"FP8_HARNESS_STATE=$(mktemp -d) {measure} && {_command('tier', 'fit', 'result.json')}"


def _root(root: Path) -> tuple[str, ...]:
    """The --root option that leads from the current folder to a project; empty if none is needed."""
    return () if Path.cwd().is_relative_to(root) else ("--root", str(root))


def _command(*words: str) -> str:
    return shlex.join([_PROGRAM, *words])
