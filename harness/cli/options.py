"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from harness.durable import write_whole
from harness.errors import HarnessError
from harness.running.plan import DEFAULT_JOBS

Command = TypeVar("Command", bound=Callable[..., Any])


select_option = click.option(
    "--select",
    "expressions",
    metavar="EXPR",
    multiple=True,
    help="Keep cases that match: 'tp=4,8 recipe!=bf16', 'id~*ac.full*'. Repeated: all must match.",
)
jobs_option = click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    default=DEFAULT_JOBS,
    show_default=True,
    help="Cases run at the same time, as far as slots allow; of a cluster, for each node.",
)
timeout_option = click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds one attempt at a case may take. Default: 120, for every rank one a step "
    "and 20 to compile a graph or 120 to generate code, and more for large models.",
)


def nodes_options(command: Command) -> Command:
    """`--nnodes --node-rank --rdzv-endpoint --rdzv-timeout-s`: the same command on several machines."""
    for decorate in reversed(
        (
            click.option(
                "--nnodes",
                type=click.IntRange(min=1),
                default=1,
                show_default=True,
                help="Machines that start this command, as with torchrun; cases may have ranks on several.",
            ),
            click.option(
                "--node-rank",
                type=click.IntRange(min=0),
                default=0,
                show_default=True,
                help="Which of them this is. Node 0 judges and stores; the others exit as it does.",
            ),
            click.option(
                "--rdzv-endpoint", metavar="HOST:PORT", help="Where they meet: node 0, and a free port of it."
            ),
            click.option(
                "--rdzv-timeout-s",
                type=click.FloatRange(min=0, min_open=True),
                default=600,
                show_default=True,
                help="Seconds until all of them must have come.",
            ),
        )
    ):
        command = decorate(command)
    return command


def root_option(command: Command) -> Command:
    """`--root DIR`: the project to work in."""
    text = "Project root with cases/ and golden/. Default: the nearest one at or above the current folder."
    return click.option("--root", metavar="DIR", help=text)(command)


def allow_dirty_option(command: Command) -> Command:
    """`--allow-dirty`: make references from files that are in no commit."""
    text = "Store although tracked files differ from the commit, so that nobody can check out what made these."
    return click.option("--allow-dirty", is_flag=True, help=text)(command)


def query_options(command: Command) -> Command:
    """`[TIER|FILE]... --tier --case --select --target`: which cases."""
    for decorate in reversed(
        (
            click.argument("sources", metavar="[TIER|FILE]...", nargs=-1),
            click.option("--tier", "tiers", metavar="TIER", multiple=True, help="A tier by name; may be repeated."),
            click.option("--case", "case_ids", metavar="ID", multiple=True, help="One case by id; may be repeated."),
            select_option,
            click.option(
                "--target",
                metavar="NAME",
                help="Train every case by this target: torchtitan, or a module of your own such as my_pkg.my_target.",
            ),
        )
    ):
        command = decorate(command)
    return command


def shard_option(command: Command) -> Command:
    """`--shard I/N`: which part of the cases."""

    def parsed(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
        from harness.matrix.shard import parse_shard

        return None if value is None else parse_shard(value)

    text = "Part I of N of these cases, of nearly equal CPU seconds, the same on every machine."
    return click.option("--shard", metavar="I/N", callback=parsed, help=text)(command)


def plan_options(command: Command) -> Command:
    """`--device --fabric --engine --address --arithmetic -j --slots --timeout-s`: how cases are run."""
    for decorate in reversed(
        (
            click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
            click.option(
                "--fabric",
                type=click.Choice(["auto", "shared", "gloo", "nccl"]),
                default="auto",
                show_default=True,
                help="What collectives run on. CPU: shared memory, or gloo over TCP, which sums in another order as "
                "NCCL does. CUDA: nccl. auto: shared, nccl.",
            ),
            click.option(
                "--engine",
                type=click.Choice(["zygote", "torchrun", "ray"]),
                default="zygote",
                show_default=True,
                help="zygote: new ranks forked from one process that has imported everything. torchrun: one torchrun "
                "per case, slower. ray: forked on every node of a Ray cluster.",
            ),
            click.option(
                "--address",
                metavar="auto|HOST:PORT",
                help="The cluster of --engine ray. Default: auto, the one that this machine is a node of.",
            ),
            click.option(
                "--arithmetic",
                type=click.Choice(["kernel", "exact"]),
                default=None,
                help="What multiplies float8: torch's kernel of the device, or the exact one, which gives the same "
                "results on every device. Default: exact on CPU, kernel on CUDA.",
            ),
            jobs_option,
            click.option(
                "--slots",
                type=click.IntRange(min=1),
                help="Ranks at the same time on this machine, over all jobs that share it; of a cluster, on each node. "
                "Default on CPU: one a core, at least 10; on CUDA: the visible devices.",
            ),
            timeout_option,
        )
    ):
        command = decorate(command)
    return command


def query_parameter(command: Callable[..., Any]) -> Callable[..., Any]:
    """`query_options`, passed to the command as one parameter `query` (a `Query`)."""
    import functools

    @functools.wraps(command)
    def with_query(*, sources: tuple[str, ...], tiers: tuple[str, ...], **given: Any) -> Any:
        from harness.running.selection import Query

        chosen = {name: given.pop(name) for name in ("case_ids", "expressions", "target")}
        return command(query=Query(sources=(*sources, *tiers), **chosen), **given)

    return query_options(with_query)


def plan_parameter(command: Callable[..., Any]) -> Callable[..., Any]:
    """`plan_options`, passed to the command as one parameter `plan_for`: `make_plan` with these options."""
    import functools

    @functools.wraps(command)
    def with_plan(**given: Any) -> Any:
        from harness.running.plan import make_plan

        names = ("device", "fabric", "engine", "address", "arithmetic", "jobs", "slots", "timeout_s")
        options = {name: given.pop(name) for name in names}
        return command(plan_for=functools.partial(make_plan, **options), **given)

    return plan_options(with_plan)


def write_output(path: Path | None, content: Callable[[], bytes]) -> None:
    """Write what an option asks for: to a file, with "-" to stdout, and nothing without a path."""
    if path is None:
        return
    if str(path) == "-":
        click.echo(content().decode(), nl=False)
    else:
        check_folder(path)
        write_whole(path, content())


def check_folder(path: Path) -> None:
    """HarnessError for a file in a folder that is not there: a mistyped path is found before the work, not after it."""
    if not path.parent.is_dir():
        raise HarnessError("there is no such folder.", where=str(path), fix=f"make {path.parent} or name another file.")


def json_option(command: Command) -> Command:
    """`--json FILE`: where to write the results."""
    path = click.Path(path_type=Path, dir_okay=False)
    return click.option("--json", "json_file", metavar="FILE", type=path, help="Write the results as JSON.")(command)
