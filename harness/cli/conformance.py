"""`fp8-harness conformance`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from harness.cli.options import json_option, write_json
from harness.hints import list_checks
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness conformance                          all checks
  fp8-harness conformance --select 'amax*'         the checks of one operator
  fp8-harness conformance --select '*-m2x2-*'      the checks on a 2 x 2 mesh
  fp8-harness conformance --list                   print the ids, run nothing
  fp8-harness conformance --inject fix.py:apply    apply your patch in every rank first

\b
Exit codes: 0 good, 1 a check failed or a known deviation no longer occurs, 2 usage error or bad input,
3 nothing to run, 4 infrastructure, 130 interrupted.
"""


@click.command("conformance", epilog=_EPILOG)
@click.option("--select", "globs", metavar="GLOB", multiple=True, help="Only checks with a matching id. Repeatable.")
@click.option("--list", "listed", is_flag=True, help="Print the ids of the checks and exit.")
@click.option("--inject", metavar="FILE.py:FUNCTION", multiple=True, help="Call this first in every rank. Repeatable.")
@json_option("the table")
@click.option("-v", "--verbose", is_flag=True, help="Also print the problems that known deviations explain.")
def conformance_command(
    globs: tuple[str, ...], listed: bool, inject: tuple[str, ...], json_file: Path | None, verbose: bool
) -> int:
    """Check DTensor's sharding strategies for the operators of FP8 training, on four CPU ranks."""
    from harness.engine.cluster import Cluster
    from harness.engine.hardware import capacity_here, open_leases
    from harness.engine.node import LocalNode
    from harness.engine.zygote_engine import ZygoteEngine
    from harness.project import leases_in, state_folder
    from harness.report.conformance import conformance_document, conformance_section
    from harness.report.sections import text_of
    from harness.running.injection import parse_injection
    from harness.running.machine import check_rank_packages
    from harness.running.selection import NothingSelected
    from harness.sources import installed_version
    from harness.studies.conformance.checks import select_checks
    from harness.studies.conformance.judge import PROGRAM, run_checks
    from harness.studies.surviving import RanksFailed

    checks = select_checks(globs)
    if not checks:
        raise NothingSelected("no check matches.", where="--select", fix=f"see `{list_checks()}`.")
    if listed:
        for check in checks:
            click.echo(check.id)
        return ExitCode.GOOD
    check_rank_packages()
    injections = [parse_injection(text).patch for text in inject]
    leases = open_leases(leases_in(state_folder()), "cpu")
    node = LocalNode(lambda options: ZygoteEngine(PROGRAM, options), leases, capacity_here("cpu"))
    with Cluster([node]) as engine:
        started = time.perf_counter()
        try:
            conclusions = run_checks(engine, checks, injections)
        except RanksFailed as error:
            click.echo(f"fp8-harness: error: {error.text}", err=True)
            return ExitCode.INFRA
        seconds = time.perf_counter() - started
    software = {name: installed_version(name) for name in ("torch", "torchao")}
    document = conformance_document(conclusions, software=software, seconds=seconds)
    click.echo(text_of([conformance_section(document, verbose=verbose)]), nl=False, err=str(json_file) == "-")
    write_json(json_file, document)
    return ExitCode.GOOD if all(each.good for each in conclusions) else ExitCode.FAILED
