"""`fp8-harness compare`: GO, NO-GO or NOT COMPARED of two runs."""

import datetime
from collections.abc import Callable
from pathlib import Path

import click

from harness.cli import options
from harness.cli.environments import given_words, run_in_each, versions_of, versions_parameter
from harness.cli.show import page_of
from harness.errors import HarnessError
from harness.evidence.golden import Golden, find_golden, hardware_classes
from harness.evidence.sealed import Missing
from harness.matrix.caseid import family_id, parse_case_id
from harness.matrix.records import read_quarantine, read_required
from harness.plugins.release.cases import Goldens
from harness.plugins.release.gate import Answer, GatePolicy, gate
from harness.plugins.release.reason import Allowance, Kind
from harness.plugins.release.sections import gate_front, gate_markdown, gate_sections
from harness.project import Project, find_project
from harness.report.runs import environments_sections
from harness.result import Environment, RunResult
from harness.running.environments import Versions
from harness.running.selection import recorded_faults
from harness.running.stored import results_of
from harness.verdict import ExitCode

_EPILOG = """\b
Examples:
  fp8-harness compare last~1 last
  fp8-harness compare v1 v2 --allow 'wire=two gathers became one' \\
      --html gate.html
  fp8-harness compare --versions torch=2.15.0,nightly \\
      --env nightly=.venv-nightly pr --select tp=2

\b
A and B are a name of `run --name`, "last", "last~2", a file of `run --json`,
or a folder of such files, the shards of one run.
Cases in cases/quarantine.toml do not gate. Environments of --versions are
made in the state folder and kept; torch comes with its libraries, 5 GB with
CUDA.
Exit codes: 0 GO, 1 NO-GO, 6 nothing was compared.
"""

_OF_THE_RUNS = ("sources", "expressions", "jobs", "timeout_s")
_OF_THE_VERSIONS = ("environments", "index_url", "find_links")
_CODES = {
    Answer.GO: ExitCode.GOOD,
    Answer.NO_GO: ExitCode.FAILED,
    Answer.NOT_COMPARED: ExitCode.NOT_COMPARED,
}
_Sides = tuple[tuple[str, str], "tuple[RunResult, RunResult]"]  # names and results


@click.command("compare", epilog=_EPILOG)
@click.argument("sources", metavar="[A B | TIER|FILE|CASE-ID...]", nargs=-1)
@click.option("--versions", metavar="PACKAGE=V1,V2", help="Run these cases with each version; compare V1 and the last.")
@click.option(
    "--required",
    metavar="FILE",
    type=options.FILE,
    help="The cases that the candidate must have passed, and how recently.",
)
@click.option("--allow", "allowed", metavar="KIND=WHY", multiple=True, help="Accept a kind of change. Repeatable.")
@click.option("--strict", is_flag=True, help="Cases that failed before gate too.")
@click.option("--gate-times", is_flag=True, help="A slower candidate gates on a CPU too.")
@versions_parameter
@options.json_option("the answer")
@click.option("--markdown", "markdown_file", metavar="FILE", type=options.OUTPUT, help="Write the answer as markdown.")
@options.run_option("html_file")
@options.run_option("expressions")
@options.run_option("jobs")
@options.run_option("timeout_s")
@options.root_option
def compare_command(  # noqa: PLR0913  one parameter an option
    *,
    sources: tuple[str, ...],
    versions: str | None,
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
    """Decide GO or NO-GO: is run B as good as run A? Lists every reason, most severe first.

    NOT COMPARED where no case is good in both, both ran none of the same cases, or no check judged them.

    With --versions the cases are run, and --select, -j and --timeout-s are as in `run`.
    """
    project = find_project(root)
    terms = GatePolicy(
        now=datetime.datetime.now(datetime.UTC),
        required=read_required(required) if required is not None else (),
        quarantine=read_quarantine(project.quarantine),
        allowed=tuple(map(_allowance, allowed)),
        strict=strict,
        gate_times=gate_times,
        faults=recorded_faults(project),
    )
    names, (before, after) = (
        _stored(project, sources) if versions is None else _of_versions(project, versions, versions_for, root)
    )
    words = given_words(_OF_THE_VERSIONS)
    decision = gate(before, after, terms, names=names, goldens=_goldens(project, after), words=words)
    options.print_report(gate_sections(decision), json_file, decision)
    options.write_output(markdown_file, lambda: gate_markdown(decision).encode())
    options.write_output(html_file, lambda: page_of(project, after, front=gate_front(decision, after)))
    return _CODES[decision.answer]


def _stored(project: Project, sources: tuple[str, ...]) -> _Sides:
    if len(sources) != 2:
        raise click.UsageError("two runs A and B are needed, or --versions.")
    if given_words({*_OF_THE_RUNS, *_OF_THE_VERSIONS} - {"sources"}):
        raise click.UsageError("--select, -j, --timeout-s, --env, --index-url and --find-links need --versions.")
    first, second = sources
    return (first, second), (results_of(project, first), results_of(project, second))


def _of_versions(project: Project, versions: str, versions_for: Callable[..., Versions], root: str | None) -> _Sides:
    """The first and the last version of a package, after the tiers were run with every one."""
    words = [*given_words(_OF_THE_RUNS), *(() if root is None else ("--root", root))]
    runs = run_in_each(project, versions_of(project, versions, versions_for), words)
    options.print_sections(environments_sections(runs), err=True)
    first, *_, last = runs
    return (first, last), (runs[first], runs[last])


def _allowance(text: str) -> Allowance:
    kind, _, reason = text.partition("=")
    kinds = {member.value: member for member in Kind if member.can_be_allowed}
    if kind not in kinds:
        fix = f"use one of {', '.join(kinds)}; a case that fails is excused in cases/quarantine.toml."
        raise HarnessError(f"'{kind}' is no kind of change that can be allowed.", where="--allow", fix=fix)
    if not any(map(str.isalnum, reason)):
        raise HarnessError("it does not say why.", where=f"--allow {text}", fix=f"write '{kind}=why it is good'.")
    return Allowance(kind=kinds[kind], reason=reason.strip())


def _goldens(project: Project, candidate: RunResult) -> Goldens:
    environment = candidate.start.environment or Environment()
    devices = {case.case_id: case.place.device for case in candidate.results if case.place is not None}

    def find(case_id: str) -> Golden | None:
        device = devices.get(case_id, environment.device or "cpu")
        classes = hardware_classes(device, environment.architecture)
        try:
            return find_golden(project.root, classes, family_id(parse_case_id(case_id)))
        except Missing:
            return None

    return find
