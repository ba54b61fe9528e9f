"""`fp8-harness dev tier`."""

from pathlib import Path

import click

from harness.cli.options import EXISTING_FILE, project_parameter, typed_command
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.evidence.costs import costs_path, read_costs
from harness.evidence.sealed import write_sealed
from harness.matrix.casefile import read_case_file
from harness.matrix.choice import chosen_path, planted_faults
from harness.plugins.tiers.choose import choose, chosen_file
from harness.project import Project
from harness.registry import needed
from harness.running.selection import recorded_faults
from harness.studies.records import fit_costs
from harness.text import counted

_EPILOG = """\b
Examples:
  fp8-harness dev tier pr  write cases/chosen/pr.toml
  FP8_HARNESS_STATE=$(mktemp -d) fp8-harness run pr --json result.json
  fp8-harness dev tier --fit result.json
      costs of cases, from a run that made all of its references
"""

_ROUNDS = 1500  # of improvement


@click.command("tier", epilog=_EPILOG)
@click.argument("name", metavar="[TIER|FILE]", required=False)
@click.option("--fit", "fitted", metavar="RESULT.json", type=EXISTING_FILE, help="Fit the costs of cases to this run.")
@project_parameter
def tier_command(*, name: str | None, fitted: Path | None, project: Project) -> None:
    """Choose a cheap set of cases that covers a tier and hosts every injected fault, and store it.

    With --fit: fit the costs of cases to the CPU seconds of a run that made all of its references, and store them.
    """
    project.check_writable()
    if (name is None) == (fitted is None):
        raise click.UsageError("give a TIER, or --fit RESULT.json.")
    if name is not None:
        _choose(project, name)
    if fitted is not None:
        _fit_costs(project, fitted)


def _choose(project: Project, name: str) -> None:
    path = project.case_file(name)
    if project.of_package(path):
        fix = f"copy {path} to {project.cases}, and change it there."
        raise HarnessError("this tier is the package's, and its cases are chosen there.", where=name, fix=fix)
    faults = planted_faults()
    if not faults:
        raise needed("injected faults", where=f"dev tier {name}")
    file, costs = read_case_file(path), read_costs(project.root)
    chosen = choose(file, costs.price, known=recorded_faults(project), faults=faults, rounds=_ROUNDS)
    write_whole(chosen_path(path), chosen_file(file.name, chosen))
    own_s = sum(chosen_case.cost_cpu_s for chosen_case in chosen)
    shared = {name: cost_s for chosen_case in chosen for name, cost_s in costs.price(chosen_case.case).shared_s.items()}
    click.echo(
        f"{chosen_path(path)}: {counted(len(chosen), 'case')}, {own_s:.0f} CPU s and {sum(shared.values()):.0f} for "
        f"{counted(len(shared), 'witness', 'references')}"
    )


def _fit_costs(project: Project, file: Path) -> None:
    costs = fit_costs(file, command=typed_command())
    path = write_sealed(costs_path(project.root), costs)
    click.echo(
        f"{path}: {costs.cases_fitted} cases, {costs.witnesses_fitted} single-rank references; "
        f"typical error {costs.typical_error:.0%}"
    )
