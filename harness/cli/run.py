"""`fp8-harness run`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec
from click.core import ParameterSource

from harness.cli import options
from harness.cli.github import report_to_github, workflow_commands_off
from harness.cli.report import page_of, print_result
from harness.document import json_report, run_document
from harness.durable import WriteFailed, write_whole
from harness.errors import HarnessError
from harness.hints import rerun_failed as rerun_command
from harness.hints import resume_run as resume_command
from harness.matrix.shard import Shard
from harness.project import Project, find_project
from harness.report.junit import junit_report
from harness.report.markdown import markdown_report
from harness.report.wording import not_judged_text
from harness.result import RunResult
from harness.running.nodes import joined, parse_rendezvous, serve
from harness.running.plan import Plan
from harness.running.progress import Progress, open_progress
from harness.running.rerun import rerun_query
from harness.running.resuming import run_to_resume
from harness.running.selection import Query
from harness.running.stored import Stored
from harness.store import RunOptions
from harness.verdict import ExitCode
from harness.workflow import Report, run
from harness.workflow import resume as resume_run

_EPILOG = """\b
Examples:
  fp8-harness run                               the smoke tier
  fp8-harness run pr -j 4 --json result.json    tier pr, results for a program
  fp8-harness run pr -x --json - | jq .totals   up to the first failure
  fp8-harness run pr --html report.html         results as a page that opens from disk
  fp8-harness run pr --select 'recipe=rowwise'  a part of it
  fp8-harness run --case tp4-rowwise-v2256-f32  one case
  fp8-harness run pr --budget-s 60              the best coverage in a minute
  fp8-harness run pr --shard 1/4 --json 1.json  the first of four parts, for `results merge`
  fp8-harness run pr --target my_pkg.my_target  with your own trainer
  fp8-harness run smoke --fabric gloo           with torch's gloo collectives
  fp8-harness run --rerun-failed                what was not good in the last run
  fp8-harness run --resume                      the rest of a run that was interrupted or killed
  fp8-harness run pr --inject fix.py:apply      with a patch of yours in every rank
  fp8-harness run --env old=v1 --env new=v2     in two virtual environments
  fp8-harness run --case ID --save-trace good   scales and norms for `fp8-harness diff`

\b
Exit codes: 0 good, 1 something failed, 2 usage or bad input, 3 nothing ran,
4 infrastructure, 5 nothing worse than `changed`, 130 interrupted.
"""

_BY_USER = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
_OF_ONE_RUN = {
    **{name: f"--{name.removesuffix('_file')}" for name in ("name", "json_file", "junit_file", "markdown_file")},
    **{name: f"--{name.replace('_', '-')}" for name in ("save_trace", "keep_logs", "rerun_failed")},
}
_STDOUT = Path("-")  # of --json: the report for people goes to stderr then


@click.command("run", epilog=_EPILOG)
@options.query_parameter
@options.shard_option
@options.plan_parameter
@options.nodes_options
@options.root_option
@click.option("--inject", metavar="FILE.py:FUNCTION", multiple=True, help="Call this in every rank before `build`.")
@click.option(
    "--budget-s",
    type=options.ABOVE_0,
    help="Run the cases with the best coverage in this many seconds; the others are listed.",
)
@click.option("--maxfail", type=options.AT_LEAST_1, help="Stop after this many cases that are not good, as in pytest.")
@click.option("-x", "first_failure", is_flag=True, help="Stop after the first: --maxfail 1.")
@click.option(
    "--rerun-failed",
    is_flag=True,
    help="Run the cases that were not good or never ran in the last run, with the same options.",
)
@click.option(
    "--resume", is_flag=True, help="Finish the last run that was interrupted or killed, with the same options."
)
@click.option("--name", default="", metavar="NAME", help="A name for the stored run, such as a release.")
@click.option(
    "--env", "environments", metavar="NAME=VENV", multiple=True, help="Run in this virtual environment. Repeatable."
)
@options.json_option("the results")
@click.option("--junit", "junit_file", metavar="FILE", type=options.OUTPUT, help="Write the results as JUnit XML.")
@options.markdown_option
@options.html_option
@click.option(
    "--github/--no-github",
    envvar="GITHUB_ACTIONS",
    help="Annotate cases that are not good, and write the job summary. Default: in GitHub Actions.",
)
@click.option(
    "--save-trace",
    metavar="DIR",
    type=options.FOLDER,
    help="Write scales, amaxes, matmuls, collectives and norms of every case as DIR/ID.npz, for `diff` and numpy.",
)
@click.option(
    "--keep-logs", metavar="DIR", type=click.Path(path_type=Path), help="Keep output and stack dumps of ranks."
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing while cases run, only the totals and failures.")
@click.option("-v", "--verbose", is_flag=True, help="Also print when a case starts, and what was not judged and why.")
def run_command(  # noqa: PLR0913  one parameter an option
    *,
    query: Query,
    shard: Shard | None,
    plan_for: Callable[..., Plan],
    nnodes: int,
    node_rank: int,
    rdzv_endpoint: str | None,
    rdzv_timeout_s: float,
    root: str | None,
    inject: tuple[str, ...],
    budget_s: float | None,
    maxfail: int | None,
    first_failure: bool,
    rerun_failed: bool,
    resume: bool,
    name: str,
    environments: tuple[str, ...],
    json_file: Path | None,
    junit_file: Path | None,
    markdown_file: Path | None,
    github: bool,
    html_file: Path | None,
    save_trace: Path | None,
    keep_logs: Path | None,
    quiet: bool,
    verbose: bool,
) -> int:
    """Run cases on fresh ranks and judge them."""
    if environments:
        return _in_environments(environments, root)
    project = find_project(root)
    outputs: list[tuple[Path, Callable[[RunResult], bytes]]] = [
        *([(json_file, json_report)] if json_file else []),
        *([(junit_file, junit_report)] if junit_file else []),
        *([(markdown_file, lambda result: markdown_report(result).encode())] if markdown_file else []),
        *([(html_file, lambda result: page_of(project, run_document(result)))] if html_file else []),
    ]
    query = msgspec.structs.replace(query, budget_s=budget_s, shard=shard)
    given = _given_options()
    stopped = _stopped(project, query, given, alone=not (rerun_failed or name)) if resume else None
    if stopped is not None:
        given = stopped.start.options
    if rerun_failed:
        query, given = _failed(project, query, given)
    repeated = given.as_given
    plan = plan_for(injections=repeated.pop("inject", ()), **repeated)
    given = msgspec.structs.replace(given, inject=tuple(each.text_with_absolute_path for each in plan.injections))
    logs = _log_folder(keep_logs) if keep_logs else None
    most = 1 if first_failure else maxfail
    rendezvous = parse_rendezvous(nnodes=nnodes, node_rank=node_rank, endpoint=rdzv_endpoint, timeout_s=rdzv_timeout_s)
    plan = msgspec.structs.replace(
        plan,
        given=given,
        root_option=root,
        logs=logs,
        max_failures=most,
        traces=save_trace,
        name=name,
        rendezvous=rendezvous,
    )
    with open_progress(quiet=quiet, verbose=verbose) as progress:
        if node_rank:
            return serve(plan, project, progress.note)
        report = _report(project, query, plan, stopped, progress)
    text_file = sys.stderr if any(path == _STDOUT for path, _ in outputs) else sys.stdout
    rerun = (resume_command if report.result.interrupted else rerun_command)(root=root)
    with workflow_commands_off(text_file, on=github):
        if verbose:
            click.echo(not_judged_text(report.result), nl=False, file=text_file)
        print_result(report.result, text_file, rerun=rerun, quiet=quiet)
    if github:
        report_to_github(report.result, text_file)
    return _write(report, outputs)


def _report(project: Project, query: Query, plan: Plan, stopped: Stored | None, progress: Progress) -> Report:
    """The report of the run, or of the rest of one that was stopped, on all nodes of the plan."""
    with joined(plan, project, progress.note) as nodes:
        if stopped:
            report = resume_run(project, stopped, nodes.plan, progress, nodes.others)
        else:
            report = run(project, query, nodes.plan, progress, nodes.others)
        nodes.leave(report.result.exit_code)
    return report


def _in_environments(given: Sequence[str], root: str | None) -> int:
    """The same command in every environment, without what is of one run."""
    from harness.cli.environments import given_words, refuse_with_env, run_in_environments

    params = click.get_current_context().params
    refuse_with_env({option: params[name] for name, option in _OF_ONE_RUN.items()})
    return run_in_environments(find_project(root), given, given_words(params.keys() - {"environments"}))


def _given_options() -> RunOptions:
    """The options of this command that change what ranks do, without defaults."""
    context = click.get_current_context()
    names = [name for name in RunOptions.__struct_fields__ if context.get_parameter_source(name) in _BY_USER]
    return RunOptions(**{name: context.params[name] for name in names})


def _stopped(project: Project, asked: Query, given: RunOptions, *, alone: bool) -> Stored:
    """The run to finish. Its cases, options and name are known: HarnessError where anything is given besides."""
    if asked != Query() or given != RunOptions() or not alone:
        raise HarnessError(
            "the cases, options and name are those of the run that is resumed; none can be given besides.",
            where="--resume",
            fix="drop them; -j, --slots, --maxfail and where to write results may be given.",
        )
    return run_to_resume(project)


def _failed(project: Project, asked: Query, given: RunOptions) -> tuple[Query, RunOptions]:
    """What was not good, narrowed by --select, with the options of that run where none is given anew."""
    if asked.sources or asked.case_ids:
        raise HarnessError(
            "the cases are those of the last run; none can be named besides.",
            where="--rerun-failed",
            fix="drop tiers, files and --case, or narrow by --select.",
        )
    rerun = rerun_query(project)
    anew = given.as_given
    repeated = msgspec.structs.replace(rerun.options, **{name: () if name == "inject" else None for name in anew})
    notes = [f"repeats {shlex.join(repeated.words)} of the last run."] if repeated.words else []
    for note in (*rerun.notes, *notes):
        click.echo(f"fp8-harness: note: {note}", err=True)
    query = msgspec.structs.replace(asked, case_ids=rerun.query.case_ids)
    return query, msgspec.structs.replace(rerun.options, **anew)


def _write(report: Report, outputs: list[tuple[Path, Callable[[RunResult], bytes]]]) -> int:
    """Write the files; a file that cannot be written is one line and exit code 2, after everything else was done."""
    code: int = report.result.exit_code
    for path, render in outputs:
        if path == _STDOUT:
            click.echo(render(report.result), nl=False)
            continue
        try:
            write_whole(path, render(report.result))
        except WriteFailed as error:
            text = f"fp8-harness: error: {error.text} Every result is kept in {report.stored}."
            click.echo(text, err=True)
            code = ExitCode.USAGE
    return code


def _log_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot make this folder: {error.strerror}."
        raise HarnessError(what, where=f"--keep-logs {folder}", fix="name another one.") from error
    return folder.resolve()
