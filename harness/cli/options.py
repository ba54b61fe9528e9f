"""Options that several commands share."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
import msgspec
from click.core import ParameterSource

from harness.durable import write_whole
from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.matrix.axes import AXES, choices, example, shown_value, suggestion
from harness.project import find_project
from harness.run_options import PARTS, Option, PlanOptions, QueryOptions, RunOptions, option_named, options_of
from harness.text import printable

if TYPE_CHECKING:
    from harness.report.sections import Block
    from harness.running.plan import Plan

Command = Callable[..., Any]
PARTS_BY_TITLE = dict(zip(("Which cases", "How they run", "Extent and output"), PARTS, strict=True))


# How cases are run, and what only `run` spells as an option: other commands have `-o` for it.
OTHERS = {
    option.flag.removeprefix("--"): option
    for option in options_of(PlanOptions).values()
    if option.of_run and not option.repeatable
}
_BY_USER = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


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


def run_option(name: str, text: str = "") -> Callable[[Command], Command]:
    """The option that the field of this name declares in `harness/run_options.py`, with its own help or this text."""
    option = option_named(name)
    text = text or option.help
    if option.type is bool:
        form: dict[str, Any] = {"is_flag": True, "envvar": option.variable}
    else:
        form = {"type": _click_type(option), "multiple": option.repeatable, "metavar": option.metavar}
        form |= {"default": option.default, "show_default": bool(option.shown_default)}
        form |= {"shell_complete": _complete_axis} if name == "axes" else {}
    if option.takes_dash:
        text = f"{text.removesuffix('.')}; -: to stdout."
    return click.option(*filter(None, (option.short, option.flag)), name, help=text, **form)


def _click_type(option: Option) -> click.ParamType[Any] | None:
    """Which values the option takes; None for any text."""
    if option.choices:
        return click.Choice(option.choices)
    if option.type is Path:
        return FOLDER if option.metavar == "DIR" else OUTPUT
    if option.number is float:
        return ABOVE_0
    return click.IntRange(min=option.least) if option.number is int else None


def _complete_axis(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return how AXIS=VALUE may go on: the names that begin so; of the only one, its values."""
    names = [f"{name}=" for name in AXES if incomplete.startswith(f"{name}=") or f"{name}=".startswith(incomplete)]
    if len(names) > 1:
        return names
    return [word for name in names for word in _assignments(name[:-1]) if word.startswith(incomplete)]


def _assignments(name: str) -> list[str]:
    """Return AXIS=VALUE for every value of an axis; of a number or a text, for an example."""
    return [f"{name}={shown_value(value)}" for value in choices(name) or (example(name),)]


def run_options(part: type[msgspec.Struct], *, of_run: bool = True) -> Callable[[Command], Command]:
    """The options of a part of `harness/run_options.py`; without `of_run`, those that other commands have too."""
    return compose_options(
        *(run_option(name) for name, option in options_of(part).items() if of_run or not option.of_run)
    )


class RunCommand(click.Command):
    """A command whose help shows the options of `harness/run_options.py` in a section for every part."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {parameter.name or "": parameter for parameter in self.get_params(ctx)}
        for title, part in PARTS_BY_TITLE.items():
            own = [left.pop(name) for name in options_of(part)]
            with formatter.section(title):
                formatter.write_dl([record for parameter in own if (record := parameter.get_help_record(ctx))])


root_option = run_option("root")


def project_parameter(command: Command) -> Command:
    """`--root`, passed to the command as one parameter `project`."""

    @functools.wraps(command)
    def with_project(*, root: str | None, **given: Any) -> Any:
        files = given["query"].sources if "query" in given else (given.get("case") or "",)
        return command(project=find_project(root, files), **given)

    return root_option(with_project)


allow_dirty_option = click.option(
    "--allow-dirty",
    is_flag=True,
    help="Store although tracked files differ from the commit, so the commit cannot reproduce what is stored.",
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress.")


def json_option(content: str) -> Callable[[Command], Command]:
    """`--json FILE|-`: where to write something. What people read goes to stderr with "-"."""
    return run_option("json_file", f"Write {content} as JSON.")


def curve_option(command: Command) -> Command:
    """`--curve FILE|-`: where to write losses and gradient norms as text."""
    kind = click.Path(path_type=Path, dir_okay=False, allow_dash=True)
    text = "Write losses and gradient norms as a golden file of torchtitan."
    return click.option("--curve", "curve_file", metavar="FILE|-", type=kind, help=text)(command)


def query_parameter(command: Command) -> Command:
    """The options that select cases, passed to the command as one parameter `query` (a `Query`)."""

    @functools.wraps(command)
    def with_query(*, sources: tuple[str, ...], **given: Any) -> Any:
        from harness.running.selection import Query

        query = Query(sources=sources, **{name: given.pop(name) for name in options_of(QueryOptions)})
        return command(query=query, **given)

    sources = click.argument("sources", metavar="[TIER|FILE|CASE-ID]...", nargs=-1)
    return sources(run_options(QueryOptions)(with_query))


def plan_parameter(command: Command) -> Command:
    """The options of how cases are run, passed to the command as `plan_for`: `make_plan` with them and --root.

    `-o NAME=VALUE` is one of those that only `run` has under its own name.
    """

    def with_plan(*, others: tuple[str, ...], **given: Any) -> Any:
        return _with_plan_for(command, **given, **_read_others(others))

    functools.update_wrapper(with_plan, command)
    text = f"Another option of `run`: {', '.join(OTHERS)}. Repeatable."
    other = click.option("-o", "--option", "others", metavar="NAME=VALUE", multiple=True, help=text)
    return compose_options(run_options(PlanOptions, of_run=False), other)(with_plan)


def every_plan_option(command: Command) -> Command:
    """Add every option of how cases are run under its own name, as `plan_parameter` passes them."""
    return run_options(PlanOptions)(functools.wraps(command)(functools.partial(_with_plan_for, command)))


def _with_plan_for(command: Command, **given: Any) -> Any:
    from harness.running.plan import make_plan

    options = {name: given.pop(name) for name in options_of(PlanOptions) if name in given and name != "inject"}
    root = given.get("root")

    def plan_for(**more: Any) -> Plan:
        return msgspec.structs.replace(make_plan(**options | more), root_option=root)

    return command(plan_for=plan_for, **given)


def _read_others(words: Iterable[str]) -> dict[str, Any]:
    """Return the values of `-o NAME=VALUE`, by field. HarnessError with the nearest name for another one."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        option = OTHERS.get(name)
        if option is None:
            raise HarnessError(f"unknown option '{name}'.", where=f"-o {word}", fix=suggestion(name, OTHERS))
        if not equals:
            raise HarnessError(f"{name} has no value.", where=f"-o {word}", fix=f"write -o {name}=VALUE.")
        try:
            kind = _click_type(option)
            values[name.replace("-", "_")] = text if kind is None else kind.convert(text, None, None)
        except click.BadParameter as error:
            raise HarnessError(
                error.message, where=f"-o {word}", fix=f"see `{option.flag}` of `run --help`."
            ) from error
    return values


def given_run_options() -> RunOptions:
    """The options that change what ranks do, as the user gave them: they are repeated in commands, defaults are not."""
    context, fields = click.get_current_context(), RunOptions.__struct_fields__
    given = {name: context.params[name] for name in fields if context.get_parameter_source(name) in _BY_USER}
    others = _read_others(context.params.get("others", ()))
    return RunOptions(**given, **{name: value for name, value in others.items() if name in fields})


def print_sections(sections: Iterable[Block], *, file: TextIO | None = None, err: bool = False) -> None:
    """As wide as the terminal and in colours; in a pipe or a file, one line for every row. Never without a bound."""
    from harness.report.bounded import bounded
    from harness.report.sections import terminal, text_of

    file = file or (sys.stderr if err else sys.stdout)
    sections = bounded(list(sections), where=_options_that_write())
    if not file.isatty():
        click.echo(text_of(sections), nl=False, file=file)
        return
    from rich.console import Console

    console = Console(file=file)
    console.print(terminal(sections, width=console.width), end="", soft_wrap=True)


def print_note(text: str) -> None:
    """Print a remark about the work, beside its results."""
    click.echo(f"fp8-harness: note: {text}", err=True)


def _options_that_write() -> str:
    """How to see a report whole, of the options that this command has."""
    command = click.get_current_context().command
    flags = [parameter.opts[0] for parameter in command.params if parameter.name in ("json_file", "html_file")]
    return " or ".join(f"{flag} FILE" for flag in flags) or "A narrower selection"


def say(text: str, *, err: bool = False) -> None:
    """A line for people, of which some words are of a file or of a rank."""
    click.echo(printable(text), err=err)


def write_output(path: Path | None, content: Callable[[], bytes]) -> None:
    """Write what an option asks for: to a file, with "-" to stdout, and nothing without a path."""
    if str(path) == "-":
        click.echo(content().decode(), nl=False)
    elif path is not None:
        write_whole(path, content())


def write_json(path: Path | None, value: object) -> None:
    """Write a value as indented JSON with a trailing newline, where `write_output` writes."""
    write_output(path, lambda: to_json(value, indent=2) + b"\n")


def print_report(sections: Iterable[Block], json_file: Path | None, value: object) -> None:
    """Print for people and write for programs; what people read goes to stderr with "-"."""
    print_sections(sections, err=str(json_file) == "-")
    write_json(json_file, value)


def print_or_write(sections: Iterable[Block], json_file: Path | None, value: object) -> None:
    """Print for people, or write for programs where that is asked for."""
    if json_file is None:
        print_sections(sections)
    write_json(json_file, value)


def typed_command() -> str:
    """The words of this command line, for the provenance of what it makes."""
    return shlex.join(["fp8-harness", *sys.argv[1:]])
