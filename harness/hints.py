"""The commands that messages suggest; each runs as printed."""

import shlex
from collections.abc import Sequence
from pathlib import Path


def _command(*words: str) -> str:
    return shlex.join(["fp8-harness", *words])


EXPLAIN_RULE = _command("explain", "RULE")
EXPLAIN_CHECK = _command("explain", "CHECK")
LIST_INJECTED = _command("explain", "--list", "faults", "CHECK")
EXEC = _command("exec")  # OPTIONS -- COMMAND
LIST_RULES = _command("explain", "--list", "checks")
LIST_BUGS = _command("bug", "list")
LIST_WORDS = _command("explain", "--list", "ids")
LIST_FAULTS = _command("dev", "mutate", "--list")
LIST_CHECKS = _command("dev", "conformance", "--list")
LIST_BASELINES = _command("baseline", "show")
LIST_RUNS = _command("runs", "list")
MEASURE_TOLERANCES = _command("baseline", "tolerance", "--measure")
VERIFY_GPUS = _command("dev", "evidence", "all", "--device", "cuda")
VERIFY_FORMULAS = _command("dev", "evidence", "formulas", "--reason", "new versions")
# On systems where ranks cannot run. The volume keeps stored runs, which the container would take along.
START_CONTAINER = 'docker run --rm -it -v "$PWD":/work -v fp8-harness:/root/.cache -w /work python:3.12 bash'
INSTALL_FOR_CPU = "pip install --extra-index-url https://download.pytorch.org/whl/cpu 'fp8-harness[train]'"
INSTALL_TORCHTITAN = "make torchtitan"  # in a clone of the harness; TORCHTITAN= gives another commit


def explain_case(case_id: str) -> str:
    """Describe a case with its rules and recorded faults."""
    return _command("explain", case_id)


def list_cases(sources: Sequence[str]) -> str:
    return _command("list", *sources)


def run_cases(*words: str, root: str | None = None) -> str:
    """Run tiers, files or ids, or repeat the words of an earlier run; --lf or --resume: what is left of the last one.

    `root` is what was given as --root.
    """
    return _command(*_given(root), "run", *words)


def shrink(command: str) -> str:
    """Find the smallest case that fails like the one that a command runs; empty if it lacks an option of it."""
    before, run, words = command.partition(" run ")
    known = all(flag in ("--inject", "--device") for flag in shlex.split(words)[1::2])
    return f"{before} bug shrink {words}" if run and known else ""


def compare_runs(first: str, second: str) -> str:
    """Decide whether the second stored run is as good as the first."""
    return _command("compare", first, second)


def repro_with(case_id: str, package: str, version: str, *words: str) -> str:
    """Say whether a case fails with a version of a package."""
    return _command("bug", "repro", case_id, "--with", f"{package}=={version}", *words)


def update_golden(case_id: str, *, device: str, root: Path) -> str:
    """Make the golden of a case anew on a device."""
    return _command(*_root(root), "baseline", "update", case_id, "--device", device, "--reason", "why it changes")


def update_profile(case_id: str, *, root: Path) -> str:
    """Records what a run of a case does, by which later runs are checked."""
    words = ("--profiles", "--device", "cpu", case_id, "--reason", "why it changes")
    return _command(*_root(root), "baseline", "update", *words)


def update_missing(kind: str, asked: Sequence[str], *, root: str | None) -> str:
    """Make the "goldens" or "profiles" that are not stored; `asked` are the words that selected the cases."""
    option = ("--profiles",) if kind == "profiles" else ()
    words = (*option, *asked, "--missing", "--reason", f"first {kind}")
    return _command(*_given(root), "baseline", "update", *words)


def choose_tier(file: str) -> str:
    return _command("dev", "tier", file)


def fit_costs() -> str:
    """Measure what the cases of tier pr cost, references included, and store it."""
    measure = _command("run", "pr", "--json", "result.json")
    return f"FP8_HARNESS_STATE=$(mktemp -d) {measure} && {_command('dev', 'tier', '--fit', 'result.json')}"


def _given(root: str | None) -> tuple[str, ...]:
    return () if root is None else ("--root", root)


def _root(root: Path) -> tuple[str, ...]:
    """Return the --root option that leads from the current folder to a project; empty if none is needed."""
    return () if Path.cwd().is_relative_to(root) else ("--root", str(root))
