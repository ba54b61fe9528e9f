"""The report of a check of a target: what works, what is judged, what to mend. As text of 60 columns, or as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from harness.jsonform import to_json
from harness.plural import counted
from harness.report.sections import printable, wrapped
from harness.studies.target_check import Built, TargetReport, TargetRun
from harness.verdict import ExitCode, Finding, Verdict

WIDTH = 60
_INDENT = 2
_UNFINISHED = (Verdict.CRASH, Verdict.HANG, Verdict.INFRA, Verdict.NOT_RUN)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to mend, and the cases that show it. `likely_effect`: something else may be its cause."""

    check: str
    message: str
    fix: str | None
    expected: str | None
    found: str | None
    where: str
    cases: tuple[str, ...]
    likely_effect: bool


class TargetDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON form: the report, the problems that it comes to, and the exit code."""

    exit_code: int
    problems: tuple[Problem, ...]
    report: TargetReport


def target_exit_code(report: TargetReport) -> ExitCode:
    """0 when nothing has to be mended."""
    if report.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.GOOD if report.good else ExitCode.FAILED


def target_json(report: TargetReport) -> bytes:
    """The report as indented JSON with a trailing newline."""
    document = TargetDocument(exit_code=int(target_exit_code(report)), problems=problems_of(report), report=report)
    return to_json(document, indent=2) + b"\n"


def problems_of(report: TargetReport) -> tuple[Problem, ...]:
    """What has to be mended, each thing once: first what says how, then what may be an effect of it."""
    groups: dict[tuple[str, str | None], list[tuple[TargetRun, Finding]]] = {}
    for run in report.runs:
        for finding in run.findings if run.refused is None else ():
            groups.setdefault((finding.check, finding.fix), []).append((run, finding))
    explained = {run.case_id for (_, fix), shown in groups.items() if fix is not None for run, _ in shown}
    if any(run.case_id in explained for run in report.runs[:1]):  # the losses of all are compared with it
        explained = {run.case_id for run in report.runs}
    problems = [_problem(shown, explained, alone=len(groups) == 1) for shown in groups.values()]
    return tuple(sorted(problems, key=lambda problem: problem.likely_effect))


def _problem(shown: Sequence[tuple[TargetRun, Finding]], explained: set[str], *, alone: bool) -> Problem:
    first = shown[0][1]
    cases = tuple(dict.fromkeys(run.case_id for run, _ in shown))
    return Problem(
        check=first.check,
        message=printable(first.first_line),
        fix=first.fix,
        expected=first.expected,
        found=first.found,
        where="" if first.ranks else first.place,
        cases=cases,
        likely_effect=first.fix is None and (set(cases) <= explained or not (first.judged or alone)),
    )


def target_text(report: TargetReport) -> str:
    """The whole report as plain text."""
    parts = [
        f"{report.target}\n{_wrapped(report.file, indent=_INDENT)}",
        _layouts(report),
        _found(report.built),
        _checks(report),
        _probes(report),
        "\n".join(_wrapped(f"note: {note}") for note in report.notes),
        *_problem_texts(report),
        _end(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _layouts(report: TargetReport) -> str:
    """One line for every run."""
    rows = [(run.layout, run.recipe, run.dtype, _ended(run)) for run in report.runs]
    return _table([("layout", "recipe", "dtype", ""), *rows])


def _ended(run: TargetRun) -> str:
    if run.refused is not None:
        return f"not supported: {run.refused}"
    if not run.findings and run.verdict.good:
        return "works"
    return run.verdict.value if not run.verdict.good else counted(len(run.findings), "problem")


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, of which the last is wrapped at the width of the report."""
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    lines = []
    for *cells, last in rows:
        head = "  ".join(cell.ljust(size) for cell, size in zip(cells, widths, strict=True)) + "  "
        wrapped = textwrap.wrap(last, max(WIDTH - len(head), 20), break_on_hyphens=False) or [""]
        lines += [(head + wrapped[0]).rstrip(), *(" " * len(head) + line for line in wrapped[1:])]
    return "\n".join(lines)


def _found(built: Sequence[Built]) -> str:
    """What the model consists of, and how it is distributed."""
    if not built:
        return ""
    first = built[0]
    model = (
        f"{counted(first.linears, 'linear')}, {first.converted} of them in float8; "
        f"{counted(first.parameters, 'parameter')} of {first.elements:,} elements; {counted(first.buffers, 'buffer')}; "
        f"{first.checkpointed} checkpointed and {first.compiled} compiled modules"
    )
    rows = [("found", model), *((each.layout, _distribution(each)) for each in built[1:])]
    return _table(rows)


def _distribution(built: Built) -> str:
    parts = [
        f"{count} of {counted(built.parameters, 'parameter')} {f'on {axes}' if axes != 'none' else 'on no axis'}"
        for axes, count in built.on_axes.items()
    ]
    return "; ".join(parts) + f"; {built.converted} linears in float8"


def _checks(report: TargetReport) -> str:
    """Which checks judged which runs, and why not the others."""
    runs = [run for run in report.runs if run.verdict not in _UNFINISHED]
    if not runs:
        return ""
    names = list(
        dict.fromkeys(name for run in runs for name in (*run.checks, *(each.check for each in run.not_judged)))
    )
    reasons = {name: _reasons(name, runs) for name in names}
    everywhere = [name for name in names if not reasons[name]]
    rows = [("check", "judged", "why not")]
    for name in names:
        judged = f"{sum(name in run.checks for run in runs)} of {len(runs)}"
        rows += [
            (name if not index else "", judged if not index else "", why) for index, why in enumerate(reasons[name])
        ]
    said = f"judged in {'every run' if len(runs) > 1 else 'the run'}: {', '.join(everywhere) or 'nothing'}"
    return "\n\n".join([_wrapped(said), *([_table(rows)] if rows[1:] else [])])


def _reasons(name: str, runs: Sequence[TargetRun]) -> list[str]:
    """Why a check did not judge some runs, or a part of them; each reason once, with the runs it is about."""
    found: dict[str, list[TargetRun]] = {}
    for run in runs:
        for each in run.not_judged:
            if each.check == name:
                part = "in part: " if name in run.checks else ""
                reason = each.reason.partition("; `")[0]  # without the command, which is another one for every case
                found.setdefault(f"{part}{reason}", []).append(run)
    return [why if len(shown) == len(runs) else f"{_spelled(shown)}: {why}" for why, shown in found.items()]


def _spelled(runs: Iterable[TargetRun]) -> str:
    return ", ".join(f"{run.layout} {run.recipe} {run.dtype}" for run in runs)


def _probes(report: TargetReport) -> str:
    compared = [run for run in report.runs if run.probes_neutral is not None]
    same = sum(run.probes_neutral is True for run in compared)
    if not compared:
        return ""
    return _wrapped(
        f"probes change nothing in {same} of {counted(len(compared), 'run')}: losses and gradient norms are bitwise "
        "the same without them."
    )


def _problem_texts(report: TargetReport) -> list[str]:
    names = {run.case_id: _spelled([run]) for run in report.runs}
    commands = {run.case_id: run.command for run in report.runs}
    problems = problems_of(report)
    causes = [problem for problem in problems if not problem.likely_effect]
    texts = [
        _problem_text(number, problem, _seen_in(problem, names), commands[problem.cases[0]])
        for number, problem in enumerate(causes, 1)
    ]
    told = {problem.check for problem in causes}
    effects = sorted({problem.check for problem in problems} - told)
    return [*texts, *([_wrapped(f"also failed, likely effects: {', '.join(effects)}")] if effects else [])]


def _seen_in(problem: Problem, names: Mapping[str, str]) -> str:
    return "every run" if len(problem.cases) == len(names) > 1 else ", ".join(names[case] for case in problem.cases)


def _problem_text(number: int, problem: Problem, seen_in: str, command: str) -> str:
    where = f" [{problem.where}]" if problem.where else ""
    lines = [
        _wrapped(f"{number}. {problem.check}{where}: {problem.message}", hanging=3),
        *(
            _wrapped(f"{name}: {value}", indent=3, hanging=2)
            for name, value in (
                ("expected", problem.expected),
                ("found", problem.found),
                ("seen in", seen_in),
                ("fix", problem.fix),
            )
            if value is not None
        ),
    ]
    return "\n".join([*lines, f"   reproduce: {command}"])


def _end(report: TargetReport) -> str:
    causes = sum(not problem.likely_effect for problem in problems_of(report))
    refused = list(dict.fromkeys(run.layout for run in report.runs if run.refused is not None))
    without = f" Not supported by it: {', '.join(refused)}." if refused else ""
    if report.interrupted:
        return f"interrupted after {report.seconds:.0f} s"
    if report.good:
        return _wrapped(f"{report.target} works under the harness.{without} {report.seconds:.0f} s")
    return _wrapped(f"{counted(causes, 'thing')} to mend in {report.target}.{without} {report.seconds:.0f} s")


def _wrapped(text: str, *, indent: int = 0, hanging: int = 0) -> str:
    return "\n".join(wrapped(text, WIDTH, " " * indent, " " * (indent + hanging)))
