"""Options that several commands share; and groups of commands, of the core and of plug-ins, imported when called."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, TextIO

import click
import msgspec
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from harness import registry
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.matrix.axes import AXES, choices, example, shown_value, suggestion
from harness.run_options import AppOptions, Option, PlanOptions, QueryOptions, RunOptions, option_named, options_of
from harness.text import printable

if TYPE_CHECKING:
    from harness.project import Project
    from harness.report.sections import Block
    from harness.running.plan import Plan
    from harness.running.progress import Progress

Command = Callable[..., Any]

SINCE = "fp8_harness.since_s"  # in the context: the CPU seconds of this process before its command

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
        """Return the path. HarnessError if its folder is not there."""
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
    """Return one decorator for several options, which `--help` shows in this order."""

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
        form |= {"shell_complete": names_of(_COMPLETED[name])} if name in _COMPLETED else {}
    if option.takes_dash:
        text = f"{text.removesuffix('.')}; -: to stdout."
    return click.option(*filter(None, (option.short, option.flag)), name, help=text, **form)


def _click_type(option: Option) -> click.ParamType[Any] | None:
    """Return which values the option takes; None for any text."""
    if option.choices:
        return click.Choice(option.choices)
    if option.type is Path:
        return FOLDER if option.metavar == "DIR" else OUTPUT
    if option.number is float:
        return ABOVE_0
    return click.IntRange(min=option.least) if option.number is int else None


def run_options(part: type[msgspec.Struct], *, of_run: bool = True) -> Callable[[Command], Command]:
    """The options of a part of `harness/run_options.py`; without `of_run`, those that other commands have too."""
    return compose_options(
        *(run_option(name) for name, option in options_of(part).items() if of_run or not option.of_run)
    )


_OUTPUT = ("json_file", "junit_file", "markdown_file", "html_file", "curve_file", "github", "keep_logs", "durations")
_SECTIONS: Mapping[str, Collection[str]] = {
    "The case": ("model", "tokens", "world", *AXES, "axes"),
    "Which cases": options_of(QueryOptions),
    "How it runs": (*options_of(PlanOptions), "others"),
    "Output": (*_OUTPUT, "verbose", "output", "as_id", "schema"),
}


class SectionedCommand(click.Command):
    """A command whose help has its options in sections; those that are in none come first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *_SECTIONS)}
        for option in (each for each in self.get_params(ctx) if isinstance(each, click.Option)):
            title = next((title for title, names in _SECTIONS.items() if option.name in names), "Options")
            titles[title] += [record] if (record := option.get_help_record(ctx)) else []
        for title in filter(titles.get, titles):
            with formatter.section(title):
                formatter.write_dl(titles[title])


def names_of(*kinds: str) -> Callable[..., list[CompletionItem]]:
    """Return what completes a word with the names of these kinds, or with files."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        with ctx.scope(cleanup=False):
            words = dict.fromkeys(word for kind in kinds for word in _NAMES[kind](incomplete))
        file = CompletionItem(incomplete, type="file")  # first: a shell drops what comes before it
        return [file, *(CompletionItem(word) for word in words if word.startswith(incomplete))]

    return complete


def _axis_words(incomplete: str) -> list[str]:
    """Return how AXIS=VALUE may go on: the names that begin so; of the only one, its values, or an example."""
    names = [f"{name}=" for name in AXES if incomplete.startswith(f"{name}=") or f"{name}=".startswith(incomplete)]
    if len(names) > 1:
        return names
    values = [(name, value) for name in names for value in choices(name[:-1]) or (example(name[:-1]),)]
    return [word for name, value in values if (word := f"{name}{shown_value(value)}").startswith(incomplete)]


def _case_ids(incomplete: str) -> Iterable[str]:
    """Return the ids in the files of these tiers and of their choices: to check them takes long for a word."""
    project = project_of()
    files = [project.case_file(tier) for tier in ("smoke", "pr") if incomplete and tier in project.tiers]
    texts = [path.read_text() for file in files for path in (file, *file.parent.glob(f"*/{file.name}"))]
    return re.findall(r'(?m)^id = "(.+)"', "".join(texts))


_NAMES: Mapping[str, Callable[[str], Iterable[str]]] = {
    "tiers": lambda _: project_of().tiers,
    "cases": _case_ids,
    "rules": lambda _: (
        word for rule in registry.load("harness.checks.catalogue:RULES") for word in (rule.partition("/")[0], rule)
    ),
    "axes": _axis_words,
    "targets": lambda _: registry.targets(),
    "faults": lambda _: (
        f"fault:{name}" for found in registry.answers("injected faults") for name in found.all_faults()
    ),
    "options of run": lambda _: (f"{name}=" for name in OTHERS),
    "bugs": lambda _: (file.stem for file in project_of().bugs.glob("*.toml")),
}
_COMPLETED = {"axes": "axes", "expressions": "axes", "inject": "faults", "target": "targets"}  # options, by field


def before_command() -> AppOptions:
    """Return the options that were given before the command."""
    return click.get_current_context().find_object(AppOptions) or AppOptions()


def project_of(files: Iterable[str] = ()) -> Project:
    """Return the project of `--root`, or that of these files and the current folder."""
    from harness.project import find_project

    return find_project(before_command().root, files)


def project_parameter(command: Command) -> Command:
    """Pass the project to the command as one parameter `project`."""

    @functools.wraps(command)
    def with_project(**given: Any) -> Any:
        files = given["query"].sources if "query" in given else (given.get("case") or "",)
        return command(project=project_of(files), **given)

    return with_project


def open_progress(*, verbose: bool = False) -> AbstractContextManager[Progress]:
    """Return the progress of a run on this terminal; silent with `--quiet`."""
    from harness.running import progress

    return progress.open_progress(quiet=before_command().quiet, verbose=verbose)


allow_dirty_option = click.option(
    "--allow-dirty",
    is_flag=True,
    help="Store even if tracked files differ from the commit, which then cannot reproduce it.",
)


def json_option(content: str) -> Callable[[Command], Command]:
    """`--json FILE|-`: where to write something. What people read goes to stderr with "-"."""
    return run_option("json_file", f"Write {content} as JSON.")


def curve_option(command: Command) -> Command:
    """`--curve FILE|-`: where to write losses and gradient norms as text."""
    kind = click.Path(path_type=Path, dir_okay=False, allow_dash=True)
    text = "Write losses and gradient norms as a golden file of torchtitan."
    return click.option("--curve", "curve_file", metavar="FILE|-", type=kind, help=text)(command)


def query_parameter(*names: str) -> Callable[[Command], Command]:
    """Return the decorator for these of the options that select cases, passed to the command as one `Query` `query`."""

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def with_query(*, sources: tuple[str, ...], **given: Any) -> Any:
            from harness.running.selection import Query

            query = Query(sources=sources, **{name: given.pop(name) for name in names})
            return command(query=query, **given)

        complete = names_of("tiers", "cases")
        sources = click.argument("sources", metavar="[TIER|FILE|CASE-ID]...", nargs=-1, shell_complete=complete)
        return compose_options(sources, *map(run_option, names))(with_query)

    return decorated


others_option = click.option(
    "-o",
    "--option",
    "others",
    metavar="NAME=VALUE",
    multiple=True,
    shell_complete=names_of("options of run"),
    help=f"Another option of `run`: {', '.join(OTHERS)}. Repeatable.",
)


def plan_parameter(command: Command) -> Command:
    """Return the options of how cases are run, passed to the command as `plan_for`: `make_plan` with them and --root.

    `-o NAME=VALUE` is one of those that only `run` has under its own name.
    """

    def with_plan(*, others: tuple[str, ...], **given: Any) -> Any:
        return _with_plan_for(command, **given, **_read_others(others))

    functools.update_wrapper(with_plan, command)
    return compose_options(run_options(PlanOptions, of_run=False), others_option)(with_plan)


def every_plan_option(command: Command) -> Command:
    """Add every option of how cases are run under its own name, as `plan_parameter` passes them."""
    return run_options(PlanOptions)(functools.wraps(command)(functools.partial(_with_plan_for, command)))


def _with_plan_for(command: Command, **given: Any) -> Any:
    from harness.running.plan import make_plan

    options = {name: given.pop(name) for name in options_of(PlanOptions) if name in given and name != "inject"}

    def plan_for(**more: Any) -> Plan:
        return msgspec.structs.replace(make_plan(**options | more), root_option=before_command().root)

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
    others = {name: value for name, value in given_others().items() if name in fields}
    return RunOptions(**given, **others)


def given_others() -> dict[str, Any]:
    """Return the values that `-o NAME=VALUE` of this command line gives, by field."""
    return _read_others(click.get_current_context().params.get("others", ()))


def print_sections(sections: Iterable[Block], *, file: TextIO | None = None, err: bool = False) -> None:
    """As wide as the terminal and in colors; in a pipe or a file, one line for every row. Never without a bound."""
    from harness.report.sections import terminal, text_of

    file, where = file or (sys.stderr if err else sys.stdout), _options_that_write()
    if not file.isatty():
        click.echo(text_of(sections, where=where), nl=False, file=file)
        return
    from rich.console import Console

    console = Console(file=file)
    console.print(terminal(sections, width=console.width, where=where), end="", soft_wrap=True)


def print_note(text: str) -> None:
    """Print a remark about the work, beside its results."""
    say(f"fp8-harness: note: {text}", err=True)


def _options_that_write() -> str:
    """Return how to see a report whole, of the options that this command has."""
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
    """Return the words of this command line, for the provenance of what it makes."""
    return shlex.join(["fp8-harness", *sys.argv[1:]])


class Group(click.Group):
    """A group whose help has the first sentence of every command, whole."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self.by_section(ctx).items():
            commands = {name: self.listed(ctx, name) for name in names}
            lines = [(name, command.get_short_help_str(limit=1_000)) for name, command in commands.items() if command]
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)

    def by_section(self, ctx: click.Context) -> Mapping[str, Iterable[str]]:
        """Return the names of the commands by the title of a section of the help."""
        return {"Commands": self.list_commands(ctx)}

    def listed(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a command as it is listed in the help: only its own help counts."""
        return self.get_command(ctx, name)


class LazyGroup(Group):
    """A group whose commands are named by their place, as "module:object", by the sections of its help.

    `path`: the words of the group behind `fp8-harness`, by which plug-ins add commands to it.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Mapping[str, str]], path: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self._own, self._path = sections, path

    def _sections(self) -> dict[str, dict[str, str]]:
        sections = {title: dict(places) for title, places in self._own.items()}
        for name, (title, place) in registry.commands(self._path).items():
            sections.setdefault(next(iter(sections)) if self._path else title, {})[name] = place
        return sections

    def _places(self) -> dict[str, str]:
        return {name: place for places in self._sections().values() for name, place in places.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._places())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        words = f"{self._path} {cmd_name}".strip()
        place = self._places().get(cmd_name)
        if place is None and registry.is_offered(words):
            raise registry.needed(words, where=f"fp8-harness {words}")
        if place is None:
            return None
        command = registry.load(place)
        assert isinstance(command, click.Command)
        return command

    def by_section(self, ctx: click.Context) -> Mapping[str, Iterable[str]]:
        return self._sections()

    def listed(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a command with the docstring that is in its bytecode: importing all commands takes 0.3 s."""
        module, _, function = self._places()[name].partition(":")
        loader = getattr(importlib.util.find_spec(module), "loader", None)
        code = loader.get_code(module) if isinstance(loader, SourceFileLoader) else None
        for each in code.co_consts if code is not None else ():
            if isinstance(each, CodeType) and each.co_name == function:
                return click.Command(name, help=each.co_consts[0])
        return self.get_command(ctx, name)


@click.group(
    cls=LazyGroup,
    sections={"Commands": {}},
    path="dev",
    epilog="\b\nExamples:\n  fp8-harness dev tier pr\n  fp8-harness dev mutate --list",
)
def dev() -> None:
    """Mutation testing, conformance, evidence, choice of tiers."""
