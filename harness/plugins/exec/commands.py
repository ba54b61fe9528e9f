"""`fp8-harness exec`: runs a command on CPU ranks as if there were GPUs, and judges what it trained."""

from collections.abc import Sequence
from pathlib import Path

import click

from harness.cli.options import ABOVE_0, AT_LEAST_1, json_option, run_option, say, write_json
from harness.errors import HarnessError
from harness.plugins.exec import against
from harness.plugins.exec.against import run_both
from harness.plugins.exec.expectations import Meant, in_comments, meant_by_records, read, written
from harness.plugins.exec.judge import judge_jobs
from harness.plugins.exec.report import answer_of, lines
from harness.plugins.exec.request import GPUS, ExecRequest, program_of
from harness.plugins.exec.supervise import Bounds, check_room, run
from harness.running.machine import check_ranks
from harness.running.plan import parse_injection

FILE = click.Path(dir_okay=False, path_type=Path)
_EPILOG = """\b
Examples:
  fp8-harness exec -- torchrun --nproc-per-node 2 train.py --steps 10
  fp8-harness exec -n 4 --gpu b200 -- accelerate launch --num_processes 4 x.py
  fp8-harness exec -n 8 --nodes 2 -- python -m my_pkg.train
  fp8-harness exec --timeout 600 -- pytest tests/gpu

\b
Exit codes: the command's own if exec found nothing; 1 for a finding or an
exceeded limit, 2 for a usage error or bad input, 130 after Ctrl-C.
"""


@click.command("exec", epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@click.option("-n", "--ranks", type=AT_LEAST_1, help="Number of GPUs and ranks. Default: what the command says.")
@click.option("--gpu", type=click.Choice(list(GPUS)), default="h100", show_default=True, help="The GPU that it sees.")
@click.option("--nodes", type=AT_LEAST_1, default=1, show_default=True, help="Number of nodes that it sees.")
@click.option(
    "--timeout",
    "timeout_s",
    type=ABOVE_0,
    metavar="SECONDS",
    help="Stop it then, and print each rank's line.",
)
@click.option("--memory-per-rank", "memory_gib", type=ABOVE_0, metavar="GIB", help="Stop it when a process holds more.")
@click.option("--watch/--no-watch", default=True, help="Record and check what the command trains.")
@click.option("--expect", type=FILE, metavar="FILE", help="Compare the run with the options and counts in this file.")
@click.option("--record", type=FILE, metavar="FILE", help="Write the options and counts of this run for --expect.")
@click.option("--against-one-rank", is_flag=True, help="Run the command on one rank too, and compare the first steps.")
@run_option("inject")
@json_option("the answer")
def exec_command(  # noqa: PLR0913  one parameter an option
    *,
    command: tuple[str, ...],
    ranks: int | None,
    gpu: str,
    nodes: int,
    timeout_s: float | None,
    memory_gib: float | None,
    watch: bool,
    expect: Path | None,
    record: Path | None,
    against_one_rank: bool,
    inject: tuple[str, ...],
    json_file: Path | None,
) -> int:
    """Run a command on CPU ranks that look like GPUs, and check what it trains.

    COMMAND is what you type on a machine with GPUs: torchrun, accelerate launch, python, -m MODULE, or pytest. It runs
    unchanged, and its output is passed through. Findings go to stderr.
    """
    request = ExecRequest(
        command=command,
        ranks=ranks or 0,
        nodes=nodes,
        gpu=GPUS[gpu],
        injections=tuple(parse_injection(text).patch for text in inject),
        watch=watch,
    )
    check_ranks()
    check_command(request)
    bounds = Bounds(timeout_s=timeout_s or 0.0, memory_gib=memory_gib or 0.0)
    outcome, beside = run_both(request, bounds) if against_one_rank else (run(request, bounds), None)
    judged = judge_jobs(outcome.records, meant_of(command, expect))
    if record:
        record.write_text(written(meant_by_records(outcome.records)))
    answer = answer_of(outcome, judged)
    for line in (*lines(answer, {"gpu": gpu}), *(against.lines(beside) if beside is not None else ())):
        say(line, err=True)
    write_json(json_file, answer)
    return answer.exit_code or int(beside is not None and beside.verdict != "equal")


def meant_of(command: Sequence[str], file: Path | None) -> Meant | None:
    """Return what the command is meant to do, by a file or by comments in its script."""
    script = next((path for path in map(Path, command) if path.suffix == ".py" and path.is_file()), None)
    return read(file) if file is not None else None if script is None else in_comments(script)


def check_command(request: ExecRequest) -> None:
    """HarnessError for a command that cannot be run, before anything is imported."""
    check_room(request.ranks)
    if request.ranks % request.nodes:
        what = f"{request.ranks} ranks do not divide among {request.nodes} nodes."
        raise HarnessError(what, where="--nodes", fix=f"give `-n` a multiple of {request.nodes}.")
    first = request.command[0]
    script = next((word for word in request.command if word.endswith(".py")), "")
    own = first.endswith(".py") or Path(first).name.startswith("python")
    if own and script and not Path(script).exists() and "-m" not in request.command and "-c" not in request.command:
        raise HarnessError("there is no such script.", where=script, fix=f"check the path: this is {Path.cwd()}.")
    if not own and not first.startswith("-") and Path(first).name != "torchrun" and program_of(first) is None:
        raise HarnessError("there is no such program.", where=first, fix="check its name, or install its package.")
