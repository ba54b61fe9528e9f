"""`fp8-harness dev mutate | conformance | evidence | tier`: what maintainers of the harness need."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from harness.cli.dev_evidence import evidence_command
from harness.cli.options import (
    AT_LEAST_1,
    EXISTING_FILE,
    json_option,
    plan_parameter,
    print_note,
    print_report,
    project_parameter,
    query_parameter,
    typed_command,
)
from harness.durable import write_whole
from harness.engine.cluster import Cluster
from harness.engine.hardware import capacity_here, open_leases
from harness.engine.node import LocalNode
from harness.engine.zygote_engine import ZygoteEngine
from harness.errors import HarnessError
from harness.evidence.costs import read_costs, write_costs
from harness.hints import LIST_CHECKS
from harness.matrix.case import Case
from harness.matrix.casefile import read_case_file
from harness.matrix.caseid import case_id
from harness.matrix.choice import choose, chosen_file, chosen_path
from harness.plugins.conformance.checks import select_checks
from harness.plugins.conformance.judge import PROGRAM, run_checks
from harness.plugins.conformance.sections import conformance_document, conformance_section
from harness.plugins.faults.faults import FAULT_CLASSES, Fault, all_faults, fault_named
from harness.plugins.faults.kills import read_kills, write_kills
from harness.plugins.faults.mutation import hosts_among, recorded_kills, run_mutations
from harness.plugins.faults.sections import mutation_sections
from harness.plural import counted
from harness.project import Project, leases_in, state_folder
from harness.running.injection import parse_injection
from harness.running.machine import check_ranks
from harness.running.plan import Plan
from harness.running.progress import open_progress
from harness.running.selection import NothingSelected, Query, recorded_faults
from harness.sources import installed_version
from harness.studies.records import fit_costs
from harness.verdict import ExitCode

_MUTATE_EPILOG = """\b
Examples:
  fp8-harness dev mutate                               all faults, each in up to two cases
  fp8-harness dev mutate --fault amax_without_abs      one fault
  fp8-harness dev mutate pr --cases-per-fault 1        all faults, each in the cheapest case of tier pr
  fp8-harness dev mutate --target my_pkg.my_target     which of them reach your own target

\b
Exit codes: 0 all faults that reached the target were detected, 1 a fault was not detected, did not reach the reference
target, or a clean run failed, 3 no fault applies to the cases or reaches the target.
"""
_CONFORMANCE_EPILOG = """\b
Examples:
  fp8-harness dev conformance '*-m2x2-*'               the checks on a 2 x 2 mesh
  fp8-harness dev conformance --inject fix.py:apply    apply your patch in every rank first

\b
Exit codes: 0 good, 1 a check failed or a known deviation no longer occurs.
"""
_TIER_EPILOG = """\b
Examples:
  fp8-harness dev tier pr                  write cases/chosen/pr.toml
  FP8_HARNESS_STATE=$(mktemp -d) fp8-harness run pr --json result.json
  fp8-harness dev tier --fit result.json   costs of cases, from a run that made all of its witnesses
"""


@click.group(epilog="\b\nExamples:\n  fp8-harness dev mutate --list\n  fp8-harness dev tier pr")
def dev() -> None:
    """Mutation testing, conformance, evidence, choice of tiers."""


dev.add_command(evidence_command)


@dev.command("mutate", epilog=_MUTATE_EPILOG)
@click.option("--fault", "names", metavar="NAME", multiple=True, help="A fault by name. Repeatable, like --class.")
@click.option("--class", "groups", type=click.Choice(list(FAULT_CLASSES)), multiple=True, help="A class of faults.")
@click.option("--cases-per-fault", type=AT_LEAST_1, default=2, show_default=True, help="Plant each in up to N cases.")
@click.option("--list", "listed", is_flag=True, help="List the faults and the cases they are planted in, and exit.")
@click.option("--record", is_flag=True, help="Store which rules found these faults, in golden/evidence/kills.json.")
@json_option("the mutation matrix")
@query_parameter
@plan_parameter
@project_parameter
def mutate_command(  # noqa: PLR0913  one parameter per option
    *,
    names: tuple[str, ...],
    groups: tuple[str, ...],
    cases_per_fault: int,
    listed: bool,
    record: bool,
    json_file: Path | None,
    query: Query,
    plan_for: Callable[..., Plan],
    project: Project,
) -> int:
    """Mutation testing: plant faults in passing cases and show which checks detect them.

    Without a tier, file, case or selection, faults are planted in the cases that the list names for them.
    """
    faults = tuple(all_faults().values())
    named = {fault_named(name).name for name in names}
    faults = tuple(fault for fault in faults if fault.name in named or fault.group in groups) or faults
    if record and query != Query():
        what = "the record is of faults in their own cases."
        raise HarnessError(what, where="--record", fix="select faults only, or give it alone.")
    hosts = hosts_among(project, faults, query, at_most=cases_per_fault)
    if listed:
        for fault in faults:
            click.echo(_line(fault, hosts[fault.name]))
        return ExitCode.GOOD
    with open_progress() as progress:
        matrix = run_mutations(project, faults, hosts, plan_for(), progress)
    print_report(mutation_sections(matrix), json_file, matrix)
    if record and not matrix.interrupted:
        click.echo(f"stored in {write_kills(project.root, recorded_kills(matrix, read_kills(project.root)))}", err=True)
    if matrix.interrupted:
        return ExitCode.INTERRUPTED
    if len(matrix.trials) == len(matrix.not_reached):
        return ExitCode.FAILED if matrix.unplantable else ExitCode.NOTHING_RAN
    return ExitCode.FAILED if matrix.undetected or matrix.unplantable or matrix.false_positives else ExitCode.GOOD


def _line(fault: Fault, hosts: Sequence[Case]) -> str:
    cases = " ".join(map(case_id, hosts)) or "no case"
    mark = " (equivalent)" if fault.equivalent is not None else ""
    return f"{fault.group}  {fault.name}: {fault.title}{mark}\n     {cases}\n     {fault.link}"


@dev.command("conformance", epilog=_CONFORMANCE_EPILOG)
@click.argument("globs", metavar="[CHECK-ID|GLOB]...", nargs=-1)
@click.option("--list", "listed", is_flag=True, help="Print the ids of the checks and exit.")
@click.option("--inject", metavar="FILE.py:FUNCTION", multiple=True, help="Call this first in every rank. Repeatable.")
@json_option("the table")
@click.option("-v", "--verbose", is_flag=True, help="Also print the problems that known deviations explain.")
def conformance_command(
    globs: tuple[str, ...], listed: bool, inject: tuple[str, ...], json_file: Path | None, verbose: bool
) -> int:
    """Check DTensor's sharding strategies for the operators of FP8 training, on four CPU ranks."""
    checks = select_checks(globs)
    if not checks:
        raise NothingSelected("no check matches.", where=" ".join(globs), fix=f"see `{LIST_CHECKS}`.")
    if listed:
        click.echo("\n".join(check.id for check in checks))
        return ExitCode.GOOD
    check_ranks()
    injections = [parse_injection(text).patch for text in inject]
    leases = open_leases(leases_in(state_folder()), "cpu")
    node = LocalNode(lambda options: ZygoteEngine(PROGRAM, options, print_note), leases, capacity_here("cpu"))
    with Cluster([node], note=print_note) as engine:
        started = time.perf_counter()
        conclusions = run_checks(engine, checks, injections)
        seconds = time.perf_counter() - started
    software = {name: installed_version(name) for name in ("torch", "torchao")}
    document = conformance_document(conclusions, software=software, seconds=seconds)
    print_report([conformance_section(document, verbose=verbose)], json_file, document)
    return ExitCode.GOOD if all(conclusion.good for conclusion in conclusions) else ExitCode.FAILED


@dev.command("tier", epilog=_TIER_EPILOG)
@click.argument("name", metavar="[TIER|FILE]", required=False)
@click.option("--rounds", type=click.IntRange(min=0), default=1500, show_default=True, help="Rounds of improvement.")
@click.option("--fit", "fitted", metavar="RESULT.json", type=EXISTING_FILE, help="Fit the costs of cases to this run.")
@project_parameter
def tier_command(*, name: str | None, rounds: int, fitted: Path | None, project: Project) -> None:
    """Choose a cheap set of cases that covers a tier and hosts every planted fault, and store it.

    With --fit: fit the costs of cases to the CPU seconds of a run that made all of its witnesses, and store them.
    """
    project.check_writable()
    if (name is None) == (fitted is None):
        raise click.UsageError("give a TIER, or --fit RESULT.json.")
    if name is not None:
        _choose(project, name, rounds)
    if fitted is not None:
        _fit_costs(project, fitted)


def _choose(project: Project, name: str, rounds: int) -> None:
    path = project.case_file(name)
    if project.of_package(path):
        fix = f"copy {path} to {project.cases}, and change it there."
        raise HarnessError("this tier is the package's, and its cases are chosen there.", where=name, fix=fix)
    file, costs = read_case_file(path), read_costs(project.root)
    known = recorded_faults(project)
    chosen = choose(file, costs.price, known=known, faults=all_faults().values(), rounds=rounds)
    write_whole(chosen_path(path), chosen_file(file.name, chosen))
    own_s = sum(chosen_case.cost_cpu_s for chosen_case in chosen)
    shared = {name: cost_s for chosen_case in chosen for name, cost_s in costs.price(chosen_case.case).shared_s.items()}
    click.echo(
        f"{chosen_path(path)}: {counted(len(chosen), 'case')}, {own_s:.0f} CPU s and {sum(shared.values()):.0f} for "
        f"{counted(len(shared), 'witness', 'witnesses')}"
    )


def _fit_costs(project: Project, file: Path) -> None:
    costs = fit_costs(file, command=typed_command())
    path = write_costs(project.root, costs)
    click.echo(
        f"{path}: {costs.cases_fitted} cases, {costs.witnesses_fitted} solo witnesses; "
        f"typical error {costs.typical_error:.0%}"
    )
