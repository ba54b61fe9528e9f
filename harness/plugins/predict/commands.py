"""`fp8-harness predict`: what a step costs, which layouts it fits, whether FP8 pays, and how fast it is here."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from harness.cli import options
from harness.cli.new import axes_parameter, require_allowed
from harness.cli.options import Group
from harness.engine.cluster import unleased_cluster
from harness.errors import HarnessError
from harness.hints import run_cases
from harness.matrix.axes import axis_values, case_from_axes, option_of
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.layout import REST, left_over
from harness.matrix.models import MODELS, KnownModel, training
from harness.plugins.predict import sections
from harness.plugins.predict.cost import CostReport, metrics, run_report, speed
from harness.plugins.predict.gains import SpeedReport, measure_speed, predicted_gains, timed_case
from harness.plugins.predict.layouts import PROGRAM, require_simulable, simulate, sweep, verify
from harness.plugins.predict.machine import Machine, peak
from harness.plugins.predict.machine import machine as machine_named
from harness.project import Project
from harness.report.run import run_sections
from harness.result import RunResult
from harness.running.case_judge import known_here
from harness.running.machine import check_ranks
from harness.running.plan import Plan, make_plan
from harness.running.selection import Query
from harness.verdict import ExitCode
from harness.workflow import run

_COST_EPILOG = """\b
Examples:
  fp8-harness predict cost tp2-rowwise-v2048-s2-b16 --run
      the same measured, and compared with the formula
  fp8-harness predict cost --model llama3-8b --recipe tensorwise \\
      --machine h100 --tokens-per-s 7773
      its MFU

\b
Exit codes: 0 good, 1 a number differs from its formula, or the case failed.
"""
_LAYOUTS_EPILOG = """\b
Examples:
  fp8-harness predict layouts --model llama3-405b --world 512 \\
      --recipe tensorwise --checkpointing full --sweep
  fp8-harness predict layouts --model llama3-8b --set layers=2 --tp 8 \\
      --dp-shard 64 --recipe tensorwise --verify

\b
Nothing is run: shapes, bytes and errors are exact, times are a model.
--verify lets the first and the last rank take two steps without data, with
the real float8 and parallel code: traffic, matmuls and memory must match
the formulas.
Exit codes: 0 it can run, 1 it cannot, or --verify found a
difference.
"""
_SPEEDUP_EPILOG = """\b
Examples:
  fp8-harness predict speedup --model llama3-8b --dp-shard 64 --tp 8 \\
      --machine h200
  fp8-harness predict speedup --model debugmodel --vocab-size 2256 --tp 8 \\
      --recipe tensorwise --set output_layer=true

\b
Nothing is run: shapes and bytes are exact, times are a model, and its
assumptions are printed.
"""
_MEASURE_EPILOG = """\b
Examples:
  fp8-harness predict measure fsdp2-rowwise-v2048-b16 --pairs 10 --steps 30
      a narrower interval
  fp8-harness predict measure CASE --device cuda --name v2 --json speed.json
      stored as run v2, for `compare`

\b
On a CPU the virtual device computes float8: its seconds are simulated, and do
not gate. Jobs run one at a time. The result is stored as a run, and is then
the last one.
Exit codes: 0 every case was timed, 1 a job failed.
"""


MAX_WORLD = 4096
# Why predictions and timings have no use for these axes.
_NO_AXES = {"steps": "every step costs the same", "target": "a Llama costs the same, whoever trains it"}

_PAIRS = "Pairs of jobs, one of the case and one of its BF16 counterpart."
_WORLD = "Total ranks; FSDP takes what TP and replicas leave."
_machine_option = functools.partial(click.option, "--machine", metavar="NAME")


def _machine_parameter(command: options.Command) -> options.Command:
    """`--machine --nodes`, passed to the command as one parameter `on` (a `Machine`)."""

    @functools.wraps(command)
    def with_machine(*, machine: str, nodes: tuple[int, float], **given: Any) -> Any:
        gpus_per_node, network_gb_s = nodes
        return command(on=machine_named(machine, gpus_per_node=gpus_per_node, network_gb_s=network_gb_s), **given)

    text = "GPUs of a node, and GB/s of one GPU to other nodes, in one direction."
    types = (options.AT_LEAST_1, options.ABOVE_0)
    return options.compose_options(
        _machine_option(default="h100", show_default=True, help="The data sheet: h100, h200, b200, mi300x, …"),
        click.option("--nodes", type=types, default=(8, 50.0), show_default=True, metavar="GPUS GB/S", help=text),
    )(with_machine)


def _configured_case(command: options.Command) -> options.Command:
    """Apply `_configured_cases` of one case, passed to the command as one parameter `case`."""

    @functools.wraps(command)
    def with_case(*, cases: tuple[Case, ...], **given: Any) -> Any:
        return command(case=cases[0], **given)

    return _configured_cases(with_case, metavar="[CASE-ID]", nargs=1)


def _configured_cases(command: options.Command, *, metavar: str = "[CASE-ID]...", nargs: int = -1) -> options.Command:
    """Add `[CASE-ID]... --model NAME --tokens N --world N` and axes, passed to the command as one parameter `cases`.

    Cases, or a named model, with the given axes in the place of their own. No rule excludes them.
    """

    @functools.wraps(command)
    def with_cases(
        *,
        named: str | tuple[str, ...] | None,
        model: str | None,
        tokens: int | None,
        world: int | None,
        axes: dict[str, object],
        **given: Any,
    ) -> Any:
        ids = (named,) if isinstance(named, str) else named or ()
        if bool(ids) == (model is not None):
            what = f"there are both {', '.join(ids)} and --model {model}." if ids else "there is no case."
            raise HarnessError(what, fix="give CASE-ID, or --model NAME.")
        if ids and tokens is not None:
            raise HarnessError("a case has its own.", where="--tokens", fix="set global_batch and seq_len.")
        cases = {name: case_from_axes({**axis_values(parse_case_id(name)), **axes}) for name in ids}
        if model is not None:
            cases[f"--model {model}"] = training(named_model(model), tokens=tokens, **axes)
        return command(cases=tuple(_placed(case, where, world, axes) for where, case in cases.items()), **given)

    return options.compose_options(
        click.argument("named", metavar=metavar, nargs=nargs, required=False, shell_complete=options.names_of("cases")),
        click.option("--model", metavar="NAME", help="Instead of a case: llama3-8b, llama3-70b, llama3-405b, …"),
        click.option("--tokens", type=options.AT_LEAST_1, help="Tokens per data-parallel rank and step."),
        click.option("--world", type=click.IntRange(min=1, max=MAX_WORLD), help=_WORLD),
        axes_parameter(without=_NO_AXES, defaults=False),
    )(with_cases)


def _placed(case: Case, where: str, world: int | None, axes: dict[str, object]) -> Case:
    """Return the case on another number of ranks, if any: each keeps its sequences where no global batch is given."""
    if world is not None:
        if REST in axes:
            raise HarnessError("--world gives it.", where=option_of(REST), fix="leave one of them out.")
        values = axis_values(case)
        values[REST] = left_over(world, values, where="--world")
        placed = case_from_axes(values)
        if "global_batch" not in axes:
            placed = case_from_axes({**values, "global_batch": max(1, case.local_batch) * placed.layout.batches})
        case = placed
    require_allowed(case, axes, where=where)
    return case


@click.group(
    "predict", cls=Group, epilog="\b\nExample:\n  fp8-harness predict cost --model llama3-8b --tp 8 --dp-shard 64"
)
def predict() -> None:
    """Predict costs, layouts and FP8 speedup of a case or model, or measure its speed."""


@predict.command("cost", cls=options.SectionedCommand, epilog=_COST_EPILOG)
@_configured_case
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The rank to show.")
@click.option("--run", "run_it", is_flag=True, help="Run the case, store the result, and compare it with the formulas.")
@_machine_option(help="The data sheet for MFU: h100, h200, b200, …")
@click.option(
    "--tokens-per-s", type=options.ABOVE_0, help="Measured tokens/s of one device: print its TFLOP/s and MFU."
)
@options.json_option("the costs")
def cost_command(
    *, case: Case, rank: int, run_it: bool, machine: str | None, tokens_per_s: float | None, json_file: Path | None
) -> int:
    """Show FLOPs, casts, communicated and saved bytes of one step, by formula or measured, and MFU of a speed."""
    if run_it and tokens_per_s is not None:
        raise HarnessError("--run measures the speed.", where="--tokens-per-s", fix="drop one of them.")
    code = ExitCode.GOOD
    if run_it:
        plan = msgspec.structs.replace(make_plan(), root_option=options.before_command().root)
        with options.open_progress() as progress:
            result, _ = run(options.project_of(), Query(sources=(case_id(case),)), plan, progress)
        _tell_failures(result)
        report, code = run_report(case, result.results[0]), result.exit_code
    else:
        device = None if machine is None else peak(machine)
        device_speed = None if tokens_per_s is None else speed(case, tokens_per_s, device)
        report = CostReport(formula=metrics(case, rank=rank), peak=device, speed=device_speed)
    options.print_report(sections.cost_sections(report), json_file, report)
    return ExitCode.FAILED if report.differing else code


@predict.command("layouts", cls=options.SectionedCommand, epilog=_LAYOUTS_EPILOG)
@_configured_case
@_machine_parameter
@click.option(
    "--sweep", "sweep_it", is_flag=True, help="Sort all layouts of this world size, for the same global batch."
)
@click.option(
    "--verify", "verify_it", is_flag=True, help="Compare the formulas with simulated ranks, the first and the last."
)
@options.json_option("the ranks and their costs")
def layouts_command(*, case: Case, on: Machine, sweep_it: bool, verify_it: bool, json_file: Path | None) -> int:
    """Predict shapes, traffic, memory and errors of a case on up to 4,096 ranks, without running it."""
    if sweep_it and verify_it:
        raise HarnessError("a sweep is of many layouts.", where="--verify", fix="leave out --sweep or --verify.")
    known = known_here(options.project_of())
    if sweep_it:
        ranked = sweep(case, on, known=known)
        options.print_report(sections.sweep_sections(ranked), json_file, ranked)
        return ExitCode.FAILED if all(layout.refused for layout in ranked) else ExitCode.GOOD
    simulation = simulate(case, on, known=known)
    verification = None
    if verify_it:
        require_simulable(case)
        check_ranks()
        ranks = tuple(dict.fromkeys((0, case.world_size - 1)))
        with unleased_cluster(PROGRAM, len(ranks), options.print_note) as cluster:
            verification = verify(cluster, case, ranks, known)
    report = {"simulation": simulation, "verification": verification}
    options.print_report(sections.layout_sections(simulation, verification), json_file, report)
    differs = verification is not None and verification.differing
    return ExitCode.FAILED if simulation.refused or differs else ExitCode.GOOD


@predict.command("speedup", cls=options.SectionedCommand, epilog=_SPEEDUP_EPILOG)
@_configured_case
@_machine_parameter
@click.option("--eager", is_flag=True, help="Print tables for eager blocks, for a case without compiled blocks.")
@options.json_option("the prediction")
def speedup_command(*, case: Case, on: Machine, eager: bool, json_file: Path | None) -> None:
    """Predict whether FP8 makes a case or model faster, with which recipe and linears. Runs nothing."""
    gains = predicted_gains(case, on, eager=eager, known=known_here(options.project_of()))
    options.print_report(sections.speedup_sections(gains), json_file, gains)


@predict.command("measure", cls=options.SectionedCommand, epilog=_MEASURE_EPILOG)
@_configured_cases
@click.option("--pairs", type=click.IntRange(min=3), default=6, show_default=True, help=_PAIRS)
@click.option("--steps", type=options.AT_LEAST_1, default=10, show_default=True, help="Timed steps per job.")
@click.option("--warmup", type=options.AT_LEAST_1, default=3, show_default=True, help="Warm-up steps per job.")
@click.option("--name", default="speed", show_default=True, metavar="NAME", help="A name for the stored run.")
@options.json_option("the speeds")
@options.plan_parameter
@options.project_parameter
def measure_command(  # noqa: PLR0913  one parameter an option
    *,
    cases: tuple[Case, ...],
    pairs: int,
    steps: int,
    warmup: int,
    name: str,
    json_file: Path | None,
    plan_for: Callable[..., Plan],
    project: Project,
) -> int:
    """Time FP8 cases against their BF16 counterparts of the same layout, alternately."""
    if len(set(cases)) < len(cases):
        raise HarnessError("a case is given twice.", where="predict measure", fix="give every case once.")
    timed = [timed_case(case, warmup=warmup, steps=steps) for case in cases]
    plan = msgspec.structs.replace(plan_for().common(timed), name=name)
    with options.open_progress() as progress:
        speeds, result = measure_speed(project, timed, plan, progress, pairs=pairs, warmup=warmup)
    _tell_failures(result)
    report = SpeedReport(gated=plan.device != "cpu", warmup=warmup, cases=speeds)
    options.print_report(sections.speed_sections(report), json_file, report)
    return result.exit_code


def _tell_failures(result: RunResult) -> None:
    if result.exit_code is not ExitCode.GOOD:
        rerun = run_cases("--lf", root=options.before_command().root)
        options.print_sections(run_sections(result, rerun=rerun), err=True)


def named_model(name: str) -> KnownModel:
    """Return the model of this name. Raises `HarnessError` that lists all names."""
    if name not in MODELS:
        raise HarnessError(f"there is no model {name!r}.", where="--model", fix=f"give one of {', '.join(MODELS)}.")
    return MODELS[name]
