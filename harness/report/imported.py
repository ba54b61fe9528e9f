"""An imported bug as text for the terminal and as JSON: its lists are never mixed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

import msgspec

from harness.bugs.facts import shown
from harness.bugs.importing import ImportedBug
from harness.hints import run_file
from harness.jsonform import to_json
from harness.matrix.axes import axis_values
from harness.matrix.caseid import case_id
from harness.matrix.rules import expected_refusal

_WIDTH = 118
_INDENT = 4


def imported_text(found: ImportedBug, *, file: str | None) -> str:
    """What was found in a report, list by list. `file`: where the bug file was written; None where nothing was."""
    bug = found.bug
    lines = [f"{bug.id}: {bug.bug.title}", f"  {bug.bug.link}", f"  seen: {_seen(found)}"]
    lines.append(f"  spellings of {found.day} ({found.day_from})")
    for name in ("stated", "derived", "assumed", "missing", "refused"):
        lines += _list(name, getattr(bug, name), _values(found, name))
    if found.ignored:
        lines += ["ignored", *(_wrapped(words) for words in found.ignored)]
    return "\n".join((*lines, *_end(found, file), ""))


def imported_json(found: ImportedBug, *, file: str | None) -> bytes:
    """The same as JSON."""
    bug = found.bug
    tree = {
        "id": bug.id,
        "file": file,
        **msgspec.to_builtins(msgspec.structs.asdict(bug.bug)),
        "date": found.day,
        "date_from": found.day_from,
        "case": None if bug.case is None else case_id(bug.case),
        "axes": {} if bug.case is None else axis_values(bug.case),
        **{name: getattr(bug, name) for name in ("stated", "derived", "assumed", "missing", "refused", "full_size")},
        "ignored": found.ignored,
    }
    return to_json(tree, indent=2) + b"\n"


def _seen(found: ImportedBug) -> str:
    bug = found.bug.bug
    parts = [bug.symptom.replace("_", " ")]
    parts += [f"first in step {bug.first_bad_step}"] if bug.first_bad_step else []
    parts += [bug.hardware] if bug.hardware else []
    parts += [f"{name} {version}" for name, version in bug.versions.items()]
    return f"{', '.join(parts)}{f'; {bug.message}' if bug.message else ''}"


def _values(found: ImportedBug, table: str) -> Mapping[str, object]:
    """The value that a list speaks of: before the model was made smaller, except in `derived`."""
    case = found.bug.case
    if case is None or table in ("missing", "refused"):
        return {}
    values = {name: value for name, value in axis_values(case).items() if name not in found.bug.missing}
    return values if table == "derived" else {**values, **found.bug.full_size}


def _list(name: str, table: Mapping[str, str], values: Mapping[str, object]) -> Iterator[str]:
    if table:
        yield name
    for key, words in table.items():
        value = f" = {shown(values[key])}" if key in values else ""
        told = f'"{words}"' if name == "stated" else words.removeprefix(f"{shown(values.get(key))}: ")
        yield _wrapped(f"{key}{value}: {told}")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent=" " * _INDENT, break_long_words=False)


def _end(found: ImportedBug, file: str | None) -> Iterator[str]:
    case = found.bug.case
    if case is None:
        yield "refused: no case can have this bug"
    else:
        refusal = expected_refusal(case)
        yield f"case: {case_id(case)}"
        if refusal is not None:
            yield _wrapped(f"it must be refused: {refusal.reason}")
    if file is not None:
        yield f"wrote {file}"
        if found.bug.missing:
            yield "to do: answer each question in [case.axes], and remove its line from [missing]"
        elif case is not None:
            yield f"run it: {run_file(file)}"
