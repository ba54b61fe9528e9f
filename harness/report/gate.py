"""The answer of a gate: the decision and the kinds of reasons first, then every reason, then what is worth knowing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from harness.gate.gate import Gate, Note
from harness.gate.reason import Kind, Reason
from harness.plural import counted
from harness.report.grouping import groups_text, origins_text, summary_rows, what_moved
from harness.report.sections import printable, wrapped

SHOWN = 5  # reasons of one kind in full; the others by id. JSON has all
SHOWN_DETAILS = 4  # lines of a reason
NARROWEST, WIDEST = 60, 100
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{4,}\b")  # told by its first digits


def gate_text(found: Gate, *, width: int) -> str:
    """The answer for a terminal of this width: the first lines decide."""
    width = min(max(width, NARROWEST), WIDEST)
    parts = [_head(found, width), _kinds("gates:", found.gating, width), _kinds("does not gate:", found.others, width)]
    parts += [_details(each, width) for each in (found.gating, found.others)]
    parts += ["\n".join(line for note in found.notes for line in _note(note, width)), groups_text(found, width)]
    return printable("\n\n".join(filter(None, parts))) + "\n"


def gate_markdown(found: Gate) -> str:
    """The answer for a pull request or a summary page of CI."""
    parts = [f"## {answer(found)}: {sides_text(found)}", "\n".join(f"- {_code(line)}" for line in _facts(found))]
    if found.groups:
        parts += [f"### {what_moved(found)}", _cells(summary_rows(found)), _fenced(origins_text(found, WIDEST))]
    for title, reasons in (("gates", found.gating), ("does not gate", found.others)):
        if reasons:
            parts += [f"### {title}", _table(reasons)]
            parts.append(_fenced(_details(reasons, WIDEST)))
    if found.notes:
        parts.append("\n".join(f"- {_code(each.text)}{_command(each)}" for each in found.notes))
    return printable("\n\n".join(parts)) + "\n"


def answer(found: Gate) -> str:
    """The decision in one word."""
    return "GO" if found.go else "NO-GO"


def sides_text(found: Gate) -> str:
    """What was compared with what."""
    return f"{found.candidate.name} against {found.baseline.name}"


def _head(found: Gate, width: int) -> str:
    return "\n".join(
        [f"{answer(found)}: {sides_text(found)}", *(_wrapped(line, width, "", "  ") for line in _facts(found))]
    )


def _facts(found: Gate) -> Iterator[str]:
    """How much was compared, how exactly, and what differs besides the results."""
    *compared, times = facts(found)
    yield from compared
    if found.differences:
        yield short_digests(f"differs: {', '.join(found.differences)}")
    yield times


def facts(found: Gate) -> Iterator[str]:
    """How many reasons there are, how much was compared and how exactly, and the times."""
    gating, others = len(found.gating), len(found.others)
    gates = f"{counted(gating, 'reason')} {'gates' if gating == 1 else 'gate'}" if gating else "no reason gates"
    yield gates + (f", {others} {'does' if others == 1 else 'do'} not" if others else "")
    yield (
        f"{found.candidate.good} of {counted(found.candidate.cases, 'case')} good, {found.candidate.checks} checks "
        f"judged (baseline: {found.baseline.good} of {found.baseline.cases}, {found.baseline.checks}); numbers of "
        f"{counted(found.compared, 'case')} compared"
    )
    if found.inexact:
        yield f"compared by tolerance only, not to the bit: {'; '.join(found.inexact)}"
    yield f"times: {_times(found)}"


def _times(found: Gate) -> str:
    """What became of the times, or why they were not compared."""
    if found.times is not None:
        return found.times.text
    if not found.compared:
        return "not compared, no case is good on both sides"
    return f"not compared, {'other hardware' if found.inexact else 'no case was good at its first attempt'}"


def short_digests(text: str) -> str:
    """The text with the first digits of every digest."""
    return _DIGEST.sub(r"\1", text)


def _kinds(title: str, reasons: Sequence[Reason], width: int) -> str:
    """One line for every kind of reason."""
    if not reasons:
        return ""
    lines = []
    for kind, group in groupby(reasons, key=lambda reason: reason.kind):
        same = list(group)
        waived = sum(bool(reason.waiver) for reason in same)
        note = f" ({waived} of them waived)" if waived else ""
        lines.append(_wrapped(f"{len(same):>4}x {kind.phrase}{note} [{kind.value}]", width, "", "      "))
    return "\n".join([title, *lines])


def _details(reasons: Sequence[Reason], width: int) -> str:
    blocks = []
    for kind, group in groupby(reasons, key=lambda reason: reason.kind):
        same = list(group)
        blocks.append("\n".join([f"{kind.phrase}:", *_reasons(same, width)]))
    return "\n\n".join(blocks)


def _reasons(same: Sequence[Reason], width: int) -> Iterator[str]:
    alike: dict[str, list[Reason]] = {}
    for reason in same:
        alike.setdefault(reason.signature or reason.case or reason.what, []).append(reason)
    groups = list(alike.values())
    for first, *others in groups[:SHOWN]:
        yield from _reason(first, width)
        if others:
            yield _wrapped(f"the same in {', '.join(each.case or each.what for each in others)}", width, "  ", "    ")
    for reason in (reason for group in groups[SHOWN:] for reason in group):
        yield f"  {reason.case or reason.what}"


def _reason(reason: Reason, width: int) -> Iterator[str]:
    """The case, what is wrong, the details, and how to see it again."""
    values = f": {reason.baseline} -> {reason.candidate}" if reason.kind in _VERDICTS else ""
    yield f"  {reason.case or 'the run'}{values}"
    hidden = len(reason.details) - SHOWN_DETAILS
    more = f"and {hidden} more of this kind" if hidden > 0 else ""
    for line in (reason.waiver, reason.what, *reason.details[:SHOWN_DETAILS], more):
        if line:
            yield _wrapped(line, width, "    ", "      ")
    if reason.command and reason.gates:
        yield f"    $ {reason.command}"


def _note(note: Note, width: int) -> Iterator[str]:
    yield _wrapped(f"note: {note.text}", width, "", "  ")
    if note.command:
        yield f"    $ {note.command}"


def _command(note: Note) -> str:
    return f": `{note.command}`" if note.command else ""


_VERDICTS = (
    Kind.NEW_FAILURE, Kind.OTHER_FAILURE, Kind.KNOWN_FAULT, Kind.UNEXPECTED_PASS, Kind.STILL_FAILING, Kind.FAULT_GONE,
    Kind.EXPLAINED, Kind.FIXED, Kind.REQUIRED,
)  # fmt: skip


def _table(reasons: Iterable[Reason]) -> str:
    rows = []
    for kind, group in groupby(reasons, key=lambda reason: reason.kind):
        same = list(group)
        rows.append(f"| {len(same)} | {kind.phrase} | `{same[0].case or 'the run'}` | {_code(same[0].what)} |")
    return "\n".join(["| | what | first | |", "|---:|---|---|---|", *rows])


def _cells(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row has its columns; all but the first are numbers."""
    first, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([first, f"|---|{'---:|' * (len(rows[0]) - 1)}", *others])


def _fenced(text: str) -> str:
    return "```text\n" + text.replace("```", "'''") + "\n```"


def _code(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _wrapped(text: str, width: int, first: str, later: str) -> str:
    return "\n".join(wrapped(text, width, first, later))
