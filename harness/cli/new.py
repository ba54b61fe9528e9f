"""`fp8-harness new`; and axes on any command line, the everyday ones as options, all by `--set`."""

import functools
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import click

from harness.cli.options import AT_LEAST_1, FILE, Command, SectionedCommand, compose_options, run_option
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.hints import explain_case, run_cases
from harness.jsonform import compact
from harness.matrix import axes as matrix_axes
from harness.matrix.case import Case
from harness.matrix.casefile import FILE_NAME, case_file_schema, write_case
from harness.matrix.caseid import case_id
from harness.matrix.rules import changes, exclusions, expected_refusal
from harness.registry import answer

_WIDE = 50  # values that do not stand beside the name of their option


def axes_parameter(*, without: Mapping[str, str] | None = None, defaults: bool = True) -> Callable[[Command], Command]:
    """Return the decorator for `--tp 2 … --set AXIS=VALUE`, passed to the command as one parameter `axes`, by name.

    `without`: why this command does not take an axis. `defaults`: help names those of axes.
    """
    refused = without or {}
    names = [name for name, axis in matrix_axes.DECLARED.items() if axis.everyday and name not in refused]

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def with_axes(*, axes: tuple[str, ...], **given: Any) -> Any:
            options = {name: value for name in names if (value := given.pop(name)) is not None}
            values = matrix_axes.read_assignments(axes, option="--set")
            for name in values:
                if name in options or name in refused:
                    why = refused.get(name) or f"{matrix_axes.said(name, options[name])} says it"
                    raise HarnessError(f"{why}.", where=f"--set {name}", fix="leave it out.")
            return command(axes=options | values, **given)

        every = run_option("axes", "Give any axis a value; a file of `new` lists them. Repeatable.")
        return compose_options(*(_axis_option(name, defaults=defaults) for name in names), every)(with_axes)

    return decorated


def _axis_option(name: str, *, defaults: bool) -> Callable[[Command], Command]:
    known, meaning = [str(choice) for choice in matrix_axes.choices(name)], matrix_axes.DECLARED[name].meaning
    default = matrix_axes.shown_value(matrix_axes.axis_values(Case())[name])
    text = f"{meaning}. Default: {default}." if defaults else f"{meaning}."
    form: dict[str, Any] = {"type": click.Choice(known) if known else matrix_axes.axis_type(name)}
    if len("|".join(known)) > _WIDE:
        form |= {"metavar": name.upper()}
        text += f" One of {', '.join(known)}."
    return click.option(matrix_axes.option_of(name), name, help=text, **form)


def checked_case(axes: Mapping[str, object], *, where: str) -> Case:
    """Return the case of these axes; HarnessError with the axes to change, for one that no file may have."""
    case, ignored = matrix_axes.case_from_axes(axes), matrix_axes.ignored_axes(axes)
    if ignored:
        what = f"this case ignores {' or '.join(ignored)}."
        raise HarnessError(what, where=where, fix="leave it out, or change the axis that disables it.")
    require_allowed(case, axes, where=where)
    return case


def require_allowed(case: Case, axes: Collection[str], *, where: str) -> None:
    """Raise HarnessError with the axes to change, of `axes` where one of them is to blame, for an excluded case."""
    for rule in exclusions(case):
        changed = [name for name in rule.axes if name in axes] or rule.axes
        what = f"rule {rule.name} excludes {case_id(case)}: {rule.reason}."
        raise HarnessError(what, where=where, fix=f"change {changes(changed, matrix_axes.own_axes(case))}.")


_EPILOG = """\b
Examples:
  fp8-harness new my.toml --tp 2 --recipe rowwise --set dim=512 \\
      --set filter_fqns=wq,wk
  fp8-harness new ours.toml --from llama3_8b.toml --ranks 64
  fp8-harness new ours.toml \\
      --from "--parallelism.tensor_parallel_degree 2 --compile.enable" \\
      --dp-shard 2

\b
--from reads what `bug import` reads, with the same result: TOML, YAML, JSON,
Python or flags of torchtitan, torchao, accelerate, transformers, axolotl,
AutoModel, torchtune or Megatron-LM. Degrees and sizes are reduced, but keep
what FP8 bugs depend on. Differences from the job are listed.
Nothing is executed. Questions are answered by options.
"""
_SCHEMA = Path(__file__).parents[1] / "schemas" / FILE_NAME


@click.command("new", cls=SectionedCommand, epilog=_EPILOG)
@click.argument("file", metavar="[FILE.toml]", required=False, type=FILE)
@click.option("--from", "config", metavar="CONFIG", help="Start from a configuration file, or from these flags.")
@click.option("--ranks", type=AT_LEAST_1, help="World size of the job of --from, if FSDP2 takes what remains.")
@click.option("--ignore", metavar="NAME", multiple=True, help="A line of --from to ignore. Repeatable.")
@axes_parameter()
@click.option("--id", "as_id", is_flag=True, help="Print the id of the case; write nothing.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of case files; write nothing.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
def new_command(  # noqa: PLR0913  one parameter per option
    *,
    file: Path | None,
    config: str | None,
    ranks: int | None,
    ignore: tuple[str, ...],
    as_id: bool,
    schema: bool,
    force: bool,
    axes: dict[str, object],
) -> None:
    """Write a case file; `--set AXIS=VALUE` sets any axis.

    With --from, axes that are given replace those of the configuration.
    """
    if schema:
        click.echo(compact(case_file_schema()))
        return
    notes: tuple[str, ...] = ()
    if config is None:
        case = checked_case(axes, where="new")
    else:
        case_of = answer("configurations", where="new --from")
        case, notes = case_of(config, axes, ranks=ranks, ignore=ignore)
    if as_id:
        click.echo(case_id(case))
        return
    if file is None:
        raise HarnessError("there is no file to write to.", where="new", fix="give FILE.toml, or --id.")
    command = write_new_case(file, case, force=force)
    click.echo(f"{file}: {case_id(case)}")
    for note in notes:
        click.echo(f"  {note}")
    refusal = expected_refusal(case)
    if refusal is not None:
        click.echo(f"expected error: {refusal.reason}")
    click.echo(f"what it needs: {explain_case(case_id(case))}")
    click.echo(f"run it:        {command}")


def write_new_case(file: Path, case: Case, *, force: bool) -> str:
    """Write a commented file of this case. Returns the command that runs it; HarnessError for a file that exists."""
    if file.suffix != ".toml":
        raise HarnessError("there is no file to write to.", where=str(file), fix="give FILE.toml.")
    if file.exists() and not force:
        raise HarnessError("this file exists.", where=str(file), fix="name another one, or give --force.")
    command = run_cases(str(file))
    # An editor finds the schema by a path that is right on every machine, which only a file of the checkout can have.
    folder, checkout = file.resolve().parent, _SCHEMA.parents[2]
    schema = os.path.relpath(_SCHEMA, folder) if folder.is_relative_to(checkout) else None
    write_whole(file, write_case(case, schema=schema, command=command).encode())
    return command
