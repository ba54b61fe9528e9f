"""Runs in several environments, `run --env` and `compare --versions`; and `fp8-harness constraints`, their pins."""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from packaging.utils import canonicalize_name

from harness.cli.options import Command, before_command, compose_options, print_note, print_sections
from harness.errors import HarnessError
from harness.evidence.sealed import own_root
from harness.matrix.axes import suggestion
from harness.project import Project
from harness.report.runs import environments_sections
from harness.result import RunResult
from harness.running.environments import NamedEnvironment, Versions, python_over, run_in_environment
from harness.verdict import ExitCode

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_WORST_FIRST = (
    ExitCode.INTERRUPTED, ExitCode.FAILED, ExitCode.NOTHING_RAN, ExitCode.INFRA, ExitCode.CHANGED,
)  # fmt: skip


def run_in_environments(project: Project, given: Sequence[str], words: Sequence[str]) -> int:
    """`run` with these words in every environment of `--env NAME=PATH`."""
    folder = project.state / "environments"
    environments = [
        NamedEnvironment(name=name, python=python_over(path, folder), folder=path)
        for name, path in given_environments(given).items()
    ]
    runs = run_in_each(project, environments, words)
    print_sections(environments_sections(runs, decide=True))
    return exit_code_of(runs)


def versions_parameter(command: Command) -> Command:
    """Return where versions of a package come from, passed to the command as `versions_for`, which opens them."""

    @functools.wraps(command)
    def with_versions(*, index: str | None, environments: tuple[str, ...], **given: Any) -> Any:
        if index is not None and "://" not in index and not Path(index).is_dir():
            raise HarnessError("there is no such folder.", where=f"--index {index}", fix="give a folder, or a URL.")

        def versions_for(project: Project, package: str) -> Versions:
            folder, here = project.state / "versions", given_environments(environments)
            return Versions(package, folder, index, here, print_note)

        return command(versions_for=versions_for, **given)

    text = "Take versions from this package index, or from the wheels of this folder alone."
    one = "Use this virtual environment for that version. Repeatable."
    return compose_options(
        click.option("--index", metavar="URL|DIR", help=text),
        click.option("--env", "environments", metavar="VERSION=VENV", multiple=True, help=one),
    )(with_versions)


def given_environments(given: Sequence[str]) -> dict[str, Path]:
    """Return the virtual environments of `--env NAME=PATH` by name."""
    named: dict[str, Path] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not _NAME.fullmatch(name) or not path:
            raise HarnessError("this is not NAME=PATH.", where=f"--env {text}", fix="write --env new=path/to/venv.")
        if name in named:
            raise HarnessError("two environments have one name.", where="--env", fix="give each a different name.")
        named[name] = Path(path)
    return named


def run_in_each(
    project: Project, environments: Sequence[NamedEnvironment], words: Sequence[str]
) -> dict[str, RunResult]:
    """The results by environment name. Environments run one after another: in parallel they would slow each other."""
    folder = project.state / "environments"
    folder.mkdir(parents=True, exist_ok=True)
    runs = {}
    for environment in environments:
        print_note(environment.name)
        runs[environment.name] = run_in_environment(environment, words, folder, given=before_command())
        if runs[environment.name].end.interrupted:
            raise KeyboardInterrupt
    return runs


def exit_code_of(runs: Mapping[str, RunResult]) -> int:
    codes = {run.exit_code for run in runs.values()}
    return next((int(code) for code in _WORST_FIRST if code in codes), 0)


def given_words(wanted: Collection[str]) -> list[str]:
    """Return the words of this command line as click read them, of these parameters."""
    context = click.get_current_context()
    words: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in wanted and source is not None and source.name == "COMMANDLINE":
            words = [*words, *_words(parameter, context.params[name])]
    return words


def _words(parameter: click.Parameter, value: object) -> list[str]:
    values = [str(element) for element in value] if isinstance(value, tuple) else [str(value)]
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return [parameter.opts[-1]]
    if isinstance(parameter, click.Option):
        return [word for text in values for word in (parameter.opts[-1], text)]
    return values


def refuse_with_env(given: Mapping[str, object]) -> None:
    """HarnessError for an option that is of one run."""
    for name, value in given.items():
        if value:
            fix = "leave it out: each run is stored under the name of its environment."
            raise HarnessError("it is of one run, and --env makes several.", where=name, fix=fix)


_EPILOG = """\b
Examples:
  fp8-harness constraints > c.txt && pip install -c c.txt 'fp8-harness[train]'
  fp8-harness constraints --for torch-2.15 > c.txt
"""


@click.command("constraints", epilog=_EPILOG)
@click.option("--for", "variant", metavar="NAME", help="Pins for other versions, such as torch-2.15 or transformers.")
def constraints_command(*, variant: str | None) -> None:
    """Print the versions verified together, for `pip install -c`."""
    click.echo(constraints(own_root() / "ci", variant), nl=False)


def constraints(folder: Path, variant: str | None) -> str:
    """Return the pins of `constraints.txt` in a folder; those of `constraints-<variant>.txt` replace them by package.

    Raises HarnessError if the folder has no such variant.
    """
    variants = {path.stem.partition("-")[2]: path for path in sorted(folder.glob("constraints-*.txt"))}
    if variant is not None and variant not in variants:
        fix = suggestion(variant, tuple(variants))
        raise HarnessError("no versions of this name were verified.", where=f"--for {variant}", fix=fix)
    pins = _pins(folder / "constraints.txt") | (_pins(variants[variant]) if variant is not None else {})
    named = "" if variant is None else f" --for {variant}"
    return "".join(f"{line}\n" for line in (f"# fp8-harness constraints{named}", *pins.values()))


def _pins(path: Path) -> dict[str, str]:
    """By the canonical name of the package, the line that pins it."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return {canonicalize_name(line.partition("==")[0]): line for line in lines if line and not line.startswith("#")}
