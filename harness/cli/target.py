"""`fp8-harness target check` and `fp8-harness target import-config`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from harness.cli.new import write_new_case
from harness.cli.options import AT_LEAST_1, OUTPUT, json_option, plan_parameter, quiet_option, root_option, write_output
from harness.errors import HarnessError
from harness.matrix.axes import choices
from harness.matrix.targets import MODULES, NAME
from harness.running.plan import Plan

_CHECK_EPILOG = """\b
Examples:
  fp8-harness target check my_pkg.my_target
  fp8-harness target check my_target --recipe rowwise
  fp8-harness target check my_target --layout fsdp2 --layout tp4
  fp8-harness target check my_target --case my.toml
  fp8-harness target check my_target --json - | jq .problems

\b
Exit codes: 0 it works, 1 something to fix, 2 usage error or bad
input, 130 interrupted.
"""


_IMPORT_EPILOG = """\b
Examples:
  fp8-harness target import-config llama3_8b.toml --ranks 64
  fp8-harness target import-config llama3_8b.toml --output cases/ours.toml
  fp8-harness target import-config --parallelism.tensor_parallel_degree 2 --compile.enable

\b
Exit codes: 0 there is a case, 2 usage error, or no case has what is asked.
"""


@click.group(
    epilog="\b\nExamples:\n  fp8-harness target check my_pkg.my_target\n"
    "  fp8-harness target import-config llama3_8b.toml"
)
def target() -> None:
    """Check your own training code, or turn a torchtitan job into a case."""


@target.command("check", epilog=_CHECK_EPILOG)
@click.argument("module")
@click.option(
    "--recipe",
    type=click.Choice([str(each) for each in choices("recipe") if each != "bf16"]),
    help="The FP8 recipe. Default: that of the case, or tensorwise.",
)
@click.option(
    "--layout",
    "layouts",
    metavar="WORDS",
    multiple=True,
    help="A layout as in case ids: fsdp2, tp2, fsdp2-tp2, hsdp2x2. Repeatable. Default: fsdp2, tp2 and hsdp2x2.",
)
@click.option("--case", "given", metavar="ID|FILE", help="Take model, training and options from this case.")
@json_option("the answer")
@quiet_option
@plan_parameter
@root_option
def check_command(  # noqa: PLR0913  one parameter per option
    *,
    module: str,
    recipe: Any,
    layouts: tuple[str, ...],
    given: str | None,
    json_file: Path | None,
    quiet: bool,
    plan_for: Callable[..., Plan],
    root: str | None,
) -> int:
    """Check whether the target MODULE works, what can be judged of it, and how to fix what does not work.

    MODULE is the dotted name of a module with `build(case, world)`, or the name of a built-in target. It is trained for
    a few steps on one rank, with FSDP2, TP and HSDP, in BF16 and in FP8; a run may take 60 s.
    """
    import msgspec

    from harness.project import find_project
    from harness.report.target import target_exit_code, target_json, target_text
    from harness.running.progress import open_progress
    from harness.running.selection import one_case
    from harness.studies.target_check import CheckOptions, check_target, parse_layout

    if not NAME.fullmatch(module):
        fix = f"give the dotted name of a module, not its path, or one of {', '.join(MODULES)}."
        raise HarnessError("not the name of a target.", where=module, fix=fix)
    project = find_project(root)
    base = None if given is None else one_case(project, given)
    options = CheckOptions(target=module, recipe=recipe, layouts=tuple(map(parse_layout, layouts)), base=base)
    plan = msgspec.structs.replace(plan_for(), root_option=root)
    with open_progress(quiet=quiet) as progress:
        report = check_target(project, options, plan, progress)
    click.echo(target_text(report), nl=False, err=str(json_file) == "-")
    write_output(json_file, lambda: target_json(report))
    return target_exit_code(report)


@target.command("import-config", epilog=_IMPORT_EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("words", metavar="FILE.toml|--FLAGS…", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--ranks", type=AT_LEAST_1, help="Ranks of the job, if FSDP2 takes all that remain.")
@click.option("--output", metavar="FILE.toml", type=OUTPUT, help="Write a case file.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
def import_command(*, words: tuple[str, ...], ranks: int | None, output: Path | None, force: bool) -> None:
    """Convert a torchtitan job, a TOML file or flags, to a case. The model is small; other differences are listed."""
    from harness.matrix.caseid import case_id
    from harness.matrix.job_config import import_flags, import_toml

    if words[0].lstrip().startswith("--"):
        found = import_flags(" ".join(words), where="flags", ranks=ranks)
    elif len(words) == 1:
        found = import_toml(_text_of(words[0]), where=words[0], ranks=ranks)
    else:
        raise HarnessError("more than one file.", where=" ".join(words), fix="give one file, or flags alone.")
    if output is not None:
        write_new_case(output, found.case, force=force)
    click.echo(case_id(found.case))
    for note in found.notes:
        click.echo(f"  {note}")
    command = ["run", "--case", case_id(found.case)] if output is None else ["run", str(output)]
    click.echo(f"run it: {shlex.join(['fp8-harness', *command])}")


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        fix = "give a TOML file of torchtitan, or its flags: --section.option value …"
        raise HarnessError(f"cannot be read: {error.strerror}.", where=path, fix=fix) from error
    except UnicodeDecodeError as error:
        raise HarnessError("not a text file.", where=path, fix="give a TOML file of torchtitan.") from error
