"""`fp8-harness check-target`, and its report: what works, what is checked, what to fix."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from harness.cli.options import json_option, open_progress, plan_parameter, print_report, project_parameter
from harness.errors import HarnessError
from harness.matrix.axes import choices
from harness.matrix.caseid import parse_layout
from harness.plugins.check_target.target_check import Built, CheckOptions, TargetReport, TargetRun, check_target
from harness.project import Project
from harness.registry import TARGET_NAME, targets
from harness.report.sections import Block, Facts, Items, Section, Table, Verbatim
from harness.running.plan import Plan
from harness.running.selection import one_case
from harness.text import counted
from harness.verdict import ExitCode, Finding, Verdict

_UNFINISHED = (Verdict.CRASH, Verdict.HANG, Verdict.INFRA, Verdict.NOT_RUN)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to fix, and the cases that show it. `likely_effect`: something else may be its cause."""

    check: str
    message: str
    fix: str | None
    expected: str | None
    found: str | None
    where: str
    cases: tuple[str, ...]
    likely_effect: bool


def target_exit_code(report: TargetReport) -> ExitCode:
    """Return the exit code: 0 nothing to fix, 3 the target refused all layouts, 4 only the machine failed."""
    if report.interrupted:
        return ExitCode.INTERRUPTED
    if report.nothing_ran:
        return ExitCode.NOTHING_RAN
    if report.only_machine_failed:
        return ExitCode.INFRA
    return ExitCode.GOOD if report.good else ExitCode.FAILED


def target_document(report: TargetReport) -> dict[str, object]:
    return {"exit_code": int(target_exit_code(report)), "problems": problems_of(report), "report": report}


def problems_of(report: TargetReport) -> tuple[Problem, ...]:
    """Return what to fix, each thing once: first what names its fix, then what may be an effect of it."""
    groups: dict[tuple[str, str | None], list[tuple[TargetRun, Finding]]] = {}
    for run in report.runs:
        for finding in run.findings if run.refused is None else ():
            groups.setdefault((finding.check, finding.fix), []).append((run, finding))
    explained = {run.case_id for (_, fix), shown in groups.items() if fix is not None for run, _ in shown}
    if any(run.case_id in explained for run in report.runs[:1]):  # the losses of all are compared with it
        explained = {run.case_id for run in report.runs}
    plain = {run.case_id for run in report.runs if not run.one_step}
    problems = [_problem(shown, explained, plain, alone=len(groups) == 1) for shown in groups.values()]
    return tuple(sorted(problems, key=lambda problem: problem.likely_effect))


def _problem(
    shown: Sequence[tuple[TargetRun, Finding]], explained: set[str], plain: set[str], *, alone: bool
) -> Problem:
    first = shown[0][1]
    cases = tuple(dict.fromkeys(run.case_id for run, _ in shown))
    follows = bool(explained & plain) and not plain & set(cases)  # one step of a loop that is wrong in any
    return Problem(
        check=first.check,
        message=first.first_line,
        fix=first.fix,
        expected=first.expected,
        found=first.found,
        where="" if first.ranks else first.place,
        cases=cases,
        likely_effect=follows or (first.fix is None and (set(cases) <= explained or not (first.judged or alone))),
    )


def target_sections(report: TargetReport) -> list[Block]:
    runs = tuple((run.layout, run.recipe, run.dtype, _ended(run)) for run in report.runs)
    return [
        Section(title=report.target, blocks=(report.file,)),
        Table(columns=("layout", "recipe", "dtype", ""), rows=runs),
        Facts(tuple(_built_facts(report.built))),
        *_checks(report),
        Section(blocks=tuple(_probes(report))),
        Section(blocks=tuple(f"note: {note}" for note in report.notes)),
        *_problem_sections(report),
        _end(report),
    ]


def _ended(run: TargetRun) -> str:
    if run.refused is not None:
        return f"not supported: {run.refused}"
    if not run.findings and run.verdict.good:
        return "works"
    return run.verdict.value if not run.verdict.good else counted(len(run.findings), "problem")


def _built_facts(built: Sequence[Built]) -> Iterator[tuple[str, str]]:
    for first in built[:1]:
        parts = (
            f"{counted(first.linears, 'linear')}, {first.converted} of them in float8",
            f"{counted(first.parameters, 'parameter')} of {first.elements:,} elements",
            counted(first.buffers, "buffer"),
            f"{first.checkpointed} checkpointed and {first.compiled} compiled modules",
        )
        yield "found", "; ".join(parts)
    yield from ((other.layout, _distribution(other)) for other in built[1:])


def _distribution(built: Built) -> str:
    parts = [
        f"{count} of {counted(built.parameters, 'parameter')} {f'on {axes}' if axes != 'none' else 'on no axis'}"
        for axes, count in built.on_axes.items()
    ]
    return "; ".join(parts) + f"; {built.converted} linears in float8"


def _checks(report: TargetReport) -> Iterator[Block]:
    runs = [run for run in report.runs if run.verdict not in _UNFINISHED]
    if not runs:
        return
    names = dict.fromkeys(
        name for run in runs for name in (*run.checks, *(unjudged.check for unjudged in run.not_judged))
    )
    reasons = {name: _reasons(name, runs) for name in names}
    everywhere = ", ".join(name for name in names if not reasons[name]) or "nothing"
    yield Section(blocks=(f"checked in {'every run' if len(runs) > 1 else 'the run'}: {everywhere}",))
    rows = tuple(
        (name, f"{sum(name in run.checks for run in runs)} of {len(runs)}", first) if not index else ("", "", first)
        for name in names
        for index, first in enumerate(reasons[name])
    )
    yield Table(columns=("check", "judged", "why not"), rows=rows)


def _reasons(name: str, runs: Sequence[TargetRun]) -> list[str]:
    """Return why a check did not judge some runs, or a part of them; each reason once, with the runs it is about."""
    by_reason: dict[str, list[TargetRun]] = {}
    for run in runs:
        for unjudged in run.not_judged:
            if unjudged.check == name:
                part = "in part: " if name in run.checks else ""
                reason = unjudged.reason.partition("; `")[0]  # without the command, which is another one for every case
                by_reason.setdefault(f"{part}{reason}", []).append(run)
    return [why if len(shown) == len(runs) else f"{_spelled(shown)}: {why}" for why, shown in by_reason.items()]


def _spelled(runs: Iterable[TargetRun]) -> str:
    return ", ".join(f"{run.layout} {run.recipe} {run.dtype}" for run in runs)


def _probes(report: TargetReport) -> Iterator[str]:
    compared = [run.probes_neutral for run in report.runs if run.probes_neutral is not None]
    if compared:
        neutral = f"{sum(compared)} of {counted(len(compared), 'run')}"
        yield f"probes change nothing in {neutral}: losses and gradient norms are bitwise the same without them."


def _problem_sections(report: TargetReport) -> Iterator[Block]:
    runs = {run.case_id: run for run in report.runs}
    problems = problems_of(report)
    causes = [problem for problem in problems if not problem.likely_effect]
    for number, problem in enumerate(causes, 1):
        where = f" [{problem.where}]" if problem.where else ""
        seen_in = "every run" if len(problem.cases) == len(runs) > 1 else _spelled(runs[case] for case in problem.cases)
        values = {"expected": problem.expected, "found": problem.found, "seen in": seen_in, "fix": problem.fix}
        yield Section(
            title=f"{number}. {problem.check}{where}: {problem.message}",
            blocks=(
                Items(tuple(f"{name}: {value}" for name, value in values.items() if value is not None)),
                Verbatim(f"reproduce: {runs[problem.cases[0]].command}"),
            ),
        )
    effects = sorted({problem.check for problem in problems} - {problem.check for problem in causes})
    if effects:
        yield f"also failed, likely effects: {', '.join(effects)}"


def _end(report: TargetReport) -> str:
    causes = sum(not problem.likely_effect for problem in problems_of(report))
    refused = list(dict.fromkeys(run.layout for run in report.runs if run.refused is not None))
    without = f" Not supported by it: {', '.join(refused)}." if refused else ""
    if report.interrupted:
        return f"interrupted after {report.seconds:.0f} s"
    if report.nothing_ran:
        return f"nothing ran: {report.target} supports none of these layouts. {report.seconds:.0f} s"
    if report.good:
        return f"{report.target} works under the harness.{without} {report.seconds:.0f} s"
    if report.only_machine_failed:
        return f"the machine ended runs, which say nothing of {report.target}.{without} {report.seconds:.0f} s"
    return f"{counted(causes, 'thing')} to fix in {report.target}.{without} {report.seconds:.0f} s"


_EPILOG = """\b
Examples:
  fp8-harness check-target my_pkg.my_target --recipe rowwise
  fp8-harness check-target my_target --layout fsdp2 --layout tp4

\b
Exit codes: 0 it works, 1 something to fix, 3 it supports no layout, 4 the
machine failed.
"""


_RECIPES = [str(recipe) for recipe in choices("recipe") if recipe != "bf16"]
_RECIPE = f"The FP8 recipe: {', '.join(_RECIPES)}. Default: the case's, or tensorwise."
_LAYOUT = "A layout as in case ids: fsdp2, tp2, fsdp2-tp2, hsdp2x2. Repeatable. Default: fsdp2, tp2 and hsdp2x2."


@click.command("check-target", epilog=_EPILOG)
@click.argument("module")
@click.argument("given", metavar="[CASE-ID|FILE]", required=False)
@click.option("--recipe", metavar="RECIPE", type=click.Choice(_RECIPES), help=_RECIPE)
@click.option("--layout", "layouts", metavar="WORDS", multiple=True, help=_LAYOUT)
@json_option("the answer")
@plan_parameter
@project_parameter
def check_target_command(  # noqa: PLR0913  one parameter per option
    *,
    module: str,
    given: str | None,
    recipe: Any,
    layouts: tuple[str, ...],
    json_file: Path | None,
    plan_for: Callable[..., Plan],
    project: Project,
) -> int:
    """Check whether a target works, and say how to fix it.

    MODULE is the dotted name of a module with `build(case, world)`, or the name of a built-in target. It is trained for
    a few steps on one rank, with FSDP2, TP and HSDP, in BF16 and in FP8; a run may take 60 s. A case, by its id or
    file, gives model, training and options.
    """
    if not TARGET_NAME.fullmatch(module):
        fix = f"give the dotted name of a module, not its path, or one of {', '.join(targets())}."
        raise HarnessError("not the name of a target.", where=module, fix=fix)
    base = None if given is None else one_case(project, given)
    options = CheckOptions(target=module, recipe=recipe, layouts=tuple(map(parse_layout, layouts)), base=base)
    with open_progress() as progress:
        report = check_target(project, options, plan_for(), progress)
    print_report(target_sections(report), json_file, target_document(report))
    return target_exit_code(report)
