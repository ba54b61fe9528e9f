"""Options that several commands share."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from harness.durable import write_whole
from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.running.plan import DEFAULT_JOBS

Command = Callable[..., Any]


class _Output(click.Path):
    """A file to write, "-" for stdout. Reports a missing folder before the work, not after it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. HarnessError where its folder is not there."""
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            fix = f"make {path.parent} or name another file."
            raise HarnessError("there is no such folder.", where=str(path), fix=fix)
        return path


FILE = click.Path(path_type=Path, dir_okay=False)
OUTPUT = _Output(path_type=Path, dir_okay=False)
EXISTING_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
FOLDER = click.Path(path_type=Path, file_okay=False)
ABOVE_0 = click.FloatRange(min=0, min_open=True)
AT_LEAST_1 = click.IntRange(min=1)


def compose_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """One decorator for several options, which `--help` shows in this order."""

    def decorated(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


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
    type=AT_LEAST_1,
    default=DEFAULT_JOBS,
    show_default=True,
    help="Cases to run at the same time, as far as slots allow; on a cluster, per node.",
)
timeout_option = click.option(
    "--timeout-s",
    type=ABOVE_0,
    help="Seconds per attempt at a case. Default: 120, plus per rank 1 for each step and "
    "20 to compile a graph or 120 to generate code, and more for large models.",
)
# The same command on several machines.
nodes_options = compose_options(
    click.option(
        "--nnodes",
        type=AT_LEAST_1,
        default=1,
        show_default=True,
        help="Machines that start this command, as with torchrun; cases may have ranks on several.",
    ),
    click.option(
        "--node-rank",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Number of this machine. Node 0 judges and stores; the others exit with its exit code.",
    ),
    click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Rendezvous: the host of node 0, and a free port on it."),
    click.option(
        "--rdzv-timeout-s",
        type=ABOVE_0,
        default=600,
        show_default=True,
        help="Seconds to wait for all machines.",
    ),
)
root_option = click.option(
    "--root",
    metavar="DIR",
    help="Project root with cases/ and golden/. Default: the nearest one at or above the current folder.",
)
allow_dirty_option = click.option(
    "--allow-dirty",
    is_flag=True,
    help="Store although tracked files differ from the commit, so the commit cannot reproduce what is stored.",
)
markdown_option = click.option(
    "--markdown", "markdown_file", metavar="FILE", type=OUTPUT, help="Write a summary as markdown."
)
html_option = click.option(
    "--html", "html_file", metavar="FILE", type=OUTPUT, help="Write one HTML file that needs no network."
)
# Where versions of a package come from.
version_options = compose_options(
    click.option("--index-url", metavar="URL", help="Take versions from this package index."),
    click.option(
        "--find-links",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        help="Take versions from the wheels in this folder, and from no index.",
    ),
    click.option(
        "--env",
        "environments",
        metavar="VERSION=VENV",
        multiple=True,
        help="Use this virtual environment for that version. Repeatable.",
    ),
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress.")

# Which cases.
query_options = compose_options(
    click.argument("sources", metavar="[TIER|FILE]...", nargs=-1),
    click.option("--tier", "tiers", metavar="TIER", multiple=True, help="A tier by name; may be repeated."),
    click.option("--case", "case_ids", metavar="ID", multiple=True, help="One case by id; may be repeated."),
    select_option,
    click.option(
        "--target",
        metavar="NAME",
        help="Train every case with this target: torchtitan, or your own module such as my_pkg.my_target.",
    ),
)


def json_option(what: str) -> Callable[[Command], Command]:
    """`--json FILE|-`: where to write something. What people read goes to stderr with "-"."""
    text = f"Write {what} as JSON; -: to stdout."
    return click.option("--json", "json_file", metavar="FILE|-", type=OUTPUT, help=text)


def shard_option(command: Command) -> Command:
    """`--shard I/N`: which part of the cases."""

    def parsed(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
        from harness.matrix.shard import parse_shard

        return None if value is None else parse_shard(value)

    text = "Part I of N of these cases, of nearly equal CPU seconds, the same on every machine."
    return click.option("--shard", metavar="I/N", callback=parsed, help=text)(command)


# How cases are run.
plan_options = compose_options(
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
    click.option(
        "--fabric",
        type=click.Choice(["auto", "shared", "gloo", "nccl"]),
        default="auto",
        show_default=True,
        help="Transport of collectives. CPU: shared memory, or gloo over TCP, which sums in another order, "
        "like NCCL. CUDA: nccl. auto: shared, nccl.",
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
        help="The cluster for --engine ray. Default: auto, the cluster of this machine.",
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
        type=AT_LEAST_1,
        help="Ranks at the same time on this machine, in all jobs that share it; on a cluster, per node. "
        "Default on CPU: one per core, at least 10; on CUDA: the visible devices.",
    ),
    timeout_option,
)


def query_parameter(command: Command) -> Command:
    """`query_options`, passed to the command as one parameter `query` (a `Query`)."""

    @functools.wraps(command)
    def with_query(*, sources: tuple[str, ...], tiers: tuple[str, ...], **given: Any) -> Any:
        from harness.running.selection import Query

        chosen = {name: given.pop(name) for name in ("case_ids", "expressions", "target")}
        return command(query=Query(sources=(*sources, *tiers), **chosen), **given)

    return query_options(with_query)


def plan_parameter(command: Command) -> Command:
    """`plan_options`, passed to the command as one parameter `plan_for`: `make_plan` with these options."""

    @functools.wraps(command)
    def with_plan(**given: Any) -> Any:
        from harness.running.plan import make_plan

        names = ("device", "fabric", "engine", "address", "arithmetic", "jobs", "slots", "timeout_s")
        options = {name: given.pop(name) for name in names}
        return command(plan_for=functools.partial(make_plan, **options), **given)

    return plan_options(with_plan)


def versions_parameter(command: Command) -> Command:
    """`version_options`, passed to the command as one parameter `versions_for`: `open_versions` with these options."""

    @functools.wraps(command)
    def with_versions(**given: Any) -> Any:
        from harness.cli.environments import open_versions

        options = {name: given.pop(name) for name in ("index_url", "find_links", "environments")}
        return command(versions_for=functools.partial(open_versions, **options), **given)

    return version_options(with_versions)


def write_output(path: Path | None, content: Callable[[], bytes]) -> None:
    """Write what an option asks for: to a file, with "-" to stdout, and nothing without a path."""
    if str(path) == "-":
        click.echo(content().decode(), nl=False)
    elif path is not None:
        write_whole(path, content())


def write_json(path: Path | None, value: object) -> None:
    """Write a value as indented JSON with a trailing newline, where `write_output` writes."""
    write_output(path, lambda: to_json(value, indent=2) + b"\n")


def typed_command() -> str:
    """The words of this command line, for the provenance of what it makes."""
    return shlex.join(["fp8-harness", *sys.argv[1:]])
