"""Records that name cases, by `id` or by `select`, a selector: what may fail for a while, and what a release must show.

Owns the formats of `cases/quarantine.toml` and `cases/required.toml`:

    [[quarantine]]                    # runs and is reported, and until a day fails neither `run` nor `compare`
    id = "tp2-rowwise-v2048-b16"      # one case, or
    select = "async_tp=true tp=8"     # a selector
    owner = "ana"                     # who will end it
    reason = "..."                    # one sentence
    link = "https://..."              # optional: where it is worked on
    expires = 2027-03-01              # after this day the cases count again

    [[required]]                      # what a candidate must have shown before it is released
    name = "TP in bfloat16"           # short, unique
    select = "tp>1 dtype=bfloat16"    # or id = "..."
    at_least = 3                      # so many of these cases must be good; 1 if not given
    max_age_days = 7                  # optional: of a run that is not older
    reason = "..."                    # one sentence: why it is required
"""

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.selector import parse_selector
from harness.matrix.tomlfile import TomlFile, read_toml_file

_LONG_DAYS = 366  # until the end of a quarantine; more is remarked on, because nobody will look again


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    id: str = ""
    select: str = ""

    def covers(self, case: Case) -> bool:
        return case_id(case) == self.id if self.id else parse_selector(self.select).matches(case)

    @property
    def which(self) -> str:
        return self.id or self.select


E = TypeVar("E", bound=Entry)


class Quarantine(Entry, frozen=True, kw_only=True):
    """One entry. It holds up to and including the day `expires`."""

    owner: str
    reason: str
    expires: datetime.date
    link: str = ""

    def holds(self, today: datetime.date) -> bool:
        return today <= self.expires

    def text(self, today: datetime.date) -> str:
        """Why cases are excused, as the end of a sentence, with a remark where that lasts too long."""
        link = f" ({self.link})" if self.link else ""
        days = (self.expires - today).days
        remark = f". That is {days / 365.25:.1f} years away: set a date within a year" if days > _LONG_DAYS else ""
        return f"quarantined until {self.expires} by {self.owner}: {self.reason}{link}{remark}"

    @property
    def expired_text(self) -> str:
        return f"the quarantine by {self.owner} expired on {self.expires}: {self.reason}"


class Required(Entry, frozen=True, kw_only=True):
    """At least so many good cases, in a run that is not older than so many days."""

    name: str
    reason: str
    at_least: Annotated[int, Meta(gt=0)] = 1
    max_age_days: Annotated[float, Meta(gt=0)] | None = None


def read_quarantine(path: Path) -> tuple[Quarantine, ...]:
    """The entries of a file, in order; none where there is no file. Raises HarnessError with the line."""
    if not path.exists():
        return ()
    toml = read_toml_file(path)
    entries = toml.records("quarantine", Quarantine, fixes={"expires": "write expires = 2027-03-01."})
    return _checked(toml, "quarantine", entries)


def read_required(path: Path) -> tuple[Required, ...]:
    """The entries of a file, in order. Raises HarnessError with the line for anything invalid."""
    toml = read_toml_file(path)
    entries = toml.records("required", Required)
    toml.check_distinct([entry.name for entry in entries], "required", "name", noun="entries")
    return _checked(toml, "required", entries)


def quarantine_of(entries: Iterable[Quarantine], case: Case) -> Quarantine | None:
    """The entry about a case that expires last; None where there is none."""
    return max((entry for entry in entries if entry.covers(case)), key=lambda entry: entry.expires, default=None)


def _checked(toml: TomlFile, table: str, entries: tuple[E, ...]) -> tuple[E, ...]:
    """The entries. HarnessError with the line where one names no cases, or cases that cannot be."""
    for index, entry in enumerate(entries):
        if bool(entry.id.strip()) == bool(entry.select.strip()):
            what = "an entry has either 'id', one case, or 'select', an expression."
            raise toml.error(table, index, what=what, fix='write id = "tp2-rowwise-v2048-b16", or select = "tp>1".')
        try:
            _ = parse_case_id(entry.id) if entry.id else parse_selector(entry.select)
        except HarnessError as error:
            raise toml.error(table, index, "id" if entry.id else "select", what=error.what, fix=error.fix) from error
    return entries
