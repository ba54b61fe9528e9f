"""The `fp8-harness` command: its subcommands, error messages and exit codes.

Plug-ins add commands: see `harness/registry.py`.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from harness.cli.options import OTHERS, SINCE, LazyGroup, run_options
from harness.engine.linux import cpu_s
from harness.errors import HarnessError
from harness.matrix.axes import AXES, allowed_values, example, out_of_scope, said
from harness.matrix.synonyms import meanings
from harness.run_options import AppOptions, options_of
from harness.text import printable
from harness.verdict import ExitCode

# By section of the help: where each command is.
_SECTIONS = {
    "Run and look": {
        "run": "harness.cli.run:run_command",
        "list": "harness.cli.listing:list_command",
        "explain": "harness.cli.explain:explain",
        "new": "harness.cli.new:new_command",
        "show": "harness.cli.show:show_command",
    },
    "Compare": {},
    "Bugs and trainers": {},
    "Predict": {},
    "Install": {"constraints": "harness.cli.environments:constraints_command"},
    "Maintain": {
        "runs": "harness.cli.show:runs",
        "dev": "harness.cli.options:dev",
    },
}

_EPILOG = """\b
Examples:
  fp8-harness run smoke                      a quick check of this machine
  fp8-harness run pr -j 4 --junit junit.xml  the cases that gate pull requests
  fp8-harness explain tp4-rowwise-v2256-f32  describe a case and its rules
  fp8-harness compare v1 v2                  decide about a release
  fp8-harness new my.toml --tp 2 --steps 3   write a case of your own

\b
Exit codes: 0 good, 1 a case failed, 2 usage error or bad input, 3 nothing to
run, 4 infrastructure, 5 only `changed` results, 6 nothing compared, 130
interrupted.
"""


def _print_versions(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Print versions, folders and digests of the packages that a run depends on."""
    if not value:
        return
    from harness.engine.hardware import cpu_name
    from harness.sources import installed_source, installed_version

    for name, module in (("fp8-harness", "harness"), ("torch", "torch"), ("torchao", "torchao"), ("numpy", "numpy")):
        version, source = installed_version(name) or "not installed", installed_source(module)
        click.echo(f"{name} {version}" if source is None else f"{name} {version} {source.digest[:12]} {source.folder}")
    click.echo(f"cpu {cpu_name()}")
    ctx.exit()


@click.group(
    cls=LazyGroup, sections=_SECTIONS, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_versions, help="Print versions."
)
@run_options(AppOptions)
def app(**given: Any) -> None:
    """Correctness and regression tests for FP8 parallel training."""
    context = click.get_current_context()
    context.meta[SINCE], context.obj = context.obj, AppOptions(**given)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Errors are one line on stderr."""
    since_s = cpu_s() if arguments is not None else 0.0  # without them, this process is of the command alone
    try:
        code = app.main(args=arguments, prog_name="fp8-harness", standalone_mode=False, obj=since_s)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    except BrokenPipeError:
        # The reader of stdout (`head`) has exited; replace stdout so that Python does not fail again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except (click.ClickException, click.Abort, HarnessError, KeyboardInterrupt, OSError) as error:
        text, failure = _describe(error)
        click.echo(printable(f"fp8-harness: error: {' '.join(text.split())}"), err=True)
        return failure
    return code if isinstance(code, int) else ExitCode.GOOD


def _known_option(error: click.NoSuchOption) -> str:
    """Return what to say about an option that a command lacks: why it is out of scope, or its name here; else ""."""
    word = error.option_name.lstrip("-")
    if (outside := out_of_scope(word)) and not meanings(word):
        return f"{outside.text}."
    for option in options_of(AppOptions).values():
        if error.option_name in (option.flag, option.short) and error.ctx is not None:
            words = " ".join(filter(None, (error.option_name, option.metavar)))
            return f"Fix: give it before the command: {error.ctx.command_path.replace(' ', f' {words} ', 1)}."
    word = next((name for name, option in OTHERS.items() if option.short == error.option_name), word)
    axis, command = word.removeprefix("no-").replace("-", "_"), error.ctx.command if error.ctx else app
    axis = next(filter(AXES.__contains__, (axis, *meanings(word))), axis)
    flags = {flag for parameter in command.params for flag in parameter.opts}
    if "--set" in flags and axis in AXES:
        value = example(axis)
        told = said(axis, not word.startswith("no-") if isinstance(value, bool) else value)
        return f"Fix: give {told}: {axis}{allowed_values(axis)}."
    return f"Fix: give -o {word}=VALUE." if "-o" in flags and word in OTHERS else ""


def _describe(error: BaseException) -> tuple[str, ExitCode]:
    match error:
        case click.NoSuchOption(option_name=name) if known := _known_option(error):
            return f"no such option: {name}. {known}", ExitCode.USAGE
        case click.UsageError(ctx=context):
            path = context.command_path if context is not None else "fp8-harness"
            return f"{path}: {error.format_message()} Fix: see `{path} --help`.", ExitCode.USAGE
        case click.ClickException():
            return error.format_message(), ExitCode.USAGE
        case HarnessError():
            from harness.running.selection import NothingSelected
            from harness.studies.surviving import RanksFailed

            codes = {NothingSelected: ExitCode.NOTHING_RAN, RanksFailed: ExitCode.INFRA}
            code = next((code for kind, code in codes.items() if isinstance(error, kind)), ExitCode.USAGE)
            return error.text, code
        case OSError():
            return str(error), ExitCode.INFRA
        case _:
            return "interrupted.", ExitCode.INTERRUPTED
