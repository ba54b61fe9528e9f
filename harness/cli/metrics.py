"""`fp8-harness metrics`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from harness.cli.axes import configuration_options
from harness.cli.options import ABOVE_0, json_option, root_option, write_output
from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.matrix.case import Case
from harness.performance.metrics import metrics
from harness.performance.mfu import speed
from harness.performance.peaks import peak
from harness.report.metrics import MetricsReport, metrics_text, run_report
from harness.result import RunResult
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness metrics fsdp2-tp2-rowwise-v2048-s2-clip0.25-f64   FLOPs, bytes and casts of a case, by formula
  fp8-harness metrics tp2-rowwise-v2048-s2-b16 --run            the same measured, and compared with the formula
  fp8-harness metrics --model llama3-8b --tp 8 --dp-shard 64 --recipe tensorwise
  fp8-harness metrics --model llama3-8b --recipe tensorwise --device h100 --tokens-per-s 7773   which MFU is that?

\b
Exit codes: 0 good, 1 a number differs from its formula, or the case failed, 2 usage error or bad input.
"""


@click.command("metrics", epilog=_EPILOG)
@configuration_options
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The rank to show.")
@click.option("--run", "run_it", is_flag=True, help="Run the case, store the result, and compare it with the formulas.")
@click.option("--device", "device_name", metavar="NAME", help="The device for MFU: h100, h200, b200, …")
@click.option("--tokens-per-s", type=ABOVE_0, help="Measured tokens/s of one device: print its TFLOP/s and MFU.")
@json_option("the metrics")
@root_option
def metrics_command(  # noqa: PLR0913  one parameter an option
    *,
    case: Case,
    rank: int,
    run_it: bool,
    device_name: str | None,
    tokens_per_s: float | None,
    json_file: Path | None,
    root: str | None,
) -> int:
    """Show FLOPs, casts, communicated and saved bytes of one step, by formula or measured, and MFU of a speed.

    A case by its id or a model by name; options of axes change it.
    """
    if run_it and tokens_per_s is not None:
        raise HarnessError("--run measures the speed.", where="--tokens-per-s", fix="drop one of them.")
    if run_it:
        result = _run(case, root)
        report = run_report(case, result.results[0])
    else:
        result = None
        device = None if device_name is None else peak(device_name)
        found = None if tokens_per_s is None else speed(case, tokens_per_s, device)
        report = MetricsReport(formula=metrics(case, rank=rank), peak=device, speed=found)
    if str(json_file) != "-":
        click.echo(metrics_text(report), nl=False)
    write_output(json_file, lambda: to_json(report, indent=2))
    if report.differing:
        return ExitCode.FAILED
    return ExitCode.GOOD if result is None else result.exit_code


def _run(case: Case, root: str | None) -> RunResult:
    """The result of the case, run, judged and stored as `run` does; told where it is not good."""
    from harness.cli.report import print_result
    from harness.hints import rerun_failed
    from harness.matrix.caseid import case_id
    from harness.project import find_project
    from harness.running.plan import make_plan
    from harness.running.progress import open_progress
    from harness.running.selection import Query
    from harness.workflow import run

    with open_progress() as progress:
        plan = msgspec.structs.replace(make_plan(), root_option=root)
        result = run(find_project(root), Query(case_ids=(case_id(case),)), plan, progress).result
    if result.exit_code is not ExitCode.GOOD:
        print_result(result, sys.stderr, rerun=rerun_failed(root=root))
    return result
