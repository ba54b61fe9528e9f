"""From a report or a configuration to a case, in one way: what is stated, derived, assumed and missing."""

import datetime
import re
import shlex
from collections.abc import Collection, Mapping

import msgspec
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.matrix.axes import AXES, option_of
from harness.matrix.case import Case
from harness.plugins.bugs.bugfile import Bug, BugFile, Origins
from harness.plugins.bugs.draft import Draft
from harness.plugins.bugs.fitting import fit
from harness.plugins.bugs.reading import Account, Reading, Statement, resolve
from harness.plugins.bugs.report import Report, find_link, observe
from harness.plugins.bugs.spellings import LAST_TOML, Era, era_of_version
from harness.registry import REFERENCE
from harness.text import printable

# What is asked of a report that holds no configuration.
_OF_PROSE = {
    "recipe": "which one? Prose is not read, and no configuration or command stands between fences (```)",
    "dp_shard": "how many FSDP2 ranks?",
    "tp": "how many TP ranks?",
    "cp": "how many ranks share a sequence?",
    "run": "what else was run? docs/describe-a-case.md has the questions",
}
_ID = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,78}[a-z0-9])?", re.ASCII)


class ImportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user states about a report or a configuration. `day`: of what was run; `today`: the day of the import.

    `axes`: in place of what the report says; `ranks`: of the whole job; `ignore`: names of lines that mean nothing.
    """

    today: datetime.date
    id: str = ""
    link: str = ""
    versions: Mapping[str, str] = {}
    day: datetime.date | None = None
    full_size: bool = False
    axes: Mapping[str, object] = {}
    ranks: int | None = None
    ignore: tuple[str, ...] = ()


class Job(Origins, frozen=True, kw_only=True):
    """The case of a report or a configuration. `account`: every line. `ignored`: what changes no case, with reasons."""

    case: Case | None
    era: Era
    account: Account
    ignored: tuple[str, ...] = ()


class ImportedBug(msgspec.Struct, frozen=True, kw_only=True):
    """The bug file of a report, and the job that was read."""

    bug: BugFile
    job: Job


def import_report(report: Report, options: ImportOptions) -> ImportedBug:
    """Return the bug file that a report describes. HarnessError where nothing says what to call it."""
    given_link, bug_id = _name(report, options)
    seen = _seen(report, options)
    job = read_job(report, options)
    bug = replace(seen, link=given_link or seen.link, status="refused" if job.refused else "open")
    words = {name: printable(value) for name, value in msgspec.structs.asdict(bug).items() if isinstance(value, str)}
    bug = replace(bug, **words)  # a log of CI may show the file
    origins = {
        name: {key: printable(value) if isinstance(value, str) else value for key, value in getattr(job, name).items()}
        for name in Origins.__struct_fields__
    }
    return ImportedBug(bug=BugFile(id=bug_id, where=report.where, bug=bug, case=job.case, **origins), job=job)


def import_configuration(report: Report, options: ImportOptions) -> Job:
    """The job of a configuration, which has a case. HarnessError for what no case has, and for open questions."""
    job = read_job(report, options)
    for name, reason in job.refused.items():
        raise HarnessError(f"no case has {name}: {reason}.", where=report.where, fix="leave it out.")
    if not (job.account.used or job.account.not_understood):
        fix = "give a configuration, or flags: --section.option value …; for prose see docs/describe-a-case.md."
        raise HarnessError("holds no option that is known.", where=report.where, fix=fix)
    if job.missing:
        questions = "; ".join(f"{name}: {text}" for name, text in job.missing.items())
        raise HarnessError(f"{questions}.", where=report.where, fix=_answers(job.missing))
    return job


def read_job(report: Report, options: ImportOptions) -> Job:
    """Return the job that the configurations of a report describe."""
    seen = _seen(report, options)
    era = _era(options, seen)
    reading = Reading(report, era.day)
    if reading.is_toml and not era.sure:  # read again as its versions meant it
        era = Era(day=min(era.day, LAST_TOML), source="torchtitan was configured so up to 0.2.2", sure=True)
        reading = Reading(report, era.day)
    account, dropped = _without(reading.account, options.ignore)
    target = str(options.axes.get("target", REFERENCE))
    refused = {**reading.outside, **_other_models(reading, target)}
    if refused and not reading.configurations:  # of several, others may be what is refused
        return Job(case=None, era=era, account=account, refused=refused, ignored=dropped)
    draft = Draft(resolve(_with_given(reading.statements, options)), era=era, tool=reading.tool, target=target)
    fit(draft, first_bad_step=seen.first_bad_step, full_size=options.full_size)
    draft.axes |= {name: value for name, value in options.axes.items() if name in AXES}
    case = draft.case()
    missing = {**({} if reading.configurations else draft.missing), **_questions(reading, account)}
    silent = _OF_PROSE if not (account.used or account.not_understood) else {}
    return Job(
        case=case,
        era=era,
        account=account,
        stated=draft.stated,
        derived=draft.derived,
        assumed={name: words for name, words in draft.assumed.items() if name not in silent},
        missing={name: text for name, text in missing.items() if name not in options.axes},
        full_size=draft.full_size,
        ignored=(*draft.ignored, *dropped),
    )


def _seen(report: Report, options: ImportOptions) -> Bug:
    seen = observe(report)
    return replace(seen, versions={**seen.versions, **options.versions})


def _with_given(statements: list[Statement], options: ImportOptions) -> tuple[Statement, ...]:
    """Return the statements, with those of the user in place of others about the same."""
    stated = {name: value for name, value in options.axes.items() if name in AXES and name != "target"}
    replaced = {*stated}
    if options.ranks:
        stated["ranks"] = options.ranks
        replaced |= {"ranks", "ranks_per_node", "nodes"}
    if "global_batch" in stated and "accumulation" not in stated:
        replaced |= {"local_batch", "local_tokens"}
    own = [
        Statement(fact=name, value=value, words=option_of(name) if name in AXES else f"--{name}", source="flag")  # type: ignore[arg-type]
        for name, value in stated.items()
    ]
    return (*(statement for statement in statements if statement.fact not in replaced), *own)


def _questions(reading: Reading, account: Account) -> dict[str, str]:
    """Return what must be answered although the draft has a value for every axis."""
    questions: dict[str, str] = {}
    if reading.configurations:
        return {"configuration": f"which one was run? Keep it: {', '.join(reading.configurations)}"}
    if reading.differ:
        questions["command"] = f"which command fails? They differ in {', '.join(reading.differ)}"
    if not (account.used or account.not_understood):
        questions |= _OF_PROSE
    for line in account.not_understood:
        if line.about:
            why = f" {line.why}" if line.why else ""
            questions[line.name] = (
                f"`{line.words}` is not understood, and is about {line.about}:{why} what does it change?"
            )
    return questions


def _other_models(reading: Reading, target: str) -> dict[str, str]:
    """Models that the target torchtitan does not train."""
    named = {str(statement.value) for statement in reading.statements if statement.fact == "model_name"}
    others = named - {"llama3"} if target.startswith("torchtitan") else ()
    return {f"model.name = {name}": "a case of torchtitan trains its llama3" for name in others}


def _without(account: Account, ignore: Collection[str]) -> tuple[Account, tuple[str, ...]]:
    """Return the account without lines that the user says mean nothing. HarnessError for a name of none."""
    for name in ignore:
        if not any(name == line.name for line in account.not_understood):
            names = ", ".join(line.name for line in account.not_understood) or "none"
            raise HarnessError("no line of this name is open.", where=f"--ignore {name}", fix=f"open are: {names}.")
    kept = tuple(line for line in account.not_understood if line.name not in ignore)
    return replace(account, not_understood=kept), tuple(f"{name}: --ignore" for name in ignore)


def _answers(missing: Mapping[str, str]) -> str:
    """Return the options that answer questions."""
    single = {"command", "configuration"} & missing.keys()
    options = [
        option_of(name) if name in AXES else f"--ignore {shlex.quote(name)}" for name in missing if name not in single
    ]
    return f"give {', '.join([*options, *(['one of them alone'] if single else [])])}."


def _era(options: ImportOptions, seen: Bug) -> Era:
    """Return the day that decides what options and defaults mean."""
    if options.day is not None:
        return Era(day=options.day, source="--date", sure=True)
    of_version = era_of_version(seen.versions.get("torchtitan", ""))
    if of_version is not None:
        return of_version
    return Era(day=options.today, source="today: --date YYYY-MM-DD says another")


def _name(report: Report, options: ImportOptions) -> tuple[str, str]:
    """(link, id): the link that was given, and the id as asked, else as the link or the head of the report has it."""
    given_link, given_id = find_link(options.link)
    if options.link and not given_link:
        fix = "give the link of an issue: https://github.com/OWNER/NAME/issues/NUMBER."
        raise HarnessError("not a link of GitHub.", where=f"--link {options.link[:100]}", fix=fix)
    bug_id = options.id or given_id or find_link(report.head)[1]
    if not bug_id:
        fix = "give --link URL, or --id NAME for one that is not reported."
        raise HarnessError("nothing in its first lines says which report it is.", where=report.where, fix=fix)
    if not _ID.fullmatch(bug_id):
        fix = "use small letters, digits, dots and dashes."
        raise HarnessError("not an id of a bug.", where=f"--id {bug_id[:100]}", fix=fix)
    return given_link, bug_id
