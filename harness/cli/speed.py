"""`fp8-harness speed`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from harness.cli.options import AT_LEAST_1, json_option, plan_parameter, root_option, write_output
from harness.errors import HarnessError
from harness.running.plan import Plan
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness speed fsdp2-tensorwise-ag.fp8-inductor-v2048-b16       against its BF16 twin, 6 pairs of jobs
  fp8-harness speed fsdp2-rowwise-v2048-b16 --pairs 10 --steps 30    a narrower interval
  fp8-harness speed CASE --device cuda --name v2 --json speed.json   stored as run v2, which `gate` compares

\b
On a CPU the virtual device computes float8: its seconds are simulated, and do not gate.
Jobs run one at a time. The result is stored like that of `run`, and is then the last run.

\b
Exit codes: 0 every case was timed, 1 a job failed, 2 usage error or bad input, 4 infrastructure.
"""


@click.command("speed", epilog=_EPILOG)
@click.argument("case_ids", metavar="CASE-ID...", nargs=-1, required=True)
@click.option(
    "--pairs",
    type=click.IntRange(min=3),
    default=6,
    show_default=True,
    help="Pairs of jobs, one of the case and one of its BF16 twin.",
)
@click.option("--steps", type=AT_LEAST_1, default=10, show_default=True, help="Timed steps per job.")
@click.option("--warmup", type=AT_LEAST_1, default=3, show_default=True, help="Warm-up steps per job.")
@click.option("--name", default="speed", show_default=True, metavar="NAME", help="A name for the stored run.")
@json_option("the speeds")
@plan_parameter
@root_option
def speed_command(  # noqa: PLR0913  one parameter an option
    *,
    case_ids: tuple[str, ...],
    pairs: int,
    steps: int,
    warmup: int,
    name: str,
    json_file: Path | None,
    plan_for: Callable[..., Plan],
    root: str | None,
) -> int:
    """Time FP8 cases against their BF16 twins of the same layout, alternately."""
    from harness.cli.report import print_result
    from harness.hints import rerun_failed
    from harness.jsonform import to_json
    from harness.matrix.caseid import parse_case_id
    from harness.project import find_project
    from harness.report.speed import SpeedReport, speed_text
    from harness.running.progress import open_progress
    from harness.studies.speed import measure_speed, timed_case

    if len(set(case_ids)) < len(case_ids):
        raise HarnessError("a case is given twice.", where="speed", fix="give every case once.")
    cases = [timed_case(parse_case_id(each), warmup=warmup, steps=steps) for each in case_ids]
    plan = msgspec.structs.replace(plan_for(), root_option=root, name=name)
    with open_progress() as progress:
        found, result = measure_speed(find_project(root), cases, plan, progress, pairs=pairs, warmup=warmup)
    if result.exit_code is not ExitCode.GOOD:
        print_result(result, sys.stderr, rerun=rerun_failed(root=root))
    report = SpeedReport(gated=plan.device != "cpu", warmup=warmup, cases=found)
    if str(json_file) != "-":
        click.echo(speed_text(report), nl=False)
    write_output(json_file, lambda: to_json(report, indent=2))
    return result.exit_code
