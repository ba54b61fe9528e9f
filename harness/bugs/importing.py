"""From a report to a bug file, and from a configuration to a case: what is stated, derived, assumed and missing."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from harness.bugs.draft import Draft
from harness.bugs.facts import LAST_TOML, resolve
from harness.bugs.prose import clauses, day_of, find_link, id_of, observe, outside_by_prose, stated_by_prose
from harness.bugs.reading import Reading, Statement
from harness.bugs.report import Report, clean_words
from harness.errors import HarnessError
from harness.matrix.axes import AXES, case_from_axes
from harness.matrix.bugfile import BugFile
from harness.matrix.case import Case
from harness.matrix.rules import exclusions
from harness.matrix.scope import SCOPE
from harness.matrix.targets import REFERENCE, TORCHTITAN

_TOML = re.compile(
    r"(?m)^[ \t]*\[(?:parallelism|activation_checkpoint|float8|quantize[\w.]*)\]"
    r"|--(?:job\.config_file|model\.converters|float8\.|quantize\.)"
)
_TORCHTITAN = re.compile(
    r"run_(?:llama_)?train\.sh|-m torchtitan|torchtitan/train|Trainer\.Config"
    r"|--(?:training|parallelism|float8|job|activation_checkpoint|compile|model|metrics)\.[a-z]"
    r"|^[ \t]*\[(?:parallelism|activation_checkpoint|quantize[\w.]*|float8)\]",
    re.MULTILINE,
)
_ACCELERATE = re.compile(r"fp8_config:|accelerate launch")
_ID = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,78}[a-z0-9])?", re.ASCII)


class ImportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user states about a report. `day`: its date, where it gives none; `today`: the day of the import."""

    today: datetime.date
    id: str = ""
    link: str = ""
    title: str = ""
    message: str = ""
    versions: Mapping[str, str] = {}
    day: datetime.date | None = None
    full_size: bool = False


class ImportedBug(msgspec.Struct, frozen=True, kw_only=True):
    """The bug file of a report, the day that decided what spellings mean, and what was passed over, with reasons."""

    bug: BugFile
    day: datetime.date
    day_from: str
    ignored: tuple[str, ...]


def import_report(report: Report, options: ImportOptions) -> ImportedBug:
    """The bug file that a report describes. HarnessError where nothing says what to call it."""
    prose_clauses = clauses(report)
    seen = observe(report, prose_clauses)
    given_link, bug_id = _name(report, options)
    link = given_link or seen.link
    day, day_from = _day(report, options)
    reading = Reading(report, day)
    prose, passed = stated_by_prose(prose_clauses)
    # With torchao's float8 in options or calls, prose about other software is no request for it.
    of_torchao = any(statement.fact in ("float8", "recipe") for statement in reading.statements)
    named, asked = outside_by_prose(report, prose_clauses[: 1 if of_torchao else None], day, link)
    for supported in reading.in_scope:
        named.pop(supported.name, None)
        asked.pop(supported.name, None)
    refused = {**reading.outside, **named}
    bug = replace(
        seen,
        title=options.title or seen.title,
        link=link,
        status="refused" if refused else "open",
        message=options.message or seen.message,
        versions={**seen.versions, **options.versions},
    )
    bug_file = BugFile(id=bug_id, where=report.where, bug=bug, refused=refused)
    ignored = (*passed, *_unknown(reading))
    if not refused:
        draft = Draft(
            resolve((*reading.statements, *prose)),
            day=day,
            program=_program_of(report.text, bug_id),
            first_bad_step=seen.first_bad_step,
            full_size=options.full_size,
        )
        lists = {name: getattr(draft, name) for name in ("stated", "derived", "assumed", "missing", "full_size")}
        bug_file = replace(bug_file, case=draft.case(), **lists)
        scope = {feature.name: feature for feature in SCOPE}
        open_ones = {name: words for name, words in asked.items() if draft.stated.keys().isdisjoint(scope[name].axes)}
        questions = {name: scope[name].question(words) for name, words in open_ones.items()}
        if reading.differ:
            questions["command"] = f"which command fails? They differ in {', '.join(reading.differ)}"
        if not (draft.stated or draft.derived or draft.missing):
            questions["run"] = "no option, command or degree is in the report: what was run?"
        bug_file = replace(bug_file, missing={**bug_file.missing, **questions})
        ignored = (*ignored, *draft.ignored)
    return ImportedBug(bug=bug_file, day=day, day_from=day_from, ignored=ignored)


def import_configuration(
    report: Report, given: Mapping[str, object], *, today: datetime.date, ranks: int | None = None
) -> tuple[Case, tuple[str, ...]]:
    """The case of a configuration, with these axes in place of its own, and how it differs. `ranks`: of the whole job.

    HarnessError for what no case has, and where nothing of it is known.
    """
    day, _ = _day(report, ImportOptions(today=today))
    reading = Reading(report, day)
    for name, reason in reading.outside.items():
        raise HarnessError(f"no case has {name}: {reason}.", where=report.where, fix="leave it out.")
    if reading.differ:
        what = f"has several commands, which differ in {', '.join(reading.differ)}."
        raise HarnessError(what, where=report.where, fix="keep one of them.")
    if not reading.statements:
        fix = "give a file of torchtitan, accelerate or Megatron-LM, or its flags: --section.option value …"
        raise HarnessError("holds no option that is known.", where=report.where, fix=fix)
    program = _program_of(report.text, "")
    asked = [Statement(fact="ranks", value=ranks, words=f"--ranks {ranks}", source="flag")] if ranks else []
    chosen = {name: value for name, value in given.items() if name in AXES}
    kept = [
        statement
        for statement in reading.statements
        if statement.fact not in chosen and not (asked and statement.fact == "ranks")
    ]
    kept += [
        Statement(fact=name, value=value, words=f"--{name.replace('_', '-')}", source="flag")  # type: ignore[arg-type]
        for name, value in chosen.items()
    ]
    target = TORCHTITAN if program == TORCHTITAN and not reading.in_scope else REFERENCE
    draft = Draft(resolve((*kept, *asked)), day=day, program=program, target=target)
    models = {str(statement.value) for statement in kept if statement.fact == "model_name"} - {"llama3"}
    if models and target == TORCHTITAN:
        fix = "write a target of your own for it: docs/your-own-trainer.md."
        what = f"model.name = {', '.join(models)}: a case of torchtitan trains its llama3."
        raise HarnessError(what, where=report.where, fix=fix)
    for name, question in draft.missing.items():
        if name not in draft.asked:
            fix = f"give --{name.replace('_', '-')}."
            raise HarnessError(f"{name}: {question}", where=report.where, fix=fix)
    case = case_from_axes({**draft.axes, **chosen})
    for rule in exclusions(case):
        fix = f"change {' or '.join(rule.axes)}."
        raise HarnessError(f"no case has it: {rule.reason}.", where=report.where, fix=fix)
    lists = (("", draft.missing), ("", draft.derived), ("assumed: ", draft.assumed))
    notes = [f"{name}: {head}{words}" for head, table in lists for name, words in table.items()]
    return case, (*notes, *draft.ignored, *_unknown(reading))


def _unknown(reading: Reading) -> list[str]:
    return [f"{clean_words(words)}: not understood" for words in reading.unknown.values()]


def _program_of(text: str, bug_id: str) -> str:
    """Whose configuration a report has: torchtitan, accelerate, or "" for any other."""
    if bug_id.startswith("torchtitan-") or _TORCHTITAN.search(text):
        return TORCHTITAN
    return "accelerate" if _ACCELERATE.search(text) else ""


def _name(report: Report, options: ImportOptions) -> tuple[str, str]:
    """(link, id): the link that was given, and the id as asked, else as the link or the head of the report has it."""
    given_link, given_id = find_link(options.link)
    if options.link and not given_link:
        fix = "give the link of an issue: https://github.com/OWNER/NAME/issues/NUMBER."
        raise HarnessError("not a link of GitHub.", where=f"--link {options.link[:100]}", fix=fix)
    bug_id = options.id or given_id or id_of(report)
    if not bug_id:
        fix = "give --link URL, or --id NAME for one that is not reported."
        raise HarnessError("nothing in its first lines says which report it is.", where=report.where, fix=fix)
    if not _ID.fullmatch(bug_id):
        fix = "use small letters, digits, dots and dashes."
        raise HarnessError("not an id of a bug.", where=f"--id {bug_id[:100]}", fix=fix)
    return given_link, bug_id


def _day(report: Report, options: ImportOptions) -> tuple[datetime.date, str]:
    """The day that decides what spellings and defaults mean, and where it comes from."""
    if options.day is not None:
        return options.day, "--date"
    report_day = day_of(report)
    if report_day is not None:
        return report_day, "the report"
    if _TOML.search(report.text):
        return LAST_TOML, "the last day of torchtitan's TOML files; --date YYYY-MM-DD says another"
    return options.today, "today: the report has no date, --date YYYY-MM-DD says one"
