"""`fp8-harness tier choose | fit`."""

from __future__ import annotations

from pathlib import Path

import click

from harness.cli.options import EXISTING_FILE, root_option, typed_command
from harness.durable import write_whole
from harness.plural import counted
from harness.project import find_project

_CHOOSE_EPILOG = """\b
Examples:
  fp8-harness tier choose pr                  write cases/chosen/pr.toml
  fp8-harness tier choose pr --rounds 20      a quick look: a worse choice in seconds
  fp8-harness list pr --why                   why each case was chosen
"""

_FIT_EPILOG = """\b
Example:
  FP8_HARNESS_STATE=$(mktemp -d) fp8-harness run pr --json result.json
  fp8-harness tier fit result.json
"""


@click.group(epilog="\b\nExamples:\n  fp8-harness tier choose pr\n  fp8-harness tier fit result.json")
def tier() -> None:
    """Choose the cases that a tier runs, by coverage and cost."""


@tier.command("choose", epilog=_CHOOSE_EPILOG)
@click.argument("name", metavar="TIER|FILE")
@click.option("--rounds", type=click.IntRange(min=0), default=1500, show_default=True, help="Rounds of improvement.")
@root_option
def choose_command(name: str, rounds: int, root: str | None) -> None:
    """Choose a cheap set of cases that covers a tier and carries every planted fault, and store it."""
    from harness.evidence.costs import read_costs
    from harness.matrix.casefile import read_case_file
    from harness.matrix.choice import choose, chosen_file, chosen_path
    from harness.matrix.faults import all_faults
    from harness.running.selection import recorded_faults

    project = find_project(root)
    project.check_writable()
    path = project.case_file(name)
    file, costs = read_case_file(path), read_costs(project.root)
    known = recorded_faults(project)
    chosen = choose(file, costs.price, known=known, faults=all_faults().values(), rounds=rounds)
    write_whole(chosen_path(path), chosen_file(file.name, chosen))
    own_s = sum(each.cost_cpu_s for each in chosen)
    shared = {name: cost_s for each in chosen for name, cost_s in costs.price(each.case).shared_s.items()}
    click.echo(
        f"{chosen_path(path)}: {counted(len(chosen), 'case')}, {own_s:.0f} CPU s and {sum(shared.values()):.0f} for "
        f"{counted(len(shared), 'witness', 'witnesses')}"
    )


@tier.command("fit", epilog=_FIT_EPILOG)
@click.argument("file", metavar="RESULT.json", type=EXISTING_FILE)
@root_option
def fit_command(file: Path, root: str | None) -> None:
    """Fit the costs of cases to the CPU seconds of a run that made all of its witnesses, and store them."""
    from harness.evidence.costs import write_costs
    from harness.studies.records import fit_costs

    project = find_project(root)
    project.check_writable()
    costs = fit_costs(file, command=typed_command())
    path = write_costs(project.root, costs)
    click.echo(
        f"{path}: {costs.cases_fitted} cases, {costs.witnesses_fitted} solo witnesses; "
        f"typical error {costs.typical_error:.0%}"
    )
