"""`fp8-harness independence`: runs the relations of cases, and prints a table of recipes by relations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import click
import msgspec

from harness.cli import options
from harness.cli.new import axes_parameter
from harness.errors import HarnessError
from harness.matrix.axes import case_from_axes, own_values
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
from harness.running.plan import Plan
from harness.running.selection import NothingSelected, one_case
from harness.text import counted
from harness.verdict import ExitCode
from harness.workflow import check_fits

PROGRAM = "harness.plugins.independence.worker.main"
USUAL: Mapping[str, object] = {"dtype": "bfloat16", "accumulation": 2}  # where no case is given
_EPILOG = """\b
Examples:
  fp8-harness independence
  fp8-harness independence --recipe rowwise --tp 2
  fp8-harness independence --target my_pkg.my_target --recipe mxfp8
  fp8-harness independence fsdp2-cp2-rowwise-v2048-b16 --inject fix.py:apply

\b
Exit codes: 0 every promise is kept, 1 one is broken, 3 nothing was compared,
4 infrastructure.
"""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    exit_code: ExitCode
    rows: tuple[Row, ...]


@click.command("independence", cls=options.SectionedCommand, epilog=_EPILOG)
@click.argument("named", metavar="[CASE-ID|FILE]", required=False, shell_complete=options.names_of("cases"))
@options.run_option("inject")
@options.json_option("the table")
@axes_parameter(defaults=False)
@options.plan_parameter
@options.project_parameter
def independence_command(
    *,
    named: str | None,
    inject: tuple[str, ...],
    json_file: Path | None,
    plan_for: Callable[..., Plan],
    project: Project,
    axes: dict[str, object],
) -> int:
    """Replace tokens, and see whether others move.

    A later token, another sequence, another microbatch and padding must change nothing where the recipe promises it:
    the table says `0`. Where scales are of several tokens it has the relative distance of logits. Without a case or a
    recipe every recipe runs, on the tiny model in bfloat16.
    """
    base = {**(USUAL if named is None else own_values(one_case(project, named))), **axes}
    recipes = [base["recipe"]] if "recipe" in base or named is not None else get_args(Recipe)
    cases = [case for recipe in recipes if not exclusions(case := case_from_axes({**base, "recipe": recipe}))]
    cases = [case for case in cases if expected_refusal(case) is None]
    if not cases or any(case.compile != "none" for case in cases):
        what = "compiled blocks show no modules." if cases else "every such case is excluded or refused."
        raise NothingSelected(what, where="independence", fix="give another case, or leave --compile out.")
    plan = plan_for(inject=inject).common(cases)
    check_fits(cases, plan)
    check_targets((case.target for case in cases), project.root)
    plan = msgspec.structs.replace(plan, program=PROGRAM)
    with options.open_progress() as progress, open_executor(plan, project, progress.note) as executor:
        rows = tuple(_row(executor, plan, case) for case in cases)
    code = exit_code_of(rows)
    options.print_report(independence_sections(rows), json_file, Answer(exit_code=code, rows=rows))
    return code


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
