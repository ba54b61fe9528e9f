"""`fp8-harness bug`: from a bug report to a case, and from a case to a report."""

import datetime
import functools
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from harness.cli import options
from harness.cli.environments import given_words, versions_parameter
from harness.cli.new import write_new_case
from harness.cli.options import Group
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.jsonform import read_json
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.records import matching
from harness.plugins.bugs import sections, upstream
from harness.plugins.bugs.bugfile import FOLDER, read_bugs, write_bug_file
from harness.plugins.bugs.corpus import check_corpus, provable_bugs
from harness.plugins.bugs.export import Neighbors, export, exported_case, proof_of
from harness.plugins.bugs.importing import ImportOptions, import_configuration, import_report
from harness.plugins.bugs.pytest_file import export_test
from harness.plugins.bugs.report import MAX_BYTES, read_file, read_report
from harness.plugins.bugs.shrink import open_journal, shrink
from harness.plugins.bugs.trials import (
    CANNOT_TELL,
    NamedCase,
    Reproduced,
    TrialResult,
    injections_for,
    known_in,
    named_case,
    open_trials,
    reproduced,
    run_once,
    trial_result,
)
from harness.project import Project
from harness.running.case_judge import known_here
from harness.running.environments import Versions
from harness.running.identity import witness_key
from harness.running.plan import Injection, Plan, parse_injection
from harness.sources import installed_version

_IMPORT_EPILOG = """\b
Examples:
  fp8-harness bug import - --id ao-1 < report.md
  fp8-harness bug import llama3_8b.toml --id ours --date 2025-06-01

\b
FILE is a report with its configuration or command in fenced blocks, or a
configuration alone: TOML, YAML, JSON, Python or flags of torchtitan, torchao,
accelerate, transformers, axolotl, AutoModel, torchtune or Megatron-LM.
Nothing in it is executed. Every line of it is used, has no effect, or is
asked about. Prose is not read: docs/describe-a-case.md says how to write a
case from it.
"""
_REPRO_EPILOG = """\b
Examples:
  fp8-harness bug repro ao-1938
  fp8-harness bug repro tp2-rowwise-v2048-f32 --inject fault:amax_without_abs
  fp8-harness bug repro ao-1938 --with torchao==0.17.0
  git bisect run fp8-harness bug repro ao-1938 --exit-code

\b
Exit codes: 0 not reproduced, 1 reproduced or another failure; with
--exit-code 0 gone, 1 reproduced, 125 cannot tell, as `git bisect run` wants
it.
"""
_SHRINK_EPILOG = """\b
Examples:
  fp8-harness bug shrink hsdp2x4-rowwise-v2048-b16 \\
      --inject fault:amax_without_abs
  fp8-harness bug shrink ao-1938 --budget-s 300 --output smallest.toml

\b
An interrupted shrink continues where it stopped.
Exit codes: 0 the smallest case was found, 1 the budget ended it.
"""
_CHECK_EPILOG = """\b
Examples:
  fp8-harness bug check                 every bug file that is live or fixed
  fp8-harness bug check ao-1086 ao-933  two of them

\b
Exit codes: 0 all as their files say, 1 a mismatch, 3 no bug to check.
"""
_EXPORT_EPILOG = """\b
Examples:
  fp8-harness bug export ao-1938
  fp8-harness bug export float8_all_gather_tp_scale --output drafts
  fp8-harness bug export CASE --shrunk shrunk.json --output for-the-issue
  fp8-harness bug export ao-1938 --pytest --output tests

\b
The script needs torch and torchao only, and runs on GPUs or on a CPU. The
test needs pytest too, and starts its ranks itself, on a CPU.
Exit codes: 0 exported, 1 exported but it does not show the fault here.
"""


_DATE = "The date that decides what options and defaults mean. Default: a version's, else today."
_OUTPUT = "Write this file, in a folder bugs/. Default: cases/bugs/<id>.toml."


@click.group(cls=Group, epilog="\b\nExamples:\n  fp8-harness bug import report.md\n  fp8-harness bug repro ao-1938")
def bug() -> None:
    """Turn a bug report into a case: import, reproduce, shrink, export, check.

    CASE is the id of a case, a file with one case, or the name of a bug file.
    """


@bug.command("import", epilog=_IMPORT_EPILOG)
@click.argument("file", metavar="FILE|-")
@click.option("--id", "bug_id", metavar="NAME", default="", help="Name of the bug file. Default: from the link.")
@click.option("--link", metavar="URL", default="", help="The report on GitHub. Default: from its first lines.")
@click.option("--version", "versions", metavar="PACKAGE=VERSION", multiple=True, help="What was run. Repeatable.")
@click.option("--date", "day", type=click.DateTime(["%Y-%m-%d"]), help=_DATE)
@click.option("--full-size", is_flag=True, help="Keep sizes and ranks as reported.")
@click.option("--output", metavar="FILE.toml", type=options.FILE, help=_OUTPUT)
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@click.option("--dry-run", is_flag=True, help="Print the bug file, write nothing.")
@options.json_option("what was understood")
def import_command(  # noqa: PLR0913  one parameter per option
    *,
    file: str,
    bug_id: str,
    link: str,
    versions: tuple[str, ...],
    day: datetime.datetime | None,
    full_size: bool,
    output: Path | None,
    force: bool,
    dry_run: bool,
    json_file: Path | None,
) -> None:
    """Turn a bug report into a bug file: the case that it describes, and where every value comes from."""
    pairs = [pair.partition("=") for pair in versions]
    if not all(name and version for name, _, version in pairs):
        raise HarnessError("no version of a package.", where="--version", fix="write it as --version torch=2.13.0.")
    asked = ImportOptions(
        today=_today(),
        id=bug_id,
        link=link,
        versions={name: version for name, _, version in pairs},
        day=None if day is None else day.date(),
        full_size=full_size,
    )
    content = sys.stdin.buffer.read(MAX_BYTES + 1) if file == "-" else read_file(file)
    imported = import_report(read_report(content, where="stdin" if file == "-" else Path(file).name), asked)
    text = write_bug_file(imported.bug)
    path = None if dry_run else _bug_path(imported.bug.id, output, force=force)
    if path is not None:
        write_whole(path, text.encode())
    shown = None if path is None else str(path)
    to_stderr = dry_run or str(json_file) == "-"
    options.print_sections(sections.imported_sections(imported, file=shown), err=to_stderr)
    if json_file is not None:
        options.write_json(json_file, sections.imported_document(imported, file=shown))
    elif dry_run:
        click.echo(text, nl=False)


def _today() -> datetime.date:
    return datetime.datetime.now(tz=datetime.UTC).date()


def _bug_path(bug_id: str, output: Path | None, *, force: bool) -> Path:
    """Return where the bug file goes. HarnessError where one is that nobody asked to replace."""
    path = output
    if path is None:
        project = options.project_of()
        project.check_writable()
        path = project.bugs / f"{bug_id}.toml"
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if path.suffix != ".toml":
        raise HarnessError("there is no file to write to.", where=str(path), fix="give FILE.toml.")
    if path.resolve().parent.name != FOLDER:
        fix = f"name a file in a folder {FOLDER}/, such as cases/{FOLDER}/{bug_id}.toml."
        raise HarnessError("a bug file must be in a folder named bugs/.", where=str(path), fix=fix)
    if path.exists() and not force:
        raise HarnessError("this file exists.", where=str(path), fix="name another by --output, or give --force.")
    return path


@bug.command("list", epilog="\b\nExamples:\n  fp8-harness bug list\n  fp8-harness bug list --json - | jq '.[].id'")
@options.json_option("the bugs")
@options.project_parameter
def list_command(*, json_file: Path | None, project: Project) -> None:
    """List the bug files of the project, and the drafts for upstream that `bug export NAME` writes."""
    bugs = read_bugs(project.bugs)
    shown = [*sections.bugs_sections(bugs), sections.drafts_section(upstream.read_records(project))]
    options.print_or_write(shown, json_file, list(map(sections.bug_document, bugs)))


_LIKE = "Look for the failure of an earlier `--json FILE.json`."
# What commands that run a case of a bug share.
_INJECT = "What makes the case fail: FILE.py:FUNCTION, fault:NAME, or planted: the faults of the bug file. Repeatable."
_trial_options = options.compose_options(
    click.argument("case", metavar="CASE", shell_complete=options.names_of("bugs", "cases")),
    options.run_option("inject", _INJECT),
    options.plan_parameter,
    options.project_parameter,
)


def _with_trial(command: options.Command) -> options.Command:
    """Return a command with `_trial_options`, to which CASE and what makes it fail are `named` and `injections`."""

    @functools.wraps(command)
    def with_trial(*, case: str, inject: tuple[str, ...], project: Project, **given: Any) -> Any:
        named = named_case(project, case)
        injections = injections_for(named, inject)
        return command(named=named, injections=injections, project=project, **given)

    return with_trial


@bug.command("repro", epilog=_REPRO_EPILOG)
@_trial_options
@options.json_option("the results")
@click.option("--like", metavar="FILE.json", type=options.EXISTING_FILE, help=_LIKE)
@click.option(
    "--exit-code", "bisect", is_flag=True, help="Exit as `git bisect run` wants it: 0 gone, 1 there, 125 skip."
)
@click.option("--with", "wanted", metavar="PACKAGE==VERSION", help="Run it with this version, which is installed once.")
@versions_parameter
def repro_command(*, bisect: bool, wanted: str | None, versions_for: Callable[..., Versions], **given: Any) -> int:
    """Say whether CASE shows the reported bug, another failure, or none."""
    try:
        if wanted is not None:
            return _reproduced_with(wanted, given["project"], versions_for)
        reproduction: Reproduced = _reproduced(**given)
    except HarnessError as error:
        if not bisect:
            raise
        click.echo(f"fp8-harness: {error}", err=True)
        return CANNOT_TELL
    return int(reproduction.bisect_code if bisect else reproduction.exit_code)


def _reproduced_with(wanted: str, project: Project, versions_for: Callable[..., Versions]) -> int:
    """Return the exit code of this command in the environment with a version of a package."""
    package, _, version = wanted.partition("==")
    if not version:
        raise HarnessError("this is not PACKAGE==VERSION.", where=f"--with {wanted}", fix="write torchao==0.17.0.")
    python = versions_for(project, package).environment(version).python
    words = given_words(click.get_current_context().params.keys() - {"wanted", "environments", "index"})
    before = options.before_command().words
    return subprocess.call([str(python), "-P", "-m", "harness", *before, "bug", "repro", *words])


@_with_trial
def _reproduced(
    *,
    named: NamedCase,
    injections: Sequence[Injection],
    like: Path | None,
    json_file: Path | None,
    plan_for: Callable[..., Plan],
    project: Project,
) -> Reproduced:
    plan = plan_for().of(named.case)
    with options.open_progress() as progress:
        result = run_once(project, plan, progress, named.case, injections)
    packages = named.bug.bug.versions if named.bug is not None else ()
    installed = {package: version for package in packages if (version := installed_version(package)) is not None}
    device = "the virtual FP8 device" if plan.device == "cpu" else plan.hardware[0]
    earlier = None if like is None else read_json(like, Reproduced, command="bug repro --json").found.signature
    known = known_in(result.findings, matching(known_here(project), named.case))
    found = trial_result(result)
    reproduction = reproduced(named, found, installed=installed, device=device, like=earlier, known=known)
    options.print_report(sections.reproduced_sections(reproduction), json_file, reproduction)
    return reproduction


def tell_other_failure(named: NamedCase, result: TrialResult) -> None:
    """Warn that what follows is about another failure than the one of the bug file."""
    reproduction = reproduced(named, result, installed={}, device="")
    if reproduction.answer == "another failure":
        other = f"{result.case_id}: another failure than the reported one"
        text = f"{other}: expected {reproduction.expected}, found {result.text}."
        click.echo(f"fp8-harness: warning: {text}", err=True)


@bug.command("shrink", epilog=_SHRINK_EPILOG)
@_trial_options
@options.json_option("the results")
@click.option("--budget-s", type=options.ABOVE_0, help="Start no new case after this many seconds.")
@click.option("--output", metavar="FILE.toml", type=options.OUTPUT, help="Write a case file.")
@_with_trial
def shrink_command(  # noqa: PLR0913  one parameter per option
    *,
    named: NamedCase,
    injections: Sequence[Injection],
    budget_s: float | None,
    output: Path | None,
    json_file: Path | None,
    plan_for: Callable[..., Plan],
    project: Project,
) -> int:
    """Find the smallest case that fails like CASE, and what the failure needs."""
    plan = plan_for().of(named.case)
    journal = open_journal(project, named.case, injections, witness_key(plan))
    with options.open_progress() as progress, open_trials(project, plan, progress, named.case, injections) as trials:
        shrunk = shrink(named.case, trials.run, journal, jobs=plan.jobs, budget_s=budget_s, note=progress.note)
    first = journal.get(case_id(named.case))
    assert first is not None, "the given case is tried first"
    tell_other_failure(named, first)
    again = msgspec.structs.replace(plan, injections=injections).command(case_id(shrunk.case))
    options.print_report(sections.shrunk_sections(shrunk, command=again), json_file, sections.shrunk_document(shrunk))
    if output is not None:
        write_new_case(output, shrunk.case, force=True)
    return 0 if shrunk.complete else 1


@bug.command("export", epilog=_EXPORT_EPILOG)
@_trial_options
@click.option("--shrunk", metavar="FILE.json", type=options.EXISTING_FILE, help="The JSON of `bug shrink`.")
@click.option("--output", metavar="DIR", type=options.FOLDER, default=Path())
@click.option("--pytest", "as_test", is_flag=True, help="Write a test for another repository instead.")
@click.option("--skip-proof", is_flag=True, help="Do not run it once, to see that it shows the fault.")
def export_command(*, case: str, **given: Any) -> int:
    """Write a draft of an issue with a script that shows how CASE fails; or a test for pytest.

    For NAME of `cases/upstream`, and for a recorded fault that it explains, the draft is made of that record. For a
    case the test is red where it fails, and green with the recorded fix. With --inject it is green without the fault.
    """
    record = upstream.record_named(given["project"], case)
    return _exported_record(record, **given) if record is not None else _exported(case=case, **given)


def _exported_record(record: upstream.Record, *, output: Path, skip_proof: bool, **given: Any) -> int:
    if given["shrunk"] or given["as_test"] or given["inject"]:
        fix = "leave --shrunk, --pytest and --inject out, or name a case."
        raise HarnessError("a draft is made of its record alone.", where=record.name, fix=fix)
    path = output / f"{record.name}.md"
    skipped = skip_proof or bool(record.missing)
    code, printed = (1, record.output.strip()) if skipped else upstream.run_script(record)
    write_whole(path, upstream.draft(record).encode())
    shows = code == 1 and printed == record.output.strip()
    seen = f"not run: {', '.join(record.missing) or '--skip-proof'}" if skipped else f"exit code {code}\n{printed}"
    click.echo(f"{path}: draft of {'a comment' if record.link else 'an issue'}\n{seen}")
    if not shows:
        options.print_note(f"the record says that it prints:\n{record.output.strip()}")
    return int(not shows)


@_with_trial
def _exported(  # noqa: PLR0913  one parameter per option
    *,
    named: NamedCase,
    injections: Sequence[Injection],
    shrunk: Path | None,
    output: Path,
    as_test: bool,
    skip_proof: bool,
    plan_for: Callable[..., Plan],
    project: Project,
) -> int:
    given, named = named.case, named._replace(case=exported_case(named.case))
    neighbors = () if shrunk is None else read_json(shrunk, Neighbors, command="bug shrink --json").needed
    plan = plan_for().of(named.case)
    with options.open_progress() as progress:
        result = run_once(project, plan, progress, named.case, injections)
    tell_other_failure(named, trial_result(result))
    records = matching(known_here(project), named.case)
    if as_test:
        either = (*records, *matching(known_here(project), given))  # a record may name the dtype that a script changes
        shown = [record.fix for record in either if record.shows(result.findings) and record.fix is not None]
        fixes = [parse_injection(fix, folder=project.root).target for fix in dict.fromkeys(shown)]
        test = export_test(named, result, injections, output, fixes=fixes, proves=not skip_proof)
        options.print_sections(sections.exported_test_sections(test))
        return int(not test.proven)
    known = known_in(result.findings, records)
    exported = export(named, result, injections, output, known)
    proof = None if skip_proof else proof_of(exported)
    versions = {package: installed_version(package) or "not installed" for package in ("torch", "torchao")}
    device = "CPU ranks" if plan.device == "cpu" else plan.hardware[0]
    text = sections.issue_markdown(exported, proof, versions=versions, device=device, neighbors=neighbors)
    write_whole(exported.file.with_suffix(".md"), text.encode())
    options.print_sections(sections.exported_sections(exported, proof))
    return int(proof is not None and proof.outcome != "FAULT")


@bug.command("check", epilog=_CHECK_EPILOG)
@click.argument("names", metavar="[ID]...", nargs=-1)
@options.json_option("the proofs")
@options.plan_parameter
@options.project_parameter
def check_command(
    *, names: tuple[str, ...], json_file: Path | None, plan_for: Callable[..., Plan], project: Project
) -> int:
    """Verify bug files: live bugs fail as recorded; fixed ones pass, and fail with their injected faults.

    ID is the name of a bug file. Only findings of checks in its `detected_by` count.
    """
    bugs = provable_bugs(project, names)
    with options.open_progress() as progress:
        corpus = check_corpus(project, bugs, plan_for(), progress)
    options.print_report(sections.corpus_sections(corpus), json_file, corpus)
    return corpus.exit_code


def case_of_configuration(
    config: str, given: Mapping[str, object], *, ranks: int | None, ignore: tuple[str, ...]
) -> tuple[Case, tuple[str, ...]]:
    """Return the case of a configuration, a file or flags, and how it differs from the job.

    `given`: axes that replace those of the configuration. `ignore`: its lines that mean nothing.
    """
    flags = config.lstrip().startswith("--")
    content = config.encode() if flags else read_file(config)
    report = read_report(content, where="--from" if flags else config)
    job = import_configuration(report, ImportOptions(today=_today(), axes=given, ranks=ranks, ignore=ignore))
    assert job.case is not None, "a job without a refusal has a case"
    return job.case, sections.job_notes(job)
