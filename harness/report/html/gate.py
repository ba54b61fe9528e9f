"""The front of the page of a gate: the decision, every reason in order of weight, and what was compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from harness.document import RunDocument
from harness.gate.gate import Gate
from harness.gate.reason import Reason
from harness.report.gate import answer, facts, short_digests, sides_text
from harness.report.grouping import group_lines, phrase, summary_rows, title, what_moved
from harness.report.html.sections import Entry, Front, Group, Listing, Section
from harness.report.wording import printable


def gate_front(found: Gate, candidate: RunDocument) -> Front:
    """What the page of the candidate says first. A reason leads to its case where the candidate has one."""
    line, *more = map(printable, facts(found))
    ids = {case.id for case in candidate.cases}
    section = Section(
        name="gate",
        title="Gate",
        notes=(*more, "All other parts of this page are of the candidate."),
        groups=(*_groups(found.reasons, ids), *_causes(found, ids), *_notes(found)),
        listings=(*_moved(found), *_sides(found)),
    )
    return Front(title=printable(sides_text(found)), state=answer(found), good=found.go, line=line, section=section)


def _causes(found: Gate, ids: Collection[str]) -> Iterator[Group]:
    """What moved, one group for every origin."""
    for origin, same in groupby(found.groups, key=lambda group: group.origin):
        entries = tuple(
            Entry(
                title=printable(title(group)),
                case=group.example if group.example in ids else "",
                lines=tuple(group_lines(group)),
                command=printable(group.command),
            )
            for group in same
        )
        yield Group(title=f"moved, {phrase(origin)} ({len(entries)})", entries=entries)


def _moved(found: Gate) -> Iterator[Listing]:
    """In how many cases what moved, by origin."""
    if found.groups:
        columns, *rows = summary_rows(found)
        yield Listing(title=printable(what_moved(found)), columns=columns, rows=tuple(rows))


def _groups(reasons: Sequence[Reason], ids: Collection[str]) -> Iterator[Group]:
    """The reasons of one kind together; what does not gate is folded."""
    for (gates, kind), same in groupby(reasons, key=lambda reason: (reason.gates, reason.kind)):
        entries = tuple(_entry(reason, ids) for reason in same)
        title = f"{'gates' if gates else 'does not gate'}: {kind.phrase} ({len(entries)}) [{kind.value}]"
        yield Group(title=title, entries=entries, folded=not gates)


def _entry(reason: Reason, ids: Collection[str]) -> Entry:
    name, is_known = reason.case or "the run", reason.case in ids
    values = f"{reason.baseline} -> {reason.candidate}" if reason.baseline or reason.candidate else ""
    title = " ".join(filter(None, ("" if is_known else name, "" if values in reason.what else values)))
    return Entry(
        title=printable(title),
        case=printable(name) if is_known else "",
        lines=tuple(printable(line) for line in (reason.pardon, reason.what, *reason.details) if line),
        command=printable(reason.command),
    )


def _notes(found: Gate) -> Iterator[Group]:
    if found.notes:
        entries = tuple(Entry(title=printable(note.text), command=printable(note.command)) for note in found.notes)
        yield Group(title="notes", entries=entries)


def _sides(found: Gate) -> Iterator[Listing]:
    """The two sides, and what differs between their environments."""
    rows = [
        (name, *(printable(str(getattr(side, name))) or "unknown" for side in (found.baseline, found.candidate)))
        for name in found.baseline.__struct_fields__
    ]
    yield Listing(title="the two sides", columns=("", "baseline", "candidate"), rows=tuple(rows))
    if found.differences:
        differ = tuple((printable(short_digests(each)),) for each in found.differences)
        yield Listing(title="environments", columns=("what differs",), rows=differ)
