"""The cases of a run that are quarantined on this day."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping

from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.records import quarantine_of, read_quarantine
from harness.project import Project


def quarantined_cases(project: Project, cases: Iterable[Case], note: Callable[[str], None]) -> Mapping[str, str]:
    """By case id: until when, by whom and why. `note` gets expired quarantines.

    Raises HarnessError where the file of the project is invalid.
    """
    entries, today = read_quarantine(project.quarantine), datetime.date.today()
    found = {case_id(case): entry for case in cases if (entry := quarantine_of(entries, case)) is not None}
    for text in dict.fromkeys(entry.expired_text for entry in found.values() if not entry.holds(today)):
        note(f"{text}. Its cases count again.")
    return {name: entry.text for name, entry in found.items() if entry.holds(today)}
