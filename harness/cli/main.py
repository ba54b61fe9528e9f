"""The `fp8-harness` command: its subcommands, error messages and exit codes.

A subcommand is imported when it is called, so that `list` does not import what only `run` needs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from harness.errors import HarnessError
from harness.matrix.scope import out_of_scope
from harness.verdict import ExitCode

_COMMANDS = {
    "list": "harness.cli.listing:list_command",
    "explain": "harness.cli.explain:explain",
    "new": "harness.cli.new:new_command",
    "coverage": "harness.cli.coverage:coverage_command",
    "run": "harness.cli.run:run_command",
    "predict": "harness.cli.predict:predict",
    "report": "harness.cli.report:report_command",
    "show": "harness.cli.show:show_command",
    "results": "harness.cli.results:results",
    "history": "harness.cli.history:history_command",
    "golden": "harness.cli.golden:golden",
    "signature": "harness.cli.signature:signature",
    "tolerance": "harness.cli.tolerance:tolerance",
    "conformance": "harness.cli.conformance:conformance_command",
    "evidence": "harness.cli.evidence:evidence",
    "power": "harness.cli.power:power_command",
    "target": "harness.cli.target:target",
    "bug": "harness.cli.bug:bug",
    "tier": "harness.cli.tier:tier",
    "gate": "harness.cli.gate:gate_command",
    "diff": "harness.cli.diff:diff_command",
    "cache": "harness.cli.cache:cache",
    "version": "harness.cli.version:version_command",
}

_EPILOG = """\b
Examples:
  fp8-harness run smoke                       a quick check of this machine
  fp8-harness run pr -j 4 --junit junit.xml   the cases that gate pull requests
  fp8-harness explain tp4-rowwise-v2256-f32   describe a case and its rules
  fp8-harness gate --baseline v1 --candidate v2   decide about a release
  fp8-harness new my.toml --tp 2 --dim 512    write a case of your own

\b
Exit codes: 0 good, 1 a case failed, 2 usage error or bad input, 3 nothing to run,
4 infrastructure, 5 nothing worse than `changed`, 130 interrupted.
"""


class _LazyGroup(click.Group):
    """A group that imports a command when it is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
def app() -> None:
    """Correctness and regression tests for FP8 parallel training."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Errors are one line on stderr."""
    try:
        code = app.main(args=arguments, prog_name="fp8-harness", standalone_mode=False)
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
        click.echo(f"fp8-harness: error: {' '.join(text.split())}", err=True)
        return failure
    return code if isinstance(code, int) else ExitCode.GOOD


def _describe(error: BaseException) -> tuple[str, ExitCode]:
    """The error message and the exit code."""
    match error:
        case click.NoSuchOption(option_name=name) if outside := out_of_scope(name.lstrip("-")):
            return f"no such option: {name}. {outside.text}.", ExitCode.USAGE
        case click.UsageError(ctx=context):
            path = context.command_path if context is not None else "fp8-harness"
            return f"{path}: {error.format_message()} Fix: see `{path} --help`.", ExitCode.USAGE
        case click.ClickException():
            return error.format_message(), ExitCode.USAGE
        case HarnessError():
            return error.text, _code(error)
        case OSError():
            return str(error), ExitCode.INFRA
        case _:
            return "interrupted.", ExitCode.INTERRUPTED


def _code(error: HarnessError) -> ExitCode:
    from harness.gate.gate import NothingCompared
    from harness.running.selection import NothingSelected

    return ExitCode.NOTHING_RAN if isinstance(error, NothingSelected | NothingCompared) else ExitCode.USAGE
