"""The same cases in several environments: how each run ended, and which cases ended differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.hints import gate_runs
from harness.plural import counted
from harness.report.wording import aligned
from harness.result import RunResult


def environments_text(runs: Mapping[str, RunResult]) -> str:
    """One line for every environment, and a table of the cases whose verdicts differ."""
    rows = [("environment", "good", "cases", "CPU s", "wall s"), *(_row(name, run) for name, run in runs.items())]
    return f"{aligned(rows, right=(1, 2, 3, 4))}\n\n{_differences(runs)}\n"


def decision_text(names: Sequence[str]) -> str:
    """The command that compares the first environment with the last; empty for a single one."""
    return f"\nto decide: `{gate_runs(names[0], names[-1])}`\n" if len(names) > 1 else ""


def _row(name: str, run: RunResult) -> tuple[str, ...]:
    good, cases = sum(case.good for case in run.results), sum(case.ran for case in run.results)
    return (name, str(good), str(cases), f"{run.cpu_s:.1f}", f"{run.end.wall_s:.1f}")


def _differences(runs: Mapping[str, RunResult]) -> str:
    ids = dict.fromkeys(case.case_id for run in runs.values() for case in run.results)
    verdicts = [{case.case_id: case.verdict.value for case in run.results} for run in runs.values()]
    found = {name: [each.get(name, "not selected") for each in verdicts] for name in ids}
    differ = {name: each for name, each in found.items() if len(set(each)) > 1}
    if not differ:
        return f"{counted(len(ids), 'case')}: the same verdicts everywhere"
    return "\n".join(
        [f"different verdicts in {counted(len(differ), 'case')} of {len(ids)}:", *_lines(list(runs), differ)]
    )


def _lines(names: Sequence[str], differ: Mapping[str, Sequence[str]]) -> list[str]:
    """The id on a line of its own: it may be as long as a terminal is wide."""
    lines = []
    for case_id, verdicts in differ.items():
        lines.append(case_id)
        lines += [f"  {name}: {verdict}" for name, verdict in zip(names, verdicts, strict=True)]
    return lines
