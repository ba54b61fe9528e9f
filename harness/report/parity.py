"""The parity of layouts as a table: a row for each, for terminals, pull requests and pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from harness.plural import counted
from harness.report.case import case_sections
from harness.report.ci import Element, Told, junit_report
from harness.report.curves import curve_sections
from harness.report.html.page import Front, html_report
from harness.report.sections import Block, Entry, Items, Section, Table, Verbatim, markdown, text_of
from harness.result import RunResult
from harness.studies.layouts import Parity, Row, Word, without_refused
from harness.verdict import ExitCode, Verdict

_EVERY = 2  # steps; of more, the first and the last are shown
_MEANS = {
    "equal": "every gradient and updated parameter has the bits of one rank",
    "rounding": "within what sums in another order were measured to differ by",
}
_CHANGED = {
    "rounding": "other bits than the base, and both as close to the same one rank as rounding explains",
    "moved": "right on both sides, but one rank trains otherwise too: the model, its data or a package changed",
    "wrong in both": "not new, and wrong all the same",
    "new": "the base has no such target",
    "not compared": "one side was not judged",
}
_UNSEEN = (
    "kernels of a GPU: fast accumulation, pointer alignment, how cuBLAS and Triton round",
    "streams: their order, overlap, races on symmetric memory, and the order in which NCCL sums",
    "speed, and memory besides that of tensors",
)

# Where a word is not what the verdict alone says.
_JUNIT: Mapping[tuple[Verdict, Word], Element] = {
    (Verdict.CRASH, "refused"): "skipped",
    (Verdict.PASSED, "wrong"): "failure",
    (Verdict.PASSED, "not judged"): "error",
}

_Cell = Callable[[Row], str]


def parity_table(found: Parity) -> Table:
    """A row for every layout; losses in nats, distances relative to the norm of the gradient.

    Of the base only what differs is shown, at the last step.
    """
    count = max(len(row.losses) for row in found.rows)
    steps = [*range(1, count + 1)] if count <= _EVERY else [1, count]
    columns: dict[str, _Cell] = {"layout": lambda row: row.layout, "verdict": lambda row: row.word}
    if found.against:
        steps = steps[-1:]
        columns |= {"base": _of_base(lambda row: row.word), "change": lambda row: row.change}
    for name, cell in (("loss", _loss), ("norm", _norm)):
        for step in steps:
            columns[f"{name} {step}"] = cell(step)
            if found.against:
                columns[f"base {name}"] = _of_base(cell(step))
    columns["off"] = _off
    if found.against:
        columns["base off"] = _of_base(_off)
    columns |= {"allowed": _allowed, "worst gradient, or why": _why}
    judges = tuple(dict.fromkeys(name for row in found.rows for name in row.judges))
    columns |= {name: _of_judge(name) for name in judges}
    shown = {name: [cell(row) for row in found.rows] for name, cell in columns.items()}
    shown = {name: cells for name, cells in shown.items() if any(cells) or not name.startswith("base")}
    words = ("layout", "verdict", "base", "change", "worst gradient, or why", *judges)
    return Table(
        columns=tuple(shown),
        rows=tuple(zip(*shown.values(), strict=True)),
        right=tuple(at for at, name in enumerate(shown) if name not in words),
        verdict=1,
    )


def _of_base(cell: _Cell) -> _Cell:
    """What the base shows, where that is something else."""
    return lambda row: "" if row.base is None or cell(row.base) == cell(row) else cell(row.base)


def _of_judge(name: str) -> _Cell:
    return lambda row: row.judges[name].text if name in row.judges else "-"


def _loss(step: int) -> _Cell:
    return lambda row: f"{row.losses[step - 1]:.5f}" if step <= len(row.losses) else "-"


def _norm(step: int) -> _Cell:
    return lambda row: f"{row.grad_norms[step - 1]:.5g}" if step <= len(row.grad_norms) else "-"


def _off(row: Row) -> str:
    return "-" if row.worst_gradient is None else f"{row.worst_gradient.distance:.2g}"


def _allowed(row: Row) -> str:
    worst = row.worst_gradient
    return "-" if worst is None or worst.allowed is None else f"{worst.allowed:.2g}"


def _why(row: Row) -> str:
    worst = row.worst_gradient
    return row.why or row.moved or (f"{worst.fqn}, step {worst.step}" if worst is not None and worst.distance else "")


def _answer(found: Parity) -> str:
    """The verdict on all layouts, on one line."""
    wrong = [row.layout for row in found.rows if row.word == "wrong"]
    said = f"{counted(len(wrong), 'layout')} {'is' if len(wrong) == 1 else 'are'} wrong: {', '.join(wrong)}"
    open_words = [row.word for row in found.rows if row.word in ("not judged", "not run", "infra", "changed")]
    curve = f"{found.golden.name} is {found.golden.word}" if found.golden is not None else ""
    line = "; ".join(filter(None, (f"parity: {said if wrong else 'no layout is wrong'}", _counts(open_words), curve)))
    changes = [row.change for row in found.rows if row.change]
    return f"{line}; against {found.against}: {_counts(changes)}" if found.against else line


def _counts(words: Sequence[str]) -> str:
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))


def _line(found: Parity) -> str:
    words = [row.word for row in found.rows]
    return f"{counted(len(words), 'layout')}: {_counts(words)}; {found.seconds:.0f} s"


def _notes(found: Parity) -> Iterator[Block]:
    words, changes = {row.word for row in found.rows}, {row.change for row in found.rows}
    yield Items(
        (
            *(f"{word}: {means}" for word, means in _MEANS.items() if word in words),
            *(f"change, {word}: {means}" for word, means in _CHANGED.items() if word in changes),
        )
    )
    yield _without_refused(found)
    yield f"left out, beyond the budget: {', '.join(found.left_out)}" if found.left_out else Section()


def _without_refused(found: Parity) -> Block:
    """How a target trains that refuses what is usual of TP."""
    axes = without_refused(found.rows)
    options = " ".join(f"--no-{name.replace('_', '-')}" for name in axes)
    lacks = f"the target refuses every layout under TP with {' and '.join(axes)}: if it has none, add `{options}`"
    return lacks if axes else Section()


def parity_sections(found: Parity, run: RunResult) -> list[Block]:
    """The verdict, the table, what is wrong with its layouts, and the totals."""
    return [_answer(found), _titled(found), *_golden(found), *_wrong(found, run), *_notes(found), _line(found)]


def _titled(found: Parity) -> Section:
    return Section(title=f"{found.case_id}: layouts against one rank", blocks=(parity_table(found),))


def _golden(found: Parity) -> Sequence[Block]:
    return () if found.golden is None else curve_sections([found.golden])


def _wrong(found: Parity, run: RunResult) -> Sequence[Block]:
    wrong = {row.case_id for row in found.rows if row.word == "wrong"}
    return case_sections([each for each in run.results if each.case_id in wrong])


def _first(found: Parity) -> Iterator[Entry]:
    """What is wrong first with every wrong layout, in the base too, and the command that runs it alone."""
    for row in found.rows:
        if row.word == "wrong":
            both = row.base is not None and row.base.word == "wrong"
            before = (f"in the base too: {row.base.why}",) if both and row.base is not None else ()
            yield Entry(title=f"{row.layout}: {row.why}", lines=before, command=row.command)


def _limits(found: Parity) -> Iterator[Block]:
    if found.software.get("device") == "cpu":
        yield "no GPU was used; what that cannot see:"
        yield Items(_UNSEEN)


def parity_markdown(found: Parity, run: RunResult) -> str:
    """What a bot posts: the verdict, the table, what is wrong, with the rest folded, and what was not looked at."""
    details = _wrong(found, run)
    folded = [Section(title="all findings", blocks=(Verbatim(text_of(details).rstrip(), "text"),), folded=True)]
    body = (
        f"`{found.case_id}`: layouts against one rank",
        parity_table(found),
        *_golden(found),
        *_first(found),
        *(folded if details else ()),
        *_notes(found),
        _line(found),
        *_limits(found),
    )
    return markdown([Section(title=_answer(found), blocks=body)])


def parity_junit(found: Parity, run: RunResult) -> bytes:
    """JUnit with the words of the table: a layout that the target itself refuses is skipped, and says why."""
    rows = {row.case_id: row for row in found.rows}
    told = {
        each.case_id: Told(element, rows[each.case_id].why)
        for each in run.results
        if (element := _JUNIT.get((each.verdict, rows[each.case_id].word))) and not each.excused
    }
    return junit_report(run, told)


def parity_page(found: Parity, run: RunResult) -> bytes:
    """The page of the run, with the table above its cases."""
    blocks = (parity_table(found), *_golden(found), *_first(found), *_notes(found), *_limits(found))
    section = Section(name="parity", title="Layouts against one rank", blocks=blocks)
    good = found.exit_code is ExitCode.GOOD
    state, line = "good" if good else "not good", f"{_answer(found)}. {_line(found)}"
    return html_report(run, front=Front(title=found.case_id, state=state, good=good, line=line, section=section))
