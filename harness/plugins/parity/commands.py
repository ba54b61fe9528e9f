"""`fp8-harness parity`; and the table of layouts, or of curves of one job, for terminals, pull requests and pages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import click
import msgspec

from harness.cli import options
from harness.cli.new import axes_parameter
from harness.errors import HarnessError
from harness.matrix.axes import case_from_axes, own_values, said
from harness.matrix.case import Case
from harness.matrix.caseid import parse_layout
from harness.matrix.layout import MESH_AXES
from harness.plugins.parity.against import Against
from harness.plugins.parity.curves import read_curve
from harness.plugins.parity.layouts import (
    BUDGET_S,
    MARGIN,
    CurveRow,
    CurveWord,
    Parity,
    Row,
    check_job,
    compare_layouts,
    judge_each,
    usual_layouts,
    with_golden,
    without_refused,
)
from harness.project import Project
from harness.registry import module_of
from harness.report.case import case_sections
from harness.report.ci import Element, JUnitElement, junit_report
from harness.report.html.page import Front, html_report
from harness.report.sections import Block, Entry, Items, Section, Table, Verbatim, markdown, text_of
from harness.result import RunResult
from harness.run_options import CommandOptions, words_of
from harness.running.plan import Plan, with_command
from harness.running.selection import Query, select_cases
from harness.studies.layouts import USUAL, Word, cases_of
from harness.text import counted
from harness.verdict import ExitCode, Verdict

_MEANS = {
    "equal": "every gradient and updated parameter is bitwise equal to the single-rank reference",
    "rounding": "within the measured tolerance for sums in another order",
    "drift": "within the measured tolerance, but further than one rounding to float8 (2^-4)",
}
_CHANGED = {
    "rounding": "not bitwise equal to the base; both are within tolerance of the same single-rank reference",
    "moved": "right on both sides, but the single-rank reference changed too: the model, its data or a package changed",
    "now differs": "it differs from a formula that nobody verified with this build, and the base does not in this way",
    "wrong in both": "not new, and wrong all the same",
    "new": "the base has no such target",
    "not compared": "one side was not checked",
}
_UNSEEN = (
    "kernels of a GPU: fast accumulation, pointer alignment, how cuBLAS and Triton round",
    "streams: their order, overlap, races on symmetric memory, and the order in which NCCL sums",
    "speed, and memory other than tensors",
)
_SHOWN = 4  # changes of the word of a curve
_MEANS_OF_CURVES = (
    "equal: every printed digit agrees with another run",
    f"rounding: at most {MARGIN:g} times as far from them as they are from one another, up to this step",
)

# Where a word is not what the verdict alone says.
_JUNIT: Mapping[tuple[Verdict, Word], Element] = {
    **{(verdict, "refused"): "skipped" for verdict in (Verdict.CRASH, Verdict.NUMERIC, Verdict.INVARIANT)},
    (Verdict.PASSED, "wrong"): "failure",
    (Verdict.PASSED, "not checked"): "error",
}

_TITLE = "each layout against its single-rank reference"
_Cell = Callable[[Row], str]
_OPTIONAL = ("base", "replay", "logprob")  # columns that are left out where no layout has a number


def parity_table(parity: Parity) -> Table:
    """Return a row for every layout: its last loss, that of its own reference, and the distance that decides."""
    last = max((len(row.losses) for row in parity.rows), default=0)
    columns: dict[str, _Cell] = {"layout": lambda row: row.layout, "verdict": lambda row: row.word}
    if parity.against:
        columns |= {"base": lambda row: row.base.word if row.base else "", "change": lambda row: row.change}
    columns |= {"loss": lambda row: _at(row.losses, last), "reference": lambda row: _at(row.reference, last)}
    columns |= {"rel. error": lambda row: _short(row.error), "tolerance": lambda row: _short(row.tolerance)}
    columns["logprob max"] = lambda row: "" if row.logprobs is None else f"{row.logprobs[0]:.2g}"
    columns["logprob mean"] = lambda row: "" if row.logprobs is None else f"{row.logprobs[1]:.2g}"
    columns["replay"] = lambda row: "" if row.replay is None else f"{row.replay:.2g}"
    columns["decided by"] = lambda row: row.moved or row.decided_by or row.why
    shown = {name: [cell(row) for row in parity.rows] for name, cell in columns.items()}
    shown = {name: cells for name, cells in shown.items() if any(cells) or not name.startswith(_OPTIONAL)}
    words = ("layout", "verdict", "base", "change", "decided by")
    return Table(
        columns=tuple(shown),
        rows=tuple(zip(*shown.values(), strict=True)),
        right=tuple(at for at, name in enumerate(shown) if name not in words),
        verdict=1,
    )


def _at(losses: Sequence[float], step: int) -> str:
    return f"{losses[step - 1]:.5f}" if 0 < step <= len(losses) else "-"


def _short(number: float | None) -> str:
    return "-" if number is None else f"{number:.2g}"


def _answer(parity: Parity) -> str:
    """Return the verdict on all layouts, on one line."""
    wrong = [row.layout for row in parity.rows if row.word == "wrong"]
    steps = [row.layout for row in parity.one_step if row.word == "wrong"]
    loop = f"wrong in one step: {', '.join(steps)}" if steps else ""
    said = f"{counted(len(wrong), 'layout')} {'is' if len(wrong) == 1 else 'are'} wrong: {', '.join(wrong)}"
    open_words = [row.word for row in parity.every if row.word in ("not checked", "not run", "infra", "changed")]
    curve = f"{parity.golden.name} is {parity.golden.word}" if parity.golden is not None else ""
    first = f"parity: {said if wrong else 'no layout is wrong'}"
    line = "; ".join(filter(None, (first, loop, _counts(open_words), curve)))
    changes = [row.change for row in parity.rows if row.change]
    return f"{line}; against {parity.against}: {_counts(changes)}" if parity.against else line


def _counts(words: Sequence[str]) -> str:
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))


def _line(parity: Parity) -> str:
    words = [row.word for row in parity.rows]
    return f"{counted(len(words), 'layout')}: {_counts(words)}; {parity.seconds:.0f} s"


def _notes(parity: Parity) -> Iterator[Block]:
    """Yield what words and columns mean, how a target trains that refuses what is usual of TP, what was left out."""
    words, changes = {row.word for row in parity.rows}, {row.change for row in parity.rows}
    meanings = [f"{word}: {means}" for word, means in _MEANS.items() if word in words]
    meanings += [f"change, {word}: {means}" for word, means in _CHANGED.items() if word in changes]
    if any(row.replay is not None for row in parity.rows):
        meanings.append("replay: the largest relative error of a module, repeated on one rank from its own operands")
    if any(row.logprobs is not None for row in parity.rows):
        meanings.append("logprob: distance of a token's log-probability from one rank, in nats, in the last step")
    yield Items(tuple(meanings))
    if axes := without_refused(parity.rows):
        options = " ".join(said(name, False) for name in axes)
        yield f"the target refuses every layout under TP with {' and '.join(axes)}: if it has none, add `{options}`"
    if parity.left_out:
        yield f"left out, beyond the budget: {', '.join(parity.left_out)}"


def parity_sections(parity: Parity, run: RunResult) -> list[Block]:
    """Return the verdict, the table, what is wrong with its layouts, and the totals."""
    table = Section(title=f"{parity.case_id}: {_TITLE}", blocks=(parity_table(parity),))
    return [_answer(parity), table, *_others(parity), *_wrong(parity, run), *_notes(parity), _line(parity)]


def _others(parity: Parity) -> Iterator[Block]:
    """Yield what stands below the table of layouts: what training loops get wrong, a step each; and the golden file."""
    cells = tuple((row.layout, row.word, _at(row.losses, 1), row.why) for row in parity.one_step)
    if cells:
        title = "one step, without FP8"
        yield Table(columns=(title, "verdict", "loss", "why"), rows=cells, right=(2,), verdict=1)
    yield from () if parity.golden is None else curve_sections([parity.golden])


def _wrong(parity: Parity, run: RunResult) -> Sequence[Block]:
    wrong = {row.case_id for row in parity.every if row.word == "wrong"}
    return case_sections([result for result in run.results if result.case_id in wrong])


def _first(parity: Parity) -> Iterator[Entry]:
    """Yield what is wrong first with every wrong layout, in the base too, and the command that runs it alone."""
    for row in parity.every:
        if row.word == "wrong":
            before = (f"in the base too: {row.base.why}",) if row.base and row.base.word == "wrong" else ()
            yield Entry(title=f"{row.layout}: {row.why}", lines=before, command=row.command)


def _limits(parity: Parity) -> Iterator[Block]:
    if parity.software.get("device") == "cpu":
        yield "CPU only; not covered:"
        yield Items(_UNSEEN)


def parity_markdown(parity: Parity, run: RunResult) -> str:
    """What a bot posts: the verdict, the table, what is wrong, with the rest folded, and what was not looked at."""
    details = _wrong(parity, run)
    tables = (f"`{parity.case_id}`: {_TITLE}", parity_table(parity), *_others(parity))
    findings = Section(title="all findings", blocks=(Verbatim(text_of(details).rstrip(), "text"),), folded=True)
    folded = [findings] if details else []
    body = (*tables, *_first(parity), *folded, *_notes(parity), _line(parity), *_limits(parity))
    return markdown([Section(title=_answer(parity), blocks=body)])


def parity_junit(parity: Parity, run: RunResult) -> bytes:
    """JUnit with the words of the table: a layout that the target itself refuses is skipped, and says why."""
    rows = {row.case_id: row for row in parity.every}
    answers = {
        result.case_id: JUnitElement(element, rows[result.case_id].why)
        for result in run.results
        if (element := _JUNIT.get((result.verdict, rows[result.case_id].word))) and not result.excused
    }
    return junit_report(run, answers)


def parity_page(parity: Parity, run: RunResult) -> bytes:
    """Return the page of the run, with the table above its cases."""
    table = msgspec.structs.replace(parity_table(parity), title=_TITLE)
    blocks = (table, *_others(parity), *_first(parity), *_notes(parity), *_limits(parity))
    section = Section(name="parity", title="Layouts", blocks=blocks)
    good, wrong = parity.exit_code is ExitCode.GOOD, sum(row.word == "wrong" for row in parity.every)
    state = "good" if good else f"{counted(wrong, 'layout')} wrong" if wrong else "not good"
    line = f"{_answer(parity)}. {_line(parity)}"
    return html_report(run, front=Front(title=parity.case_id, state=state, good=good, line=line, section=section))


# Curves of one job: a row for each, with the step that is wrong first


def curve_sections(rows: Sequence[CurveRow]) -> list[Block]:
    """Distances are relative, those of the step that is wrong first, or that is closest to its limit."""
    table = Table(
        columns=("curve", "verdict", "steps", "wrong first", "found", "nearest", "rel. error", "tolerance"),
        rows=tuple(_curve_cells(row) for row in rows),
        right=(4, 5, 6, 7),
        verdict=1,
    )
    words = {row.word for row in rows}
    return [
        Section(title=f"Compared with {counted(len(rows[0].others), 'other run')} of the job", blocks=(table,)),
        Items(tuple(text for text in _MEANS_OF_CURVES if text.partition(":")[0] in words)),
    ]


def _curve_cells(row: CurveRow) -> tuple[str, ...]:
    shown = row.first or row.worst
    numbers = (f"{shown.value:.6g}", f"{shown.nearest:.6g}", f"{shown.off:.2g}", f"{shown.allowed:.2g}")
    first = "-" if row.first is None else f"{row.first.kind}, step {row.first.step}"
    return (row.name, row.word, _spans(row.steps), first, *numbers)


def _spans(steps: Sequence[tuple[int, CurveWord]]) -> str:
    """`1 equal, 2-3 rounding, 4-10 wrong`; of many changes the first, for the rest is chance."""
    spans = [[step for step, _ in group] for _, group in groupby(steps, key=lambda pair: pair[1])]
    words = dict(steps)
    texts = [f"{span[0] if len(span) == 1 else f'{span[0]}-{span[-1]}'} {words[span[0]]}" for span in spans[:_SHOWN]]
    return ", ".join((*texts, "…") if len(spans) > _SHOWN else texts)


_EPILOG = """\b
Examples:
  fp8-harness parity --layouts single,fsdp2,tp2
  fp8-harness parity --target my_pkg.my_target --recipe tensorwise \\
      --markdown table.md
  fp8-harness parity --target my_pkg.my_target \\
      --against "$(git merge-base origin/main HEAD)"
  fp8-harness parity fsdp4-rowwise-v2048-b16 \\
      --layouts fsdp4,tp2,fsdp2-tp2,hsdp2x2 --inject fix.py:apply
  fp8-harness parity cases/ours.toml --against main

\b
Without a case: the tiny model, rowwise, bfloat16. Of several cases each is a
row. The run is stored: `show last` has its details.
Exit codes: 0 every layout is equal or within rounding, 1 one is wrong, 3
nothing ran, 4 infrastructure.
"""
_AGAINST = "Run the same in another place, as base: a git revision of the target's repository, a release, or a venv."
_LAYOUTS = "Layouts as in case ids: single,fsdp4,tp2,fsdp2-tp2,hsdp2x2. Default: all meshes of 1, 2, 4, 8, … ranks."
_GOLDEN = "Compare a golden file or log of torchtitan with the layouts; several with one another, and nothing runs."
_BUDGET = f"The cheapest layouts that fit; the others are named. Default: {BUDGET_S:g} without --layouts."
_OF_THE_BASE = ("jobs", "slots")
_OF_LAYOUTS = dict.fromkeys((*MESH_AXES, "async_tp"), "--layouts says it")


@click.command("parity", cls=options.SectionedCommand, epilog=_EPILOG)
@click.argument("named", metavar="[TIER|FILE|CASE-ID]...", nargs=-1, shell_complete=options.names_of("tiers", "cases"))
@click.option("--layouts", "asked", metavar="WORDS,…", help=_LAYOUTS)
@click.option("--golden", "goldens", metavar="FILE", type=options.FILE, multiple=True, help=_GOLDEN)
@options.run_option("budget_s", _BUDGET)
@click.option("--against", metavar="REV|PACKAGE==VERSION|VENV", help=_AGAINST)
@options.run_option("inject")
@options.json_option("the table")
@options.run_option("markdown_file", "Write the table as markdown.")
@options.run_option("junit_file", "Write JUnit XML; a layout that the target itself refuses is skipped.")
@options.run_option("html_file")
@axes_parameter(without=_OF_LAYOUTS, defaults=False)
@options.plan_parameter
@options.project_parameter
def parity_command(  # noqa: PLR0913  one parameter per option
    *,
    named: tuple[str, ...],
    asked: str | None,
    goldens: tuple[Path, ...],
    budget_s: float | None,
    against: str | None,
    inject: tuple[str, ...],
    json_file: Path | None,
    markdown_file: Path | None,
    junit_file: Path | None,
    html_file: Path | None,
    plan_for: Callable[..., Plan],
    project: Project,
    axes: dict[str, object],
) -> int:
    """Compare layouts with the single-rank reference: losses, relative errors, and a verdict each.

    One table, a row per layout: `equal` bits, `rounding`, `wrong` and what is wrong first, `refused` or `excluded`.
    """
    if len(goldens) > 1:
        if any((named, asked, axes, inject, html_file, junit_file)):
            what = "several files are compared with one another, and nothing runs."
            fix = "give one file with a case or layouts, or files alone."
            raise HarnessError(what, where="--golden", fix=fix)
        return _judge_files(goldens, json_file, markdown_file)
    golden = read_curve(goldens[0]) if goldens else None
    given = select_cases(project, Query(sources=named)) if named else ()
    plan = plan_for(inject=inject)
    plan = with_command(plan, options.given_run_options(), CommandOptions())
    if len(given) > 1:
        if asked is not None or golden is not None:
            what, where = f"it is of one case, not of {len(given)}.", "--golden" if asked is None else "--layouts"
            raise HarnessError(what, where=where, fix="give one case, or leave it out.")
        cases = tuple(dict.fromkeys(case_from_axes({**own_values(case), **axes}) for case in given))
    else:
        usual = USUAL if golden is None or golden.case is None else own_values(golden.case)
        base = {**(own_values(given[0]) if given else usual), **axes}
        cases, plan, budget_s = _layouts(base, asked, axes, plan, budget_s)
    if against is not None and len({module_of(case.target) for case in cases}) > 1:
        raise HarnessError("these cases are of several targets.", where="--against", fix="give cases of one target.")
    plan = plan.common(cases)
    if golden is not None:
        check_job(golden, cases[0])
    with options.open_progress() as progress:
        place = None
        if against is not None:
            same = {name: value for name, value in options.given_others().items() if name in _OF_THE_BASE}
            place = Against(against, project, plan, progress.note, words=words_of(same))
        parity, result = compare_layouts(project, cases, plan, progress, budget_s=budget_s, against=place)
    if golden is not None:
        parity = with_golden(parity, golden)
    options.print_report(parity_sections(parity, result), json_file, parity)
    options.write_output(markdown_file, lambda: parity_markdown(parity, result).encode())
    options.write_output(junit_file, lambda: parity_junit(parity, result))
    options.write_output(html_file, lambda: parity_page(parity, result))
    return parity.exit_code


def _layouts(
    base: Mapping[str, object], asked: str | None, axes: Mapping[str, object], plan: Plan, budget_s: float | None
) -> tuple[tuple[Case, ...], Plan, float | None]:
    """Return the case in the layouts that are asked for, or in the usual ones, the plan for them, and their budget."""
    if asked is None:
        plan = plan.on_cpu if plan.capacity.total == 1 else plan  # one GPU has one layout
        layouts, budget_s = tuple(usual_layouts(plan.capacity.largest)), budget_s or BUDGET_S
    else:
        layouts = tuple(parse_layout(text, option="--layouts") for text in asked.split(","))
    return cases_of(base, layouts, axes), plan, budget_s


def _judge_files(files: Sequence[Path], json_file: Path | None, markdown_file: Path | None) -> ExitCode:
    rows = judge_each([read_curve(path) for path in files])
    options.print_report(curve_sections(rows), json_file, rows)
    options.write_output(markdown_file, lambda: markdown(curve_sections(rows)).encode())
    return ExitCode.FAILED if any(row.word == "wrong" for row in rows) else ExitCode.GOOD
