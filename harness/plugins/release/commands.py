"""`fp8-harness compare`: GO, NO-GO or NOT COMPARED of two runs, and its report.

The decision and the kinds of reasons come first, then every reason, then what moved by cause.
"""

import datetime
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import click

from harness.cli import options
from harness.cli.environments import given_words, run_in_each, versions_parameter
from harness.cli.show import page_of
from harness.errors import HarnessError
from harness.evidence.golden import Golden, find_golden, hardware_classes
from harness.evidence.sealed import Missing
from harness.matrix.caseid import family_id, parse_case_id
from harness.matrix.records import read_quarantine, read_required
from harness.plugins.release.cases import Goldens
from harness.plugins.release.causes import Group, Origin
from harness.plugins.release.gate import Answer, Gate, GatePolicy, gate
from harness.plugins.release.sides import Allowance, Kind, Reason, Topic
from harness.project import Project
from harness.report.html.page import Front
from harness.report.runs import environments_sections
from harness.report.sections import Block, Entry, Items, Section, Table, markdown
from harness.result import Environment, RunResult
from harness.run_options import words_of
from harness.running.environments import NamedEnvironment, Versions
from harness.running.selection import recorded_faults
from harness.running.stored import results_of
from harness.text import counted
from harness.verdict import ExitCode

SHOWN = 5  # reasons of one kind in full; the others by id. JSON and the page have all
SHOWN_DETAILS = 4  # lines of a reason
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{4,}\b")  # shown by its first digits
_PACKAGES = ("torch", "torchao", "torchtitan", "numpy")
_ORIGINS = {
    Origin.TORCH: "torch: a deliberate change, or a known issue",
    Origin.OURS: "ours: missing checks and references",
    Origin.UNEXPLAINED: "unexplained: no record accounts for it",
}


def gate_sections(gate: Gate) -> list[Block]:
    """Return the answer for a terminal: the first lines decide."""
    return [Section(blocks=(_title(gate), Items(tuple(_facts(gate))))), *_body(gate)]


def gate_markdown(gate: Gate) -> str:
    """Return the answer for a pull request or a summary page of CI."""
    return markdown([Section(title=_title(gate), blocks=(Items(tuple(_facts(gate))), *_body(gate)))])


def gate_front(gate: Gate, candidate: RunResult) -> Front:
    """Return what the page of the candidate shows first. A reason leads to its case where the candidate has one."""
    line, *more = _facts(gate)
    ids = {case.case_id for case in candidate.results}
    rows = tuple(
        (name, *(str(getattr(side, name)) or "unknown" for side in (gate.baseline, gate.candidate)))
        for name in gate.baseline.__struct_fields__
    )
    blocks: tuple[Block, ...] = (
        *more,
        "All other parts of this page are about the candidate.",
        *_reasons(gate.reasons, ids, most=None),
        *_notes(gate),
        *_causes(gate, ids),
        Table(title="the two sides", columns=("", "baseline", "candidate"), rows=rows),
    )
    section = Section(name="gate", title="Gate", blocks=blocks)
    return Front(title=_sides(gate), state=gate.answer.value, good=gate.go, line=line, section=section)


def _title(gate: Gate) -> str:
    return f"{gate.answer.value}: {_sides(gate)}"


def _sides(gate: Gate) -> str:
    return f"{gate.candidate.name} against {gate.baseline.name}"


def _facts(gate: Gate) -> Iterator[str]:
    """Why nothing was compared, how many reasons there are, how much was compared and how exactly, and the times."""
    if gate.not_compared:
        yield f"{gate.not_compared}: {gate.fix}"
    gating, others = len(gate.gating), len(gate.others)
    gates = f"{counted(gating, 'reason')} {'gates' if gating == 1 else 'gate'}" if gating else "no reason gates"
    yield gates + (f", {others} {'does' if others == 1 else 'do'} not" if others else "")
    yield (
        f"{gate.candidate.good} of {counted(gate.candidate.cases, 'case')} good, {gate.candidate.checks} checks "
        f"run (baseline: {gate.baseline.good} of {gate.baseline.cases}, {gate.baseline.checks}); numbers of "
        f"{gate.compared} of {counted(gate.cases, 'case')} compared"
    )
    if gate.left_out:
        yield f"not compared: {', '.join(gate.left_out)}"
    if gate.inexact:
        yield f"compared by tolerance only, not to the bit: {'; '.join(gate.inexact)}"
    if gate.differences:
        yield _DIGEST.sub(r"\1", f"differs: {', '.join(gate.differences)}")
    yield f"times: {_times(gate)}"


def _times(gate: Gate) -> str:
    if gate.times is not None:
        return gate.times.text
    if not gate.compared:
        return "not compared, no case is good on both sides"
    return f"not compared, {'other hardware' if gate.inexact else 'no case was good at its first attempt'}"


def _body(gate: Gate) -> Iterator[Block]:
    for title, reasons in (("gates", gate.gating), ("does not gate", gate.others)):
        yield Section(title=title, blocks=(Table(rows=tuple(_kinds(reasons)), right=(0,), code=(2,)),))
    yield from _reasons(gate.reasons, {reason.case for reason in gate.reasons if reason.case}, most=SHOWN)
    yield from _notes(gate)
    yield from _causes(gate, ())


def _kinds(reasons: Iterable[Reason]) -> Iterator[tuple[str, str, str]]:
    for kind, group in groupby(reasons, key=lambda reason: reason.kind):
        same = list(group)
        waived = sum(bool(reason.waiver) for reason in same)
        yield f"{len(same)}x", kind.phrase + (f" ({waived} of them waived)" if waived else ""), kind.value


def _reasons(reasons: Sequence[Reason], linked: Collection[str], *, most: int | None) -> Iterator[Block]:
    """Yield the reasons of one kind together, `most` of them in full; failures of one signature once."""
    for (gates, kind), group in groupby(reasons, key=lambda reason: (reason.gates, reason.kind)):
        same = list(group)
        alike: dict[str, list[Reason]] = {}
        for reason in same:
            key = reason.case or reason.what if most is None else reason.signature or reason.case or reason.what
            alike.setdefault(key, []).append(reason)
        groups = list(alike.values())
        hidden = [] if most is None else groups[most:]
        rest = [reason.case or reason.what for subgroup in hidden for reason in subgroup]
        title = f"{'gates' if gates else 'does not gate'}: {kind.phrase} ({len(same)}) [{kind.value}]"
        entries = [_entry(subgroup, linked, SHOWN_DETAILS if most else None) for subgroup in groups[:most]]
        yield Section(title=title, blocks=(*entries, *([Items(tuple(rest))] if rest else [])), folded=not gates)


def _entry(alike: Sequence[Reason], linked: Collection[str], details: int | None) -> Entry:
    """Return the case, what is wrong, the first `details`, and how to see it again."""
    reason, *others = alike
    name, is_linked = reason.case or "the run", reason.case in linked
    values = f"{reason.baseline} -> {reason.candidate}" if reason.baseline or reason.candidate else ""
    hidden = len(reason.details) - len(reason.details[:details])
    more = (
        f"and {hidden} more of this kind" if hidden else "",
        f"the same in {', '.join(other.case or other.what for other in others)}" if others else "",
    )
    return Entry(
        title=" ".join(filter(None, ("" if is_linked else name, "" if values in reason.what else values))),
        case=name if is_linked else "",
        lines=tuple(filter(None, (reason.waiver, reason.what, *reason.details[:details], *more))),
        command=reason.command if reason.gates or details is None else "",
    )


def _notes(gate: Gate) -> Iterator[Block]:
    yield Section(title="notes", blocks=tuple(Entry(title=note.text, command=note.command) for note in gate.notes))


# What moved, by cause


def _causes(gate: Gate, linked: Collection[str]) -> Iterator[Block]:
    """In how many cases what moved by origin, then every cause under its origin."""
    if not gate.groups:
        return
    differ = ", ".join(difference for difference in gate.differences if difference.split(" ")[0] in _PACKAGES)
    columns, *rows = _summary(gate)
    table = Table(columns=columns, rows=tuple(rows), right=tuple(range(1, len(columns))))
    yield Section(title=f"changes by cause ({differ})" if differ else "changes by cause", blocks=(table,))
    for origin, same in groupby(gate.groups, key=lambda group: group.origin):
        entries = tuple(_cause(group, linked) for group in same)
        yield Section(title=f"moved, {_ORIGINS[origin]} ({len(entries)})", blocks=entries)


def _summary(gate: Gate) -> Iterator[tuple[str, ...]]:
    """Yield the origins as columns; then in how many cases something moved, and what."""
    groups = [[group for group in gate.groups if group.origin is origin] for origin in Origin]
    yield ("", *(origin.value for origin in Origin))
    yield ("causes", *(str(len(of_origin)) for of_origin in groups))
    yield ("cases", *(str(len({case for group in of_origin for case in group.cases})) for of_origin in groups))
    for topic in Topic:
        counts = [len({case for group in of_origin for case in group.moved.get(topic, ())}) for of_origin in groups]
        if any(counts):
            yield (topic.value, *map(str, counts))


def _cause(group: Group, linked: Collection[str]) -> Entry:
    """Return the cause, whether it came or went, what moved in how many cases, and an example."""
    came = {"candidate": ", new", "baseline": ", gone", "": ""}[group.side]
    moved = ", ".join(f"{topic.value} {len(cases)}" for topic, cases in group.moved.items())
    before, after = group.verdicts
    example = f"{group.example}: {before} -> {after}" if before != after else group.example
    return Entry(
        title=f"{group.name}{came}: {counted(len(group.cases), 'case')}",
        case=group.example if group.example in linked else "",
        lines=tuple(filter(None, (group.what, group.link, f"moved: {moved}", example, group.first))),
        command=group.command,
    )


_EPILOG = """\b
Examples:
  fp8-harness compare last~1 last
  fp8-harness compare v1 v2 --allow 'wire=two gathers became one' \\
      --html gate.html
  fp8-harness compare --versions torch=2.15.0,nightly \\
      --env nightly=.venv-nightly pr --select tp=2

\b
A and B are a name of `run --name`, "last", "last~2", a file of `run --json`,
or a folder of such files, the shards of one run.
Cases in cases/quarantine.toml do not gate. Environments of --versions are
made in the state folder and kept; torch comes with its libraries, 5 GB with
CUDA.
Exit codes: 0 GO, 1 NO-GO, 6 nothing was compared.
"""

_REQUIRED = "The cases that the candidate must have passed, and how recently."
_OF_THE_RUNS = ("sources", "expressions")
_OF_THE_VERSIONS = ("environments", "index")
_CODES = {Answer.GO: ExitCode.GOOD, Answer.NO_GO: ExitCode.FAILED, Answer.NOT_COMPARED: ExitCode.NOT_COMPARED}
_Sides = tuple[tuple[str, str], "tuple[RunResult, RunResult]"]  # names and results


@click.command("compare", epilog=_EPILOG)
@click.argument("sources", metavar="[A B | TIER|FILE|CASE-ID...]", nargs=-1)
@click.option("--versions", metavar="PACKAGE=V1,V2", help="Run these cases with each version; compare V1 and the last.")
@click.option("--required", metavar="FILE", type=options.FILE, help=_REQUIRED)
@click.option("--allow", "allowed", metavar="KIND=WHY", multiple=True, help="Accept a kind of change. Repeatable.")
@click.option("--strict", is_flag=True, help="Also gate on cases that failed before.")
@click.option("--gate-times", is_flag=True, help="Also gate on times measured on a CPU.")
@versions_parameter
@options.json_option("the answer")
@click.option("--markdown", "markdown_file", metavar="FILE", type=options.OUTPUT, help="Write the answer as markdown.")
@options.run_option("html_file")
@options.run_option("expressions")
@options.others_option
def compare_command(  # noqa: PLR0913  one parameter an option
    *,
    sources: tuple[str, ...],
    versions: str | None,
    required: Path | None,
    allowed: tuple[str, ...],
    strict: bool,
    gate_times: bool,
    versions_for: Callable[..., Versions],
    json_file: Path | None,
    markdown_file: Path | None,
    html_file: Path | None,
    **_of_the_runs: object,
) -> int:
    """Decide GO or NO-GO: is run B as good as run A? Lists every reason, most severe first.

    NOT COMPARED if the runs share no case, no case is good in both, or no check covered them.

    With --versions the cases are run, and --select and -o are as in other commands that run cases.
    """
    project = options.project_of()
    terms = GatePolicy(
        now=datetime.datetime.now(datetime.UTC),
        required=read_required(required) if required is not None else (),
        quarantine=read_quarantine(project.quarantine),
        allowed=tuple(map(_allowance, allowed)),
        strict=strict,
        gate_times=gate_times,
        faults=recorded_faults(project),
    )
    names, (before, after) = (
        _stored(project, sources) if versions is None else _of_versions(project, versions, versions_for)
    )
    words = given_words(_OF_THE_VERSIONS)
    decision = gate(before, after, terms, names=names, goldens=_goldens(project, after), words=words)
    options.print_report(gate_sections(decision), json_file, decision)
    options.write_output(markdown_file, lambda: gate_markdown(decision).encode())
    options.write_output(html_file, lambda: page_of(project, after, front=gate_front(decision, after)))
    return _CODES[decision.answer]


def _stored(project: Project, sources: tuple[str, ...]) -> _Sides:
    if len(sources) != 2:
        raise click.UsageError("two runs A and B are needed, or --versions.")
    if given_words({"expressions", "others", *_OF_THE_VERSIONS}):
        raise click.UsageError("--select, -o, --env and --index need --versions.")
    first, second = sources
    return (first, second), (results_of(project, first), results_of(project, second))


def _of_versions(project: Project, versions: str, versions_for: Callable[..., Versions]) -> _Sides:
    """Return the first and the last version of a package, after the tiers were run with every one."""
    words = [*given_words(_OF_THE_RUNS), *words_of(options.given_others())]
    runs = run_in_each(project, versions_of(project, versions, versions_for), words)
    options.print_sections(environments_sections(runs), err=True)
    first, *_, last = runs
    return (first, last), (runs[first], runs[last])


def _allowance(text: str) -> Allowance:
    kind, _, reason = text.partition("=")
    kinds = {member.value: member for member in Kind if member.can_be_allowed}
    if kind not in kinds:
        fix = f"use one of {', '.join(kinds)}; a case that fails is excused in cases/quarantine.toml."
        raise HarnessError(f"'{kind}' is no kind of change that can be allowed.", where="--allow", fix=fix)
    if not any(map(str.isalnum, reason)):
        raise HarnessError("it does not say why.", where=f"--allow {text}", fix=f"write '{kind}=why it is good'.")
    return Allowance(kind=kinds[kind], reason=reason.strip())


def _goldens(project: Project, candidate: RunResult) -> Goldens:
    environment = candidate.start.environment or Environment()
    devices = {case.case_id: case.place.device for case in candidate.results if case.place is not None}

    def find(case_id: str) -> Golden | None:
        device = devices.get(case_id, environment.device or "cpu")
        classes = hardware_classes(device, environment.architecture)
        try:
            return find_golden(project.root, classes, family_id(parse_case_id(case_id)))
        except Missing:
            return None

    return find


def versions_of(project: Project, text: str, versions_for: Callable[..., Versions]) -> list[NamedEnvironment]:
    """Return the environments of `--versions PACKAGE=V1,V2`: given by `--env`, the one that runs, or made and kept."""
    package, _, listed = text.partition("=")
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not package or len(set(names)) < 2:
        fix = "write --versions torchao=0.17.0,0.18.0."
        raise HarnessError("it names no package with two versions.", where=f"--versions {text}", fix=fix)
    versions = versions_for(project, package)
    for name in versions.given:
        if name not in names:
            raise HarnessError(f"--versions {text} has no {name}.", where="--env", fix="name one of its versions.")
    return [versions.environment(name) for name in names]
