"""`fp8-harness gate`."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli import options
from harness.cli.output import print_sections
from harness.errors import HarnessError
from harness.verdict import ExitCode

if TYPE_CHECKING:
    from harness.gate.cases import Goldens
    from harness.gate.gate import Gate
    from harness.gate.reason import Allowance
    from harness.project import Project
    from harness.result import RunResult
    from harness.running.versions import Versions

_EPILOG = """\b
Examples:
  fp8-harness gate --baseline last~1 --candidate last
  fp8-harness gate --baseline v1 --candidate v2 --required cases/required.toml
  fp8-harness gate --baseline v1.json --candidate v2.json --json - | jq .go
  fp8-harness gate --baseline v1 --candidate v2 --allow 'wire=two gathers became one'
  fp8-harness gate --baseline v1 --candidate v2 --html gate.html
  fp8-harness gate --matrix torchao=0.17.0,0.18.0 pr --select tp=2 -j 4
  fp8-harness gate --matrix torch=2.13.0,2.15.0 pr
  fp8-harness gate --matrix torch=2.15.0,nightly --env nightly=.venv-nightly pr

\b
A and B are a name of `run --name`, "last", "last~2", a file of `run --json`,
or a folder of such files, the shards of one run.
Cases in cases/quarantine.toml do not gate. Environments of --matrix are made
in the state folder and kept; torch comes with its libraries, 5 GB with CUDA.

\b
Exit codes: 0 GO, 1 NO-GO, 2 usage or bad input, 3 nothing to compare.
"""

_OF_THE_RUNS = ("sources", "expressions", "jobs", "timeout_s")
_OF_THE_VERSIONS = ("environments", "index_url", "find_links")
_Sides = tuple[tuple[str, str], "tuple[RunResult, RunResult]"]  # names and results


@click.command("gate", epilog=_EPILOG)
@click.argument("sources", metavar="[TIER|FILE]...", nargs=-1)
@click.option("--baseline", metavar="A", help="The results to compare with.")
@click.option("--candidate", metavar="B", help="The results to decide about.")
@click.option("--matrix", metavar="PACKAGE=V1,V2", help="Run the tiers with each version; gate the last against V1.")
@click.option(
    "--required",
    metavar="FILE",
    type=options.FILE,
    help="The cases that the candidate must have passed, and how recently.",
)
@click.option("--allow", "allowed", metavar="KIND=WHY", multiple=True, help="Accept a kind of change. Repeatable.")
@click.option("--strict", is_flag=True, help="Cases that failed before gate too.")
@click.option("--gate-times", is_flag=True, help="A slower candidate gates on a CPU too.")
@options.versions_parameter
@options.json_option("the answer")
@click.option("--markdown", "markdown_file", metavar="FILE", type=options.OUTPUT, help="Write the answer as markdown.")
@options.run_option("html_file")
@options.run_option("expressions")
@options.run_option("jobs")
@options.run_option("timeout_s")
@options.root_option
def gate_command(  # noqa: PLR0913  one parameter an option
    *,
    baseline: str | None,
    candidate: str | None,
    matrix: str | None,
    required: Path | None,
    allowed: tuple[str, ...],
    strict: bool,
    gate_times: bool,
    versions_for: Callable[..., Versions],
    json_file: Path | None,
    markdown_file: Path | None,
    html_file: Path | None,
    root: str | None,
    **_of_the_runs: object,
) -> int:
    """Say GO or NO-GO: is the candidate B as good as the baseline A? Lists every reason, most severe first.

    With --matrix the tiers are run, and --select, -j and --timeout-s are as in `run`.
    """
    from harness.cli.environments import given_words
    from harness.gate.gate import GatePolicy, gate
    from harness.matrix.known import known_with_shipped
    from harness.matrix.records import read_quarantine, read_required
    from harness.project import find_project
    from harness.report.gate import gate_markdown, gate_sections

    project = find_project(root)
    terms = GatePolicy(
        now=datetime.datetime.now(datetime.UTC),
        required=read_required(required) if required is not None else (),
        quarantine=read_quarantine(project.quarantine),
        allowed=tuple(map(_allowance, allowed)),
        strict=strict,
        gate_times=gate_times,
        faults=known_with_shipped(project.known, project.shipped_known),
    )
    if matrix is not None and (baseline is not None or candidate is not None):
        what = "the first and the last version are compared."
        raise HarnessError(what, where="--matrix", fix="leave out --baseline and --candidate.")
    names, (before, after) = (
        _stored(project, baseline, candidate) if matrix is None else _of_matrix(project, matrix, versions_for, root)
    )
    words = given_words(_OF_THE_VERSIONS)
    found = gate(before, after, terms, names=names, goldens=_goldens(project, after), words=words)
    print_sections(gate_sections(found), err=str(json_file) == "-")
    options.write_json(json_file, found)
    options.write_output(markdown_file, lambda: gate_markdown(found).encode())
    options.write_output(html_file, lambda: _page(project, found, after))
    return ExitCode.GOOD if found.go else ExitCode.FAILED


def _page(project: Project, found: Gate, candidate: RunResult) -> bytes:
    from harness.cli.report import page_of
    from harness.report.gate import gate_front

    return page_of(project, candidate, front=gate_front(found, candidate))


def _stored(project: Project, baseline: str | None, candidate: str | None) -> _Sides:
    """The names and the results of two sides that are stored."""
    from harness.cli.environments import given_words
    from harness.running.stored import results_of

    if baseline is None or candidate is None:
        raise click.UsageError("--baseline and --candidate are needed, or --matrix.")
    if given_words((*_OF_THE_RUNS, *_OF_THE_VERSIONS)):
        options_of_matrix = "--select, -j, --timeout-s, --env, --index-url and --find-links"
        raise click.UsageError(f"tiers, {options_of_matrix} are of the runs that --matrix makes.")
    return (baseline, candidate), (results_of(project, baseline), results_of(project, candidate))


def _of_matrix(project: Project, matrix: str, versions_for: Callable[..., Versions], root: str | None) -> _Sides:
    """The first and the last version of a package, after the tiers were run with every one."""
    from harness.cli.environments import given_words, run_in_each, versions_of
    from harness.report.runs import environments_sections

    words = [*given_words(_OF_THE_RUNS), *(() if root is None else ("--root", root))]
    runs = run_in_each(project, versions_of(project, matrix, versions_for), words)
    print_sections(environments_sections(runs), err=True)
    first, *_, last = runs
    return (first, last), (runs[first], runs[last])


def _allowance(text: str) -> Allowance:
    from harness.gate.reason import Allowance, Kind

    kind, _, reason = text.partition("=")
    kinds = {each.value: each for each in Kind if each.can_be_allowed}
    if kind not in kinds:
        fix = f"use one of {', '.join(kinds)}; a case that fails is excused in cases/quarantine.toml."
        raise HarnessError(f"'{kind}' is no kind of change that can be allowed.", where="--allow", fix=fix)
    if not any(map(str.isalnum, reason)):
        raise HarnessError("it does not say why.", where=f"--allow {text}", fix=f"write '{kind}=why it is good'.")
    return Allowance(kind=kinds[kind], reason=reason.strip())


def _goldens(project: Project, candidate: RunResult) -> Goldens:
    """Finds the golden that the project has now for a case, on the hardware of the candidate."""
    from harness.environment import Environment
    from harness.evidence.golden import Golden, GoldenMissing, find_golden, hardware_classes
    from harness.matrix.caseid import family_id, parse_case_id

    environment = candidate.start.environment or Environment()
    classes = hardware_classes(environment.device or "cpu", environment.architecture)

    def find(case_id: str) -> Golden | None:
        try:
            return find_golden(project.root, classes, family_id(parse_case_id(case_id)))
        except GoldenMissing:
            return None

    return find
