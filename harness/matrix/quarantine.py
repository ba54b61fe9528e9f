"""Quarantined cases: they run and are reported, and until a day they fail neither `run` nor `gate`.

Owns the format of `cases/quarantine.toml`:

    [[quarantine]]
    id = "tp2-rowwise-v2048-b16"      # one case, or
    select = "async_tp=true tp=8"     # a selector
    owner = "ana"                     # who will end it
    reason = "..."                    # one sentence
    link = "https://..."              # optional: where it is worked on
    expires = 2027-03-01              # after this day the cases count again
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path

import msgspec

from harness.matrix.case import Case
from harness.matrix.entries import Entry, check_entry, check_texts
from harness.matrix.tomlfile import TomlFile, read_toml_file


class Quarantine(Entry, frozen=True, kw_only=True):
    """One entry. It holds up to and including the day `expires`."""

    owner: str
    reason: str
    expires: datetime.date
    link: str = ""

    def holds(self, today: datetime.date) -> bool:
        """True up to the day on which it expires."""
        return today <= self.expires

    @property
    def text(self) -> str:
        """Why cases are excused, as the end of a sentence."""
        link = f" ({self.link})" if self.link else ""
        return f"quarantined until {self.expires} by {self.owner}: {self.reason}{link}"

    @property
    def expired_text(self) -> str:
        """The same of one that holds no more."""
        return f"the quarantine by {self.owner} expired on {self.expires}: {self.reason}"


def read_quarantine(path: Path) -> tuple[Quarantine, ...]:
    """The entries of a file, in order; none where there is no file. Raises HarnessError with the line."""
    if not path.exists():
        return ()
    toml = read_toml_file(path)
    toml.check_keys(table=toml.data, known=("quarantine",))
    return tuple(_entry(toml, table, index) for index, table in enumerate(toml.tables("quarantine")))


def quarantine_of(entries: Iterable[Quarantine], case: Case) -> Quarantine | None:
    """The entry about a case that expires last; None where there is none."""
    return max((entry for entry in entries if entry.covers(case)), key=lambda entry: entry.expires, default=None)


def _entry(toml: TomlFile, table: object, index: int) -> Quarantine:
    fields = toml.check_keys("quarantine", index, table=table, known=Quarantine.__struct_fields__)
    check_entry(toml, fields, "quarantine", index)
    check_texts(toml, fields, ("owner", "reason"), "quarantine", index)
    if type(fields.get("expires")) is not datetime.date:
        what = "'expires' must be a day."
        raise toml.error("quarantine", index, "expires", what=what, fix="write expires = 2027-03-01.")
    try:
        return msgspec.convert(fields, Quarantine)
    except msgspec.ValidationError as error:
        raise toml.error("quarantine", index, what=f"{error}.") from error
