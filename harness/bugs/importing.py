"""From the text of a report to a bug file: what is stated, derived, assumed and missing, and what is refused."""

from __future__ import annotations

import datetime
import re

import msgspec

from harness.bugs.casts import stated_by_casts
from harness.bugs.configurations import stated_by_options
from harness.bugs.draft import Draft, Situation, program_of
from harness.bugs.features import refused_features
from harness.bugs.observed import Observed, find_link, observe
from harness.bugs.prose import stated_by_prose
from harness.bugs.report import Report
from harness.bugs.shapes import shown_by_shapes
from harness.bugs.statements import resolve
from harness.errors import HarnessError
from harness.matrix.bugfile import UNREPORTED, Bug, BugFile, Status

_TOML = re.compile(
    r"(?m)^[ \t]*\[(?:parallelism|activation_checkpoint|float8|quantize[\w.]*)\]"
    r"|--(?:job\.config_file|model\.converters)"
)
_LAST_TOML = datetime.date(2026, 2, 22)
_ID = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,78}[a-z0-9])?", re.ASCII)


class ImportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user says of a report. `day`: of the report, where it does not say; `today`: when it is imported."""

    today: datetime.date
    id: str = ""
    link: str = ""
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
    seen = observe(report)
    link, bug_id = _name(report, seen, options)
    day, day_from = _day(report, seen, options)
    prose, ignored = stated_by_prose(report, day)
    statements = (*stated_by_options(report, day), *stated_by_casts(report), *prose, *shown_by_shapes(report))
    refused = refused_features(report, statements, day)
    if refused:
        bug = BugFile(id=bug_id, where=report.where, bug=_bug(report, seen, link, "refused"), refused=refused)
        return ImportedBug(bug=bug, day=day, day_from=day_from, ignored=ignored)
    situation = Situation(
        resolved=resolve(statements),
        day=day,
        program=program_of(report.text, bug_id),
        first_bad_step=seen.first_bad_step,
        full_size=options.full_size,
    )
    draft = Draft(situation)
    case = draft.case()
    bug = BugFile(
        id=bug_id,
        where=report.where,
        bug=_bug(report, seen, link, "open"),
        case=case,
        stated=draft.stated,
        derived=draft.derived,
        assumed=draft.assumed,
        missing=draft.missing,
        full_size=draft.full_size,
    )
    return ImportedBug(bug=bug, day=day, day_from=day_from, ignored=(*ignored, *draft.ignored))


def _name(report: Report, seen: Observed, options: ImportOptions) -> tuple[str, str]:
    """(link, id): as asked, else as the head of the report has them."""
    given_link, given_id = find_link(options.link)
    if options.link and not given_link:
        fix = "give the link of an issue: https://github.com/OWNER/NAME/issues/NUMBER."
        raise HarnessError("not a link of GitHub.", where=f"--link {options.link[:100]}", fix=fix)
    bug_id = options.id or given_id or seen.id
    if not bug_id:
        fix = "give --link URL, or --id NAME for one that is not reported."
        raise HarnessError("nothing in its first lines says which report it is.", where=report.where, fix=fix)
    if not _ID.fullmatch(bug_id):
        fix = "use small letters, digits, dots and dashes."
        raise HarnessError("not an id of a bug.", where=f"--id {bug_id[:100]}", fix=fix)
    return given_link or seen.link or UNREPORTED, bug_id


def _day(report: Report, seen: Observed, options: ImportOptions) -> tuple[datetime.date, str]:
    if options.day is not None:
        return options.day, "--date"
    if seen.day is not None:
        return seen.day, "the report"
    if _TOML.search(report.text):
        return _LAST_TOML, "the last day of torchtitan's TOML files; --date YYYY-MM-DD says another"
    return options.today, "today: the report has no date, --date YYYY-MM-DD says one"


def _bug(report: Report, seen: Observed, link: str, status: Status) -> Bug:
    return Bug(
        title=report.title,
        link=link,
        status=status,
        symptom=seen.symptom,
        reported=seen.reported,
        message=seen.message,
        first_bad_step=seen.first_bad_step,
        hardware=seen.hardware,
        versions=seen.versions,
    )
