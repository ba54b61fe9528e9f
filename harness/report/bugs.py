"""What commands about bugs print: the answer of a reproduction, the smallest case and what it needs. Text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.bugs.bisect import Bisected
from harness.bugs.reproduce import Reproduced
from harness.bugs.shrink import Attempt, Shrunk
from harness.jsonform import to_json
from harness.matrix.axes import AXES, axis_values, own_axes, shown_value
from harness.matrix.bugfile import BugFile
from harness.matrix.caseid import case_id
from harness.plural import counted
from harness.report.sections import printable, wrapped
from harness.report.wording import aligned

WIDTH = 78
_NO_BREAK = "\N{NO-BREAK SPACE}"


def bugs_text(bugs: Sequence[BugFile]) -> str:
    """A table of bug files: id, status, symptom, what detects them, title."""
    rows = [
        (each.id, each.bug.status, each.bug.symptom, ", ".join(each.bug.detected_by) or "-", printable(each.bug.title))
        for each in bugs
    ]
    counts = {
        status: sum(each.bug.status == status for each in bugs) for status in ("live", "fixed", "open", "refused")
    }
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    total = f"{counted(len(bugs), 'bug')}{f': {told}' if told else ''}\n"
    return "\n".join(filter(None, [aligned(rows), total]))


def bugs_json(bugs: Sequence[BugFile]) -> bytes:
    """The bug files as JSON, each with the id of its case and of its file."""
    return to_json([_bug(each) for each in bugs], indent=2) + b"\n"


def reproduced_text(found: Reproduced) -> str:
    """The answer; where the failure is another one, both side by side; then what differs from the report."""
    lines = [
        f"{found.answer}: {found.found.case_id}",
        *_pair("expected", found.expected),
        *_pair("found", found.found.text),
    ]
    if found.found.message and found.answer != "not reproduced":
        lines += _pair("says", found.found.message)
    if found.differs:
        lines += ["differs from the report:", *(f"  {each}" for each in found.differs)]
    return "\n".join([*lines, ""])


def bisected_text(found: Bisected) -> str:
    """The version with which the failure comes or goes beside the one before, what lies between, and what was tried."""
    what = "that fails" if found.after.answer == "bad" else "without the failure"
    lines = [f"the first version {what}: {found.package} {_one_of(found)}"]
    for told in (found.before, found.after):
        lines += _pair(told.answer, f"{told.version}: {told.why}")
        lines += _pair("", told.says) if told.answer == "bad" and told.says else []
    if found.unknown:
        lines += [line for told in found.unknown for line in _pair("skipped", f"{told.version}: {told.why}")]
    tried = ", ".join(f"{told.version} {told.answer}{' (kept)' * told.cached}" for told in found.tried)
    return "\n".join([*lines, *_pair("tried", tried), ""])


def _one_of(found: Bisected) -> str:
    versions = [told.version for told in (*found.unknown, found.after)]
    return " or ".join(filter(None, (", ".join(versions[:-1]), versions[-1])))


def shrunk_text(found: Shrunk, *, command: str = "") -> str:
    """The smallest case and the command that runs it, what the failure needs and does not depend on, with the runs."""
    took = f"{found.wall_s:.0f} s wall, {found.cpu_s:.0f} s CPU"
    ended = "" if found.complete else "; the budget ended it, so a smaller case may fail alike"
    lines = [
        f"smallest case: {case_id(found.case)}",
        *_pair("was", case_id(found.first)),
        *_pair("fails by", found.signature.text),
        *_pair("says", found.message),
        *_pair("run it by", command),
        "",
        *_needs(found),
        *_independent(found),
        "",
        f"{counted(len(found.attempts), 'smaller case')} tried, {found.ran} run now, {took}{ended}",
    ]
    return "\n".join([*lines, ""])


def shrunk_json(found: Shrunk) -> bytes:
    """The same as JSON, with every attempt."""
    tree: dict[str, Any] = {
        "first": case_id(found.first),
        "case": case_id(found.case),
        "axes": own_axes(found.case),
        "signature": found.signature,
        "message": found.message,
        "complete": found.complete,
        "ran": found.ran,
        "cpu_s": found.cpu_s,
        "wall_s": found.wall_s,
        "needed": found.needed,
        "attempts": found.attempts,
    }
    return to_json(tree, indent=2) + b"\n"


def _needs(found: Shrunk) -> Iterable[str]:
    """What the failure needs: by axis, the smaller values with which it is not the same, and what was seen instead."""
    values, by_axis = axis_values(found.case), _by_axis(found.needed)
    if by_axis:
        yield "needs"
    for name, attempts in by_axis.items():
        number = isinstance(values[name], int) and not isinstance(values[name], bool)
        yield f"  {name} {shown_value(values[name])}{' or more' if number else ''}"
        for each in attempts:
            told = ", ".join(f"{axis} {shown_value(value)}" for axis, value in each.changes.items())
            yield from _indented(f"with {told}: {each.result.text}  [{each.result.case_id}]", 4)


def _independent(found: Shrunk) -> Iterable[str]:
    """The axes that were changed on the way: the failure is the same without."""
    first, last = axis_values(found.first), axis_values(found.case)
    changed = [
        f"{name} ({shown_value(first[name])} -> {shown_value(last[name])})"
        for name in AXES
        if first[name] != last[name]
    ]
    whole = [each.replace(" ", _NO_BREAK) for each in changed]
    lines = _indented(f"does not depend on {', '.join(whole)}", 0) if changed else []
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _by_axis(attempts: Sequence[Attempt]) -> Mapping[str, list[Attempt]]:
    groups: dict[str, list[Attempt]] = {}
    for each in attempts:
        main = next(name for name in AXES if name in each.changes)
        groups.setdefault(main, []).append(each)
    return groups


def _pair(name: str, text: str) -> list[str]:
    return wrapped(printable(text), WIDTH, f"  {name:<10}", " " * 12)


def _indented(text: str, indent: int) -> list[str]:
    return wrapped(printable(text), WIDTH, " " * indent, " " * (indent + 2))


def _bug(bug: BugFile) -> dict[str, Any]:
    return {
        "id": bug.id,
        "file": bug.where,
        "case": None if bug.case is None else case_id(bug.case),
        "runs": bug.runs,
        "bug": bug.bug,
        "missing": dict(bug.missing),
        "refused": dict(bug.refused),
    }
