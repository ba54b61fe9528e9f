"""`fp8-harness dev independence`: runs the relations of cases, and prints a table of recipes by relations."""

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import click
import msgspec

from harness.cli import options
from harness.errors import HarnessError
from harness.matrix.axes import case_from_axes
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.recipes import Recipe
from harness.matrix.rules import exclusions, expected_refusal
from harness.plugins.independence.relations import GRADIENTS, RELATIONS, Moved, Row, judged, promised
from harness.project import Project
from harness.report.case import finding_entry
from harness.report.sections import Block, Items, Section, Table
from harness.request import RunRequest
from harness.running.executor import Executor, open_executor
from harness.running.identity import check_targets
from harness.running.plan import Plan, make_plan
from harness.running.selection import one_case
from harness.text import counted
from harness.verdict import ExitCode
from harness.workflow import check_fits

PROGRAM = "harness.plugins.independence.worker.main"
USUAL: Mapping[str, object] = {"dtype": "bfloat16", "accumulation": 2}  # where no case is given
_EPILOG = """\b
Examples:
  fp8-harness dev independence
  fp8-harness dev independence mine.toml
      a case of `new mine.toml --target my_pkg.my_target --recipe mxfp8`
  fp8-harness dev independence fsdp2-cp2-rowwise-v2048-b16 \\
      --inject fix.py:apply

\b
Exit codes: 0 every promise is kept, 1 one is broken, 3 nothing was compared,
4 infrastructure.
"""


@click.command("independence", epilog=_EPILOG)
@click.argument("named", metavar="[CASE-ID|FILE]...", nargs=-1, shell_complete=options.names_of("cases"))
@click.option("--inject", metavar="FILE.py:FUNCTION", multiple=True, help="Call this first in every rank. Repeatable.")
@options.project_parameter
def independence_command(*, named: tuple[str, ...], inject: tuple[str, ...], project: Project) -> int:
    """Replace tokens, and see whether others move.

    A later token, another sequence, another microbatch and padding must change nothing where the recipe promises it:
    the table says `0`. Where scales are of several tokens it has the relative distance of logits. Without a case every
    recipe runs, on the tiny model in bfloat16.
    """
    cases = [one_case(project, name) for name in named]
    cases = cases or [case_from_axes({**USUAL, "recipe": recipe}) for recipe in get_args(Recipe)]
    for case in cases:
        rules = [*exclusions(case), *filter(None, [expected_refusal(case)])]
        if rules or case.compile != "none":
            what = f"rule {rules[0].name} excludes it." if rules else "compiled blocks show no modules."
            raise HarnessError(what, where=case_id(case), fix="give another case.")
    plan = make_plan(inject=inject).common(cases)
    check_fits(cases, plan)
    check_targets((case.target for case in cases), project.root)
    plan = msgspec.structs.replace(plan, program=PROGRAM)
    with options.open_progress() as progress, open_executor(plan, project, progress.note) as executor:
        rows = tuple(_row(executor, plan, case) for case in cases)
    options.print_sections(independence_sections(rows))
    return exit_code_of(rows)


def _row(executor: Executor, plan: Plan, case: Case) -> Row:
    request = RunRequest(case=case, injections=tuple(injection.patch for injection in plan.injections))
    outcome = executor.serve(request)
    if outcome is None:
        raise KeyboardInterrupt
    if outcome.status == "infra":
        raise HarnessError(f"the machine ended the ranks: {outcome.message}", where=case_id(case), fix="run it again.")
    if outcome.status != "ok":
        row = Row(case_id=case_id(case), recipe=case.float8.recipe, promised=promised(case))
        return msgspec.structs.replace(row, failed=outcome.message or outcome.status)
    ranks = sorted(outcome.ranks, key=lambda rank: rank.rank)
    return judged(case, [msgspec.msgpack.decode(rank.payload or b"", type=tuple[Moved, ...]) for rank in ranks])


def exit_code_of(rows: Sequence[Row]) -> ExitCode:
    """Return FAILED for a broken promise or ranks that did not finish, and NOTHING_RAN where nothing was compared."""
    if any(row.findings or row.failed for row in rows):
        return ExitCode.FAILED
    compared = any(not moved.why for row in rows for moved in row.moved.values())
    return ExitCode.GOOD if compared else ExitCode.NOTHING_RAN


def independence_sections(rows: Sequence[Row]) -> list[Block]:
    """Return the answer, the table, what is wrong, and why cells are empty."""
    broken = sum(bool(row.findings or row.failed) for row in rows)
    answer = f"independence: {counted(broken, 'case')} broke a promise" if broken else "independence: no promise broken"
    cells = tuple((row.case_id, *(cell(row, column) for column in (*RELATIONS, GRADIENTS))) for row in rows)
    table = Table(columns=("case", *RELATIONS, GRADIENTS), rows=cells, right=tuple(range(1, len(RELATIONS) + 2)))
    wrong = (
        Section(title=row.case_id, blocks=(*map(finding_entry, row.findings), *filter(None, [row.failed])))
        for row in rows
        if row.findings or row.failed
    )
    return [answer, table, *wrong, Items(tuple(dict.fromkeys(_notes(rows))))]


def cell(row: Row, column: str) -> str:
    """Return the relative distance of logits or gradients; in brackets where the recipe does not promise 0."""
    moved = row.moved.get("padding" if column == GRADIENTS else column)
    if moved is None or moved.why:
        return "-"
    distance = moved.gradients if column == GRADIENTS else moved.output or moved.distance
    text = f"{distance:.2g}"
    return text if row.promised[column] else f"({text})"


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    if not all(all(row.promised.values()) for row in rows):
        yield "(…): not promised, because a scale is of several tokens"
    for row in rows:
        for moved in row.moved.values():
            if moved.why:
                yield f"-: {moved.relation} was not checked in {row.case_id}: {moved.why}"
            if moved.state:
                yield f"{moved.relation} moves {', '.join(moved.state)}: it is counted there"
