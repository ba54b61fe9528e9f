"""Golden files of torchtitan: judged by one another, and made of goldens and runs of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from harness.cli.options import print_report, print_sections, project_parameter, write_output
from harness.errors import HarnessError
from harness.evidence.curve import TextCurve, curve_of_case, curve_of_golden, golden_of, read_curve, text_of_curve
from harness.evidence.golden import load_golden, replaced, write_golden
from harness.matrix.caseid import family_case
from harness.project import Project
from harness.report.curves import curve_sections
from harness.report.evidence import golden_section
from harness.report.sections import markdown
from harness.running.stored import results_of
from harness.studies.curves import judge_each
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness baseline convert tiny-v2048-s5-gb8-sl32-lr0.001-seed0 --output golden.txt
  fp8-harness baseline convert golden.txt
  fp8-harness baseline convert tp2-rowwise-v2048-b16 > tp2.txt    as the last run trained it
"""


def refuse_a_run(*given: object) -> None:
    """Several files are judged by one another: HarnessError for anything that is about a run."""
    if any(given):
        what = "several files are judged by one another, and nothing runs."
        raise HarnessError(what, where="--golden", fix="give one file with a case or layouts, or files alone.")


def judge_files(files: Sequence[Path], json_file: Path | None, markdown_file: Path | None) -> ExitCode:
    rows = judge_each([read_curve(path) for path in files])
    print_report(curve_sections(rows), json_file, rows)
    write_output(markdown_file, lambda: markdown(curve_sections(rows)).encode())
    return ExitCode.FAILED if any(row.word == "wrong" for row in rows) else ExitCode.GOOD


@click.command("convert", epilog=_EPILOG)
@click.argument("source", metavar="FAMILY|CASE-ID|FILE")
@click.option("--hardware", "hardware_name", default="cpu", show_default=True, help="Hardware class of the golden.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE|-",
    help="Where to write the text. Default: stdout.",
)
@project_parameter
def convert_command(*, source: str, hardware_name: str, output: Path | None, project: Project) -> int:
    """Write a golden, or a case of the last run, as a golden file of torchtitan; or store such a file as the golden.

    Only a file that was written from a golden can become one again: others do not say their case, data and commit.
    """
    if Path(source).is_file():
        _store(project, Path(source))
        return ExitCode.GOOD
    if family_case(source) is not None:
        curve = curve_of_golden(load_golden(project.root, hardware_name, source))
    else:
        curve = _curve_of_run(project, source)
    write_output(output or Path("-"), lambda: text_of_curve(curve).encode())
    return ExitCode.GOOD


def _store(project: Project, path: Path) -> None:
    project.check_writable()
    change = replaced(project.root, golden_of(read_curve(path), where=str(path)))
    print_sections([golden_section(change, project.root)])
    click.echo(f"  stored in {write_golden(project.root, change.new)}")


def _curve_of_run(project: Project, name: str) -> TextCurve:
    found = [each for each in results_of(project, "last").results if each.case_id == name and each.losses]
    if not found:
        fix = "give a file that is there, a family of `baseline show`, or a case that the last run trained."
        raise HarnessError(
            "neither a file, a stored golden, nor a case of the last run with losses.", where=name, fix=fix
        )
    return curve_of_case(name, found[0].losses, found[0].grad_norms)
