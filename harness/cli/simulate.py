"""`fp8-harness simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.axes import configuration_options
from harness.cli.machine import machine_options
from harness.cli.options import json_option, write_json
from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.verdict import ExitCode

if TYPE_CHECKING:
    from harness.matrix.known import KnownFault
    from harness.performance.machine import Machine
    from harness.studies.simulation import Verification

_EPILOG = """\b
Examples:
  fp8-harness simulate fsdp2-tp2-rowwise-v2048-s2-b16 --world 512
  fp8-harness simulate --model llama3-8b --tp 8 --dp-shard 64 --recipe tensorwise --checkpointing full
  fp8-harness simulate --model llama3-70b --world 4096 --tp 8 --recipe rowwise --output-layer
  fp8-harness simulate --model llama3-405b --world 512 --recipe tensorwise --checkpointing full --sweep
  fp8-harness simulate --model llama3-8b --layers 2 --tp 8 --dp-shard 64 --recipe tensorwise --verify

\b
Nothing is run: shapes, bytes and refusals are exact, times are a model. --verify lets the first and the
last rank take two steps without data, with the real float8 and parallel code: wire, matmuls and memory
must be those of the formulas.

\b
Exit codes: 0 nothing refuses it, 1 it is refused, or --verify found a difference, 2 usage error or bad
input, such as a case that a rule excludes, 4 infrastructure.
"""


@click.command("simulate", epilog=_EPILOG)
@configuration_options
@machine_options
@click.option(
    "--sweep", "sweep_it", is_flag=True, help="Sort all layouts of this world size, for the same global batch."
)
@click.option(
    "--verify", "verify_it", is_flag=True, help="Compare the formulas with simulated ranks, the first and the last."
)
@json_option("the ranks and their costs")
def simulate_command(*, case: Case, on: Machine, sweep_it: bool, verify_it: bool, json_file: Path | None) -> int:
    """Predict shapes, traffic, memory and refusals of a case on up to 4,096 ranks, without running it."""
    from harness.project import find_project
    from harness.running.case_judge import known_here

    if sweep_it and verify_it:
        raise HarnessError("a sweep is of many layouts.", where="--verify", fix="leave out --sweep or --verify.")
    known = known_here(find_project())
    return _swept(case, on, known, json_file) if sweep_it else _simulated(case, on, known, verify_it, json_file)


def _simulated(case: Case, on: Machine, known: tuple[KnownFault, ...], verify_it: bool, json_file: Path | None) -> int:
    from harness.performance.simulation import simulate
    from harness.report.simulation import SimulationReport, simulation_text
    from harness.studies.simulation import SimulationFailed

    found = simulate(case, on, known=known)
    try:
        verification = _verified(case, known) if verify_it else None
    except SimulationFailed as error:
        click.echo(f"fp8-harness: error: {error.text}", err=True)
        return ExitCode.INFRA
    report = SimulationReport(simulation=found, verification=verification)
    if str(json_file) != "-":
        click.echo(simulation_text(report), nl=False)
    write_json(json_file, report)
    differs = verification is not None and verification.differing
    return ExitCode.FAILED if found.refused or differs else ExitCode.GOOD


def _verified(case: Case, known: tuple[KnownFault, ...]) -> Verification:
    from harness.engine.unleased import unleased_cluster
    from harness.running.machine import check_rank_packages
    from harness.studies.simulation import PROGRAM, require_simulable, verify

    require_simulable(case)
    check_rank_packages()
    ranks = tuple(dict.fromkeys((0, case.world_size - 1)))
    with unleased_cluster(PROGRAM, len(ranks)) as cluster:
        return verify(cluster, case, ranks, known)


def _swept(case: Case, on: Machine, known: tuple[KnownFault, ...], json_file: Path | None) -> int:
    from harness.performance.sweep import sweep
    from harness.report.simulation import sweep_text

    found = sweep(case, on, known=known)
    if str(json_file) != "-":
        click.echo(sweep_text(found), nl=False)
    write_json(json_file, found)
    return ExitCode.FAILED if all(each.refused for each in found) else ExitCode.GOOD
