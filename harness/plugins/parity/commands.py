"""`fp8-harness parity`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from harness.cli import options
from harness.cli.axes import axes_parameter
from harness.cli.environments import given_words
from harness.errors import HarnessError
from harness.evidence.curve import read_curve
from harness.matrix.axes import own_values
from harness.matrix.caseid import parse_layout
from harness.matrix.layout import MESH_AXES
from harness.plugins.parity.against import Against
from harness.plugins.parity.curves import check_job, judge_each
from harness.plugins.parity.layouts import BUDGET_S, USUAL, cases_of, compare_layouts, usual_layouts, with_golden
from harness.plugins.parity.sections import curve_sections, parity_junit, parity_markdown, parity_page, parity_sections
from harness.project import Project
from harness.report.sections import markdown
from harness.run_options import CommandOptions
from harness.running.plan import Plan, with_command
from harness.running.progress import open_progress
from harness.running.selection import one_case
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness parity --layouts single,fsdp2,tp2
  fp8-harness parity --target my_pkg.my_target --recipe tensorwise \\
      --markdown table.md
  fp8-harness parity --target my_pkg.my_target \\
      --against "$(git merge-base origin/main HEAD)"
  fp8-harness parity fsdp4-rowwise-v2048-b16 \\
      --layouts fsdp4,tp2,fsdp2-tp2,hsdp2x2 --inject fix.py:apply

\b
Without a case: the tiny model, rowwise, bfloat16. The run is stored: `show
last` has its details.
Exit codes: 0 every layout is equal or within rounding, 1 one is wrong, 3
nothing ran, 4 infrastructure.
"""
_AGAINST = "Run the same in another place, as base: a git revision of the target's repository, a release, or a venv."
_OF_THE_BASE = ("jobs", "slots", "quiet")
_OF_LAYOUTS = dict.fromkeys((*MESH_AXES, "async_tp"), "--layouts says it")


@click.command("parity", epilog=_EPILOG)
@click.argument("named", metavar="[CASE-ID|FILE]", required=False)
@click.option(
    "--layouts",
    "asked",
    metavar="WORDS,…",
    help="Layouts as in case ids: single,fsdp4,tp2,fsdp2-tp2,hsdp2x2. Default: all meshes of 1, 2, 4, 8, … ranks.",
)
@click.option(
    "--golden",
    "goldens",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="Judge a golden file or log of torchtitan by the layouts; several by one another, and nothing runs.",
)
@options.run_option(
    "budget_s", f"The cheapest layouts that fit; the others are named. Default: {BUDGET_S:g} without --layouts."
)
@click.option("--against", metavar="REV|PACKAGE==VERSION|VENV", help=_AGAINST)
@options.run_option("inject")
@options.json_option("the table")
@options.run_option("markdown_file", "Write the table as markdown.")
@options.run_option("junit_file", "Write JUnit XML; a layout that the target itself refuses is skipped.")
@options.run_option("html_file")
@options.quiet_option
@axes_parameter(without=_OF_LAYOUTS, defaults=False)
@options.plan_parameter
@options.project_parameter
def parity_command(  # noqa: PLR0913  one parameter per option
    *,
    named: str | None,
    asked: str | None,
    goldens: tuple[Path, ...],
    budget_s: float | None,
    against: str | None,
    inject: tuple[str, ...],
    json_file: Path | None,
    markdown_file: Path | None,
    junit_file: Path | None,
    html_file: Path | None,
    quiet: bool,
    plan_for: Callable[..., Plan],
    project: Project,
    axes: dict[str, object],
) -> int:
    """Compare layouts with one rank: losses, gradient norms, and a word each.

    One table, a row per layout: `equal` bits, `rounding`, `wrong` and what is wrong first, `refused` or `excluded`.
    """
    if len(goldens) > 1:
        if any((named, asked, axes, inject, html_file, junit_file)):
            what = "several files are judged by one another, and nothing runs."
            fix = "give one file with a case or layouts, or files alone."
            raise HarnessError(what, where="--golden", fix=fix)
        return _judge_files(goldens, json_file, markdown_file)
    golden = read_curve(goldens[0]) if goldens else None
    usual = USUAL if golden is None or golden.case is None else own_values(golden.case)
    base = {**(usual if named is None else own_values(one_case(project, named))), **axes}
    plan = plan_for(inject=inject)
    plan = with_command(plan, options.given_run_options(), CommandOptions(root=plan.root_option))
    if asked is None and plan.capacity.total == 1:  # one GPU has one layout
        plan = plan.on_cpu
    if asked is None:
        layouts, budget_s = tuple(usual_layouts(plan.capacity.largest)), budget_s or BUDGET_S
    else:
        layouts = tuple(parse_layout(text, option="--layouts") for text in asked.split(","))
    cases = cases_of(base, layouts, axes)
    plan = plan.common(cases)
    if golden is not None:
        check_job(golden, cases[0])
    with open_progress(quiet=quiet) as progress:
        place = None
        if against is not None:
            place = Against(against, project, plan, progress.note, words=tuple(given_words(_OF_THE_BASE)))
        parity, result = compare_layouts(project, cases, plan, progress, budget_s=budget_s, against=place)
    if golden is not None:
        parity = with_golden(parity, golden)
    options.print_report(parity_sections(parity, result), json_file, parity)
    options.write_output(markdown_file, lambda: parity_markdown(parity, result).encode())
    options.write_output(junit_file, lambda: parity_junit(parity, result))
    options.write_output(html_file, lambda: parity_page(parity, result))
    return parity.exit_code


def _judge_files(files: Sequence[Path], json_file: Path | None, markdown_file: Path | None) -> ExitCode:
    rows = judge_each([read_curve(path) for path in files])
    options.print_report(curve_sections(rows), json_file, rows)
    options.write_output(markdown_file, lambda: markdown(curve_sections(rows)).encode())
    return ExitCode.FAILED if any(row.word == "wrong" for row in rows) else ExitCode.GOOD
