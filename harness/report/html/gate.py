"""The front of the page of a gate: the decision, every reason in order of weight, and what was compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from harness.gate.gate import Gate
from harness.gate.reason import Reason
from harness.report.gate import answer, facts, short_digests, sides_text
from harness.report.grouping import group_lines, phrase, summary_rows, title, what_moved
from harness.report.html.page import Front
from harness.report.sections import Entry, Section, Table
from harness.result import RunResult


def gate_front(found: Gate, candidate: RunResult) -> Front:
    """What the page of the candidate says first. A reason leads to its case where the candidate has one."""
    line, *more = facts(found)
    ids = {case.case_id for case in candidate.results}
    section = Section(
        name="gate",
        title="Gate",
        blocks=(
            *more,
            "All other parts of this page are of the candidate.",
            *_groups(found.reasons, ids),
            *_causes(found, ids),
            *_notes(found),
            *_moved(found),
            *_sides(found),
        ),
    )
    return Front(title=sides_text(found), state=answer(found), good=found.go, line=line, section=section)


def _causes(found: Gate, ids: Collection[str]) -> Iterator[Section]:
    """What moved, one group for every origin."""
    for origin, same in groupby(found.groups, key=lambda group: group.origin):
        entries = tuple(
            Entry(
                title=title(group),
                case=group.example if group.example in ids else "",
                lines=tuple(group_lines(group)),
                command=group.command,
            )
            for group in same
        )
        yield Section(title=f"moved, {phrase(origin)} ({len(entries)})", blocks=entries)


def _moved(found: Gate) -> Iterator[Table]:
    """In how many cases what moved, by origin."""
    if found.groups:
        columns, *rows = summary_rows(found)
        yield Table(title=what_moved(found), columns=columns, rows=tuple(rows))


def _groups(reasons: Sequence[Reason], ids: Collection[str]) -> Iterator[Section]:
    """The reasons of one kind together; what does not gate is folded."""
    for (gates, kind), same in groupby(reasons, key=lambda reason: (reason.gates, reason.kind)):
        entries = tuple(_entry(reason, ids) for reason in same)
        title = f"{'gates' if gates else 'does not gate'}: {kind.phrase} ({len(entries)}) [{kind.value}]"
        yield Section(title=title, blocks=entries, folded=not gates)


def _entry(reason: Reason, ids: Collection[str]) -> Entry:
    name, is_known = reason.case or "the run", reason.case in ids
    values = f"{reason.baseline} -> {reason.candidate}" if reason.baseline or reason.candidate else ""
    title = " ".join(filter(None, ("" if is_known else name, "" if values in reason.what else values)))
    return Entry(
        title=title,
        case=name if is_known else "",
        lines=tuple(filter(None, (reason.waiver, reason.what, *reason.details))),
        command=reason.command,
    )


def _notes(found: Gate) -> Iterator[Section]:
    if found.notes:
        entries = tuple(Entry(title=note.text, command=note.command) for note in found.notes)
        yield Section(title="notes", blocks=entries)


def _sides(found: Gate) -> Iterator[Table]:
    """The two sides, and what differs between their environments."""
    rows = [
        (name, *(str(getattr(side, name)) or "unknown" for side in (found.baseline, found.candidate)))
        for name in found.baseline.__struct_fields__
    ]
    yield Table(title="the two sides", columns=("", "baseline", "candidate"), rows=tuple(rows))
    if found.differences:
        differ = tuple((short_digests(each),) for each in found.differences)
        yield Table(title="environments", columns=("what differs",), rows=differ)
