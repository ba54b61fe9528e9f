"""`fp8-harness dev conformance`."""

import time
from pathlib import Path

import click

from harness.cli.options import json_option, print_note, print_report
from harness.engine.cluster import Cluster
from harness.engine.hardware import capacity_here, open_leases
from harness.engine.node import LocalNode
from harness.engine.zygote_engine import ZygoteEngine
from harness.hints import LIST_CHECKS
from harness.plugins.conformance.checks import select_checks
from harness.plugins.conformance.judge import PROGRAM, run_checks
from harness.plugins.conformance.sections import conformance_document, conformance_section
from harness.project import leases_in, state_folder
from harness.running.injection import parse_injection
from harness.running.machine import check_ranks
from harness.running.selection import NothingSelected
from harness.sources import installed_version
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness dev conformance '*-m2x2-*'  the checks on a 2 x 2 mesh
  fp8-harness dev conformance --inject fix.py:apply
      apply your patch in every rank first

\b
Exit codes: 0 good, 1 a check failed or a known deviation no longer occurs.
"""


@click.command("conformance", epilog=_EPILOG)
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
