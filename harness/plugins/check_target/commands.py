"""`fp8-harness check-target`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from harness.cli.options import json_option, plan_parameter, print_report, project_parameter, quiet_option
from harness.errors import HarnessError
from harness.matrix.axes import choices
from harness.matrix.caseid import parse_layout
from harness.plugins.check_target.sections import target_document, target_exit_code, target_sections
from harness.plugins.check_target.target_check import CheckOptions, check_target
from harness.project import Project
from harness.registry import TARGET_NAME, targets
from harness.running.plan import Plan
from harness.running.progress import open_progress
from harness.running.selection import one_case

_EPILOG = """\b
Examples:
  fp8-harness check-target my_pkg.my_target --recipe rowwise
  fp8-harness check-target my_target --layout fsdp2 --layout tp4

\b
Exit codes: 0 it works, 1 something to fix, 3 it refuses every layout, 4 the
machine failed.
"""


_RECIPES = [str(recipe) for recipe in choices("recipe") if recipe != "bf16"]


@click.command("check-target", epilog=_EPILOG)
@click.argument("module")
@click.argument("given", metavar="[CASE-ID|FILE]", required=False)
@click.option(
    "--recipe",
    metavar="RECIPE",
    type=click.Choice(_RECIPES),
    help=f"The FP8 recipe: {', '.join(_RECIPES)}. Default: the case's, or tensorwise.",
)
@click.option(
    "--layout",
    "layouts",
    metavar="WORDS",
    multiple=True,
    help="A layout as in case ids: fsdp2, tp2, fsdp2-tp2, hsdp2x2. Repeatable. Default: fsdp2, tp2 and hsdp2x2.",
)
@json_option("the answer")
@quiet_option
@plan_parameter
@project_parameter
def check_target_command(  # noqa: PLR0913  one parameter per option
    *,
    module: str,
    given: str | None,
    recipe: Any,
    layouts: tuple[str, ...],
    json_file: Path | None,
    quiet: bool,
    plan_for: Callable[..., Plan],
    project: Project,
) -> int:
    """Check whether a target works, and say how to fix it.

    MODULE is the dotted name of a module with `build(case, world)`, or the name of a built-in target. It is trained for
    a few steps on one rank, with FSDP2, TP and HSDP, in BF16 and in FP8; a run may take 60 s. A case, by its id or
    file, gives model, training and options.
    """
    if not TARGET_NAME.fullmatch(module):
        fix = f"give the dotted name of a module, not its path, or one of {', '.join(targets())}."
        raise HarnessError("not the name of a target.", where=module, fix=fix)
    base = None if given is None else one_case(project, given)
    options = CheckOptions(target=module, recipe=recipe, layouts=tuple(map(parse_layout, layouts)), base=base)
    with open_progress(quiet=quiet) as progress:
        report = check_target(project, options, plan_for(), progress)
    print_report(target_sections(report), json_file, target_document(report))
    return target_exit_code(report)
