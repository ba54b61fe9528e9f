"""`fp8-harness bug export`: a case that fails as one Python file for an issue, and the draft of the issue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from harness.cli.options import FILE, FOLDER, plan_parameter, quiet_option, root_option
from harness.cli.output import print_sections
from harness.durable import write_whole
from harness.running.plan import Plan

_EPILOG = """\b
Examples:
  fp8-harness bug export ao-1938
  fp8-harness bug shrink ao-1938 --json shrunk.json
  fp8-harness bug export CASE --shrunk shrunk.json --output for-the-issue
  torchrun --nproc-per-node 3 for-the-issue/CASE.py PATCH.py:FUNCTION

\b
The script needs torch and torchao only, and runs on GPUs or on a CPU.
It is run once here, to see that it shows the fault (--skip-proof: it is not).

\b
Exit codes: 0 exported, 1 exported but the script does not show the fault
here, 2 usage error, a case that does not fail, or a failure that no
script can tell, 130 interrupted.
"""


@click.command("export", epilog=_EPILOG)
@click.argument("case", metavar="CASE")
@click.option("--inject", metavar="FILE.py:FUNCTION", multiple=True, help="What makes the case fail. Repeatable.")
@click.option("--planted", is_flag=True, help="Plant the faults of the bug file, which bring it back.")
@click.option("--shrunk", metavar="FILE.json", type=FILE, help="The JSON of `bug shrink`.")
@click.option("--output", metavar="DIR", type=FOLDER, default=Path())
@click.option("--skip-proof", is_flag=True, help="Do not run the script once, to see that it shows the fault.")
@quiet_option
@plan_parameter
@root_option
def export_command(  # noqa: PLR0913  one parameter per option
    *,
    case: str,
    inject: tuple[str, ...],
    planted: bool,
    shrunk: Path | None,
    output: Path,
    skip_proof: bool,
    quiet: bool,
    plan_for: Callable[..., Plan],
    root: str | None,
) -> int:
    """Write one Python file that shows how CASE fails, and a draft of an issue.

    CASE is the id of a case, a file with one case, or the name of a bug file.
    """
    from harness.bugs.export import export, exported_case, proof_of, read_neighbours
    from harness.bugs.trials import injections_for, named_case, run_once
    from harness.project import find_project
    from harness.report.bugs import exported_sections, issue_markdown
    from harness.running.progress import open_progress
    from harness.sources import installed_version

    project = find_project(root)
    named = named_case(project, case)
    named = named._replace(case=exported_case(named.case))
    injections = injections_for(named, inject, planted=planted)
    neighbours = read_neighbours(shrunk) if shrunk is not None else ()
    plan = plan_for()
    with open_progress(quiet=quiet) as progress:
        result = run_once(project, plan, progress, named.case, injections)
    exported = export(named, result, injections, output)
    proof = None if skip_proof else proof_of(exported)
    versions = {each: installed_version(each) or "not installed" for each in ("torch", "torchao")}
    device = "CPU ranks" if plan.device == "cpu" else plan.hardware[0]
    text = issue_markdown(exported, proof, versions=versions, device=device, neighbours=neighbours)
    write_whole(exported.file.with_suffix(".md"), text.encode())
    print_sections(exported_sections(exported, proof))
    return int(proof is not None and proof.outcome != "FAULT")
