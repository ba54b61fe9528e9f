"""The history of cases as text: a row for every run of one case, or a line for each of many."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from harness.jsonform import to_json
from harness.plural import counted
from harness.report.sections import Table, printable
from harness.report.sparkline import sparkline
from harness.report.wording import aligned
from harness.studies.history import History, Moment
from harness.timestamp import to_the_minute

_SHARES = ("loss apart", "local", "parity", "flushed")
MOMENT_COLUMNS = ("started", "name", "commit", "verdict", *_SHARES, "s", "wire", "saved")
_NUMBERS = range(4, 11)  # right-aligned columns
_SHOWN = 60  # characters of one difference of environments: models of CPUs are long
_UNITS = ("B", "kB", "MB", "GB")


def history_text(history: History, *, width: int) -> str:
    """Every run of a case, with what changed before it; the rows are blocks where `width` is too small for a table."""
    rows = [moment_row(moment) for moment in history.moments]
    head, *lines = aligned([MOMENT_COLUMNS, *rows], right=_NUMBERS).splitlines()
    wide = max(map(len, (head, *lines))) <= width
    blocks = lines if wide else [_block(row) for row in rows]
    told = [
        "\n".join([*_wrapped(_changes(moment), width), block, *_wrapped(_moved(moment), width)])
        for moment, block in zip(history.moments, blocks, strict=True)
    ]
    warnings = _wrapped(_warnings(history), width)
    return printable("\n".join([*([head] if wide else []), *told, *_curves(history, width), *warnings]))


def histories_text(found: Sequence[History], *, width: int) -> str:
    """A line for every case: how often it was run, how it ended, its last change; a block where that is too wide."""
    rows = [_summary(history) for history in found]
    table = aligned(rows)
    if max(map(len, table.splitlines())) <= width:
        return printable(table)
    return printable(
        "\n".join(line for name, *facts in rows for line in (name, *_wrapped(f"  {'  '.join(facts)}", width)))
    )


def histories_json(found: Sequence[History]) -> bytes:
    """The same as JSON, with every exact number of every run."""
    return to_json([_document(history) for history in found], indent=2) + b"\n"


def _document(history: History) -> dict[str, object]:
    return {
        "case": history.case_id,
        "flaky": history.is_flaky,
        "nondeterministic": history.is_nondeterministic,
        "verdicts": {verdict.value: count for verdict, count in history.verdicts.items()},
        "runs": [
            {
                "started": moment.run.start.started,
                "name": moment.run.start.name,
                "path": str(moment.run.path),
                "environment": moment.run.start.environment,
                "changes": moment.changes,
                "moved": moment.moved,
                "repeats": moment.repeats,
                "verdict": moment.case.verdict,
                "seconds": moment.case.seconds,
                "numbers": moment.case.measured,
            }
            for moment in history.moments
        ],
    }


def _summary(history: History) -> tuple[str, ...]:
    verdicts = ", ".join(f"{count} {verdict.value}" for verdict, count in history.verdicts.items())
    flags = [*(["FLAKY"] if history.is_flaky else []), *(["NONDETERMINISTIC"] if history.is_nondeterministic else [])]
    change = history.last_change
    last = "no change" if change is None else f"last change {change.run.start.started[:10] or '?'}: {_what(change)}"
    return (history.case_id, counted(len(history.moments), "run"), verdicts, " ".join(flags) or "-", last)


def _what(change: Moment) -> str:
    moved = ", ".join(change.moved)
    return "; ".join(filter(None, [change.case.verdict.value, moved, _environment(change)]))


def moment_row(moment: Moment) -> tuple[str, ...]:
    """A case in one run, a text for each of MOMENT_COLUMNS."""
    numbers, environment = moment.case.measured, moment.run.start.environment
    names = ("loss_distance", "local_parity", "parity", "flushed")
    shares = [getattr(numbers, name) if numbers else None for name in names]
    sizes = (numbers.wire_bytes, numbers.saved_bytes) if numbers else (None,) * 2
    return (
        to_the_minute(moment.run.start.started),
        moment.run.start.name or "-",
        (environment.short_commit if environment is not None else "") or "-",
        moment.case.verdict.value,
        *("-" if each is None else f"{each:.3g}" for each in shares),
        f"{moment.case.seconds:.1f}",
        *map(size_words, sizes),
    )


def history_table(history: History) -> Table:
    """Every run of a case, and what changed with it, for a page."""
    rows = tuple((*moment_row(moment), "; ".join(moment_changes(moment))) for moment in history.moments)
    return Table(columns=(*MOMENT_COLUMNS, "what changed"), rows=rows, verdict=MOMENT_COLUMNS.index("verdict"))


def _block(row: Sequence[str]) -> str:
    started, name, commit, verdict, *numbers = row
    named = [f"{column} {value}" for column, value in zip(MOMENT_COLUMNS[4:], numbers, strict=True) if value != "-"]
    origin = ", ".join(each for each in (name, commit) if each != "-")
    lines = [f"{started}  {verdict}", *([f"  {origin}"] if origin else [])]
    return "\n".join([*lines, f"  {', '.join(named[:5])}", *([f"  {', '.join(named[5:])}"] if named[5:] else [])])


def moment_changes(moment: Moment) -> tuple[str, ...]:
    """What changed of the environment before a run, and which exact numbers changed then."""
    return tuple(filter(None, (_changes(moment).strip().removesuffix(":"), _moved(moment).strip())))


def _changes(moment: Moment) -> str:
    words = _environment(moment)
    return f"  now {words}:" if words else ""


def _environment(moment: Moment) -> str:
    """What changed of the environment, but for the commit, which has a column."""
    told = [each for each in moment.changes if not each.startswith(("commit ", "changes "))]
    more = ["uncommitted changes"] if any(each.startswith("changes ") for each in moment.changes) else []
    return ", ".join([*(each if len(each) <= _SHOWN else f"{each[: _SHOWN - 3]}..." for each in told), *more])


def _moved(moment: Moment) -> str:
    if not moment.moved:
        return ""
    where = "NONDETERMINISTIC, in the same environment" if moment.repeats else "changed with it"
    return f"  {where}: {', '.join(moment.moved)}"


def _wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, each as indented as the first one; none of an empty text."""
    return [line for each in text.splitlines() for line in wrap(each, width, subsequent_indent="    ")]


def _curves(history: History, width: int) -> list[str]:
    """The distance of the losses and the seconds over all runs, where there are several and they fit."""
    count = len(history.moments)
    if not 1 < count <= width - 12:
        return []
    distances = [moment.case.measured.loss_distance if moment.case.measured else None for moment in history.moments]
    seconds = [moment.case.seconds for moment in history.moments]
    return ["", f"loss apart  {sparkline(distances)}", f"seconds     {sparkline(seconds)}"]


def _warnings(history: History) -> str:
    flaky = "FLAKY: it ended differently in one environment."
    moved = "NONDETERMINISTIC: exact numbers changed in one environment."
    return "\n".join([*([flaky] if history.is_flaky else []), *([moved] if history.is_nondeterministic else [])])


def size_words(count: int | None) -> str:
    """Bytes for people, of three digits: "1.23 MB"."""
    if count is None:
        return "-"
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if value >= 100 else f"{value:.3g} {_UNITS[unit]}"
