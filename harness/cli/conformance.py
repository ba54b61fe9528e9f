"""`fp8-harness conformance`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from harness.cli.options import json_option, write_output
from harness.hints import list_checks
from harness.jsonform import to_json
from harness.plural import counted
from harness.studies.conformance.judge import Conclusion
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
    from harness.running.injection import parse_injection
    from harness.running.machine import check_rank_packages
    from harness.running.selection import NothingSelected
    from harness.studies.conformance.fixed import select_checks
    from harness.studies.conformance.runner import PROGRAM, run_checks
    from harness.studies.conformance.table import document
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
    click.echo("\n".join(_text(conclusions, seconds, verbose=verbose)), err=str(json_file) == "-")
    write_output(json_file, lambda: to_json(document(conclusions, _software()), indent=2))
    return ExitCode.GOOD if all(each.good for each in conclusions) else ExitCode.FAILED


def _text(conclusions: list[Conclusion], seconds: float, *, verbose: bool) -> Iterator[str]:
    """The lines that people read."""
    from harness.studies.conformance.table import LEGEND, deviation_lines, lines

    yield from (*lines(conclusions), "", LEGEND)
    deviations = list(deviation_lines(conclusions))
    if deviations:
        yield from ("", "known deviations, with the number of checks that show them", *deviations)
    for each in conclusions:
        if not each.good or (verbose and each.problems):
            yield from ("", f"{each.check.id}: {each.status} {' '.join(each.deviations)}")
            yield from (f"  {problem}" for problem in each.problems)
    counts = Counter(each.status for each in conclusions)
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    software = ", ".join(f"{name} {version or 'missing'}" for name, version in _software().items())
    yield from ("", f"{counted(len(conclusions), 'check')} in {seconds:.1f} s ({software}): {summary}")


def _software() -> dict[str, str | None]:
    from harness.sources import installed_version

    return {name: installed_version(name) for name in ("torch", "torchao")}
