"""`fp8-harness conformance`."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import click

from harness.conformance.judge import Conclusion
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness conformance                          every check of the fixed list
  fp8-harness conformance --select 'amax*'         those of one operator
  fp8-harness conformance --select '*-m2x2-*'      those on a 2 x 2 mesh
  fp8-harness conformance --list                   ids only, nothing is run
  fp8-harness conformance --inject fix.py:apply    with a patch of yours in every rank

\b
Exit codes: 0 good, 1 a check failed or a known deviation is gone, 2 usage or bad input,
3 nothing ran, 4 infrastructure, 130 interrupted.
"""


@click.command("conformance", epilog=_EPILOG)
@click.option("--select", "globs", metavar="GLOB", multiple=True, help="Keep checks whose id matches one of these.")
@click.option("--list", "listed", is_flag=True, help="Print the ids of the checks and run nothing.")
@click.option("--inject", metavar="FILE.py:FUNCTION", multiple=True, help="Call this in every rank first.")
@click.option(
    "--json", "json_file", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write the results."
)
@click.option("-v", "--verbose", is_flag=True, help="Print the problems of known deviations too.")
def conformance_command(
    globs: tuple[str, ...], listed: bool, inject: tuple[str, ...], json_file: Path | None, verbose: bool
) -> int:
    """Check DTensor's sharding strategies of the operators that FP8 training uses, on four ranks of the CPU."""
    from harness.conformance.fixed import select_checks
    from harness.conformance.session import PROGRAM, RanksFailed, run_checks
    from harness.engine.zygote import ZygoteEngine
    from harness.running.injection import parse_injection

    checks = select_checks(globs)
    if not checks:
        click.echo("fp8-harness: error: no check matches. Fix: see `fp8-harness conformance --list`.", err=True)
        return ExitCode.NOTHING_RAN
    if listed:
        for check in checks:
            click.echo(check.id)
        return ExitCode.GOOD
    injections = [parse_injection(text).target for text in inject]
    with ZygoteEngine(PROGRAM) as engine:
        started = time.perf_counter()
        try:
            conclusions = run_checks(engine, checks, injections)
        except RanksFailed as error:
            click.echo(f"fp8-harness: error: {error.text}", err=True)
            return ExitCode.INFRA
        seconds = time.perf_counter() - started
    _print(conclusions, seconds, verbose=verbose)
    if json_file is not None:
        _write(json_file, conclusions)
    return ExitCode.GOOD if all(each.good for each in conclusions) else ExitCode.FAILED


def _print(conclusions: list[Conclusion], seconds: float, *, verbose: bool) -> None:
    from harness.conformance.table import deviation_lines, lines

    for line in lines(conclusions):
        click.echo(line)
    click.echo("\nknown deviations (checks that show them)")
    for line in deviation_lines(conclusions):
        click.echo(line)
    for each in conclusions:
        if not each.good or (verbose and each.problems):
            click.echo(f"\n{each.check.id}: {each.status} {' '.join(each.deviations)}")
            for problem in each.problems:
                click.echo(f"  {problem}")
    counts = Counter(each.status for each in conclusions)
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    click.echo(f"\n{len(conclusions)} checks in {seconds:.1f} s ({_software_line()}): {told}")


def _software() -> dict[str, str | None]:
    from harness.running.machine import installed_version

    return {name: installed_version(name) for name in ("torch", "torchao")}


def _software_line() -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in _software().items())


def _write(path: Path, conclusions: list[Conclusion]) -> None:
    import msgspec

    from harness.conformance.table import document
    from harness.durable import write_whole

    write_whole(path, msgspec.json.format(msgspec.json.encode(document(conclusions, _software()))))
