"""The parity of layouts as a table: a row for each, for terminals, pull requests and pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.plural import counted
from harness.report.case import case_sections
from harness.report.html.page import Front, html_report
from harness.report.sections import Block, Items, Section, Table, Verbatim, markdown, text_of
from harness.result import RunResult
from harness.studies.layouts import Parity, Row
from harness.verdict import ExitCode

_EVERY = 2  # steps; of more, the first and the last are shown
_MEANS = (
    "equal: every gradient and updated parameter has the bits of one rank",
    "rounding: within what sums in another order were measured to differ by",
)


def parity_table(found: Parity) -> Table:
    """A row for every layout; losses in nats, distances relative to the norm of the gradient."""
    steps = sorted({step for count in {len(row.losses) for row in found.rows} for step in _shown(count)})
    return Table(
        columns=(
            "layout",
            "verdict",
            *(f"loss {step}" for step in steps),
            *(f"norm {step}" for step in steps),
            "off",
            "allowed",
            "worst gradient, or why",
        ),
        rows=tuple(tuple(_cells(row, steps)) for row in found.rows),
        right=tuple(range(2, 4 + 2 * len(steps))),
        verdict=1,
    )


def _shown(steps: int) -> tuple[int, ...]:
    return tuple(range(1, steps + 1)) if steps <= _EVERY else (1, steps)


def _cells(row: Row, steps: Sequence[int]) -> Iterator[str]:
    worst = row.worst_gradient
    yield from (row.layout, row.word)
    for numbers, form in ((row.losses, ".5f"), (row.grad_norms, ".5g")):
        yield from (f"{numbers[step - 1]:{form}}" if step <= len(numbers) else "-" for step in steps)
    yield "-" if worst is None else f"{worst.distance:.2g}"
    yield "-" if worst is None or worst.allowed is None else f"{worst.allowed:.2g}"
    yield row.why or (f"{worst.fqn}, step {worst.step}" if worst is not None and worst.distance else "")


def _line(found: Parity) -> str:
    words = [row.word for row in found.rows]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    return f"{counted(len(words), 'layout')}: {counts}; {found.seconds:.0f} s"


def _notes(found: Parity) -> Iterator[Block]:
    yield Items(tuple(text for text in _MEANS if text.partition(":")[0] in {row.word for row in found.rows}))
    yield f"left out, beyond the budget: {', '.join(found.left_out)}" if found.left_out else Section()


def parity_sections(found: Parity, run: RunResult) -> list[Block]:
    """The table, what is wrong with its layouts, and the totals."""
    return [_titled(found), *_wrong(found, run), *_notes(found), _line(found)]


def _titled(found: Parity) -> Section:
    return Section(title=f"{found.case_id}: layouts against one rank", blocks=(parity_table(found),))


def _wrong(found: Parity, run: RunResult) -> Sequence[Block]:
    wrong = {row.case_id for row in found.rows if row.word == "wrong"}
    return case_sections([each for each in run.results if each.case_id in wrong])


def parity_markdown(found: Parity, run: RunResult) -> str:
    """To paste: the table, the rest folded."""
    details = _wrong(found, run)
    folded = [Section(title="what is wrong", blocks=(Verbatim(text_of(details).rstrip(), "text"),), folded=True)]
    return markdown([_titled(found), *_notes(found), _line(found), *(folded if details else ())])


def parity_page(found: Parity, run: RunResult) -> bytes:
    """The page of the run, with the table above its cases."""
    section = Section(name="parity", title="Layouts against one rank", blocks=(parity_table(found), *_notes(found)))
    good = found.exit_code is ExitCode.GOOD
    state = "good" if good else "not good"
    return html_report(
        run, front=Front(title=found.case_id, state=state, good=good, line=_line(found), section=section)
    )
