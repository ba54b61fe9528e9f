"""A run: its cases, what is wrong with those that are not good, the totals, what tiers cover. Also as Markdown."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from harness.hints import VERIFY_GPUS
from harness.matrix.tier import FATES, Coverage, Fate, Selection
from harness.report.case import case_sections, headline
from harness.report.sections import Block, Items, Section, Table, Verbatim, markdown, text_of
from harness.result import CaseResult, Place, ReferenceRun, RunResult, verdict_totals
from harness.text import counted
from harness.verdict import Finding, NotJudged, Verdict


def run_sections(run: RunResult, *, rerun: str, quiet: bool = False, whole: bool = False) -> list[Block]:
    """Return the report for people; `rerun` is the command that runs what was not run.

    `quiet`: without the table. `whole`: with all findings, and what was not checked.
    """
    ran = [result for result in run.results if result.ran]
    bad = [result for result in ran if not result.good and result.verdict is not Verdict.CHANGED]
    missing = len(run.results) - len(ran)
    waiting = f"not run: {counted(missing, 'case')} (`{rerun}` runs {'it' if missing == 1 else 'them'})"
    return [
        *([not_judged_section(run)] if whole else []),
        *([] if quiet else [case_table(ran, short=True)]),
        *case_sections(bad, whole=whole),
        *([waiting] if missing else []),
        *totals(run),
    ]


def case_table(results: Sequence[CaseResult], *, short: bool = False) -> Table:
    """Return a row for every case; `short`: notes of what is told below name its rule and place alone, or its bug."""
    return Table(
        columns=("case", "verdict", "ranks", "wall s", "CPU s", "note"),
        rows=tuple(
            (
                result.case_id,
                result.verdict.value,
                str(result.world_size),
                f"{result.seconds:.1f}",
                f"{result.cpu_s:.1f}",
                _short(result) if short else headline(result),
            )
            for result in results
        ),
        right=(2, 3, 4),
        code=(0,),
        verdict=1,
    )


def _short(result: CaseResult) -> str:
    line, parts = headline(result), result.headline.split(": ")
    if result.verdict is Verdict.KNOWN:
        return ": ".join(parts[1:2]) or line
    is_told = bool(result.findings) and not (result.good or result.excused or result.verdict is Verdict.CHANGED)
    return parts[0] if is_told else line


def totals(run: RunResult) -> Iterator[Section]:
    """Yield what ends a report: what differs from formulas, was not checked, not run or not stored, then the totals."""
    yield _known_faults(run)
    yield differing_formulas(run)
    skipped = [unjudged for result in run.results for unjudged in result.not_judged if unjudged.unverified]
    yield _not_judged("not checked here", skipped)
    yield damage_section(tuple(run.damaged))
    yield Section(title=f"left out, beyond the budget ({len(run.start.left_out)})", blocks=(Items(run.start.left_out),))
    lines = filter(None, [devices_line(run.results), references_line(run.end.references)])
    yield Section(blocks=(*_references(run), *lines, totals_line(run)))


def _known_faults(run: RunResult) -> Section:
    """Each upstream fault that cases show as recorded, with its link, the cases, and whether they pass with the fix."""
    lines = Counter(result.headline for result in run.results if result.verdict is Verdict.KNOWN and result.findings)
    shown = (f"{line.removeprefix('judge/known: ')} (in {counted(count, 'case')})" for line, count in lines.items())
    return Section(title="known issues of torch and torchao", blocks=(Items(tuple(shown)),))


def differing_formulas(run: RunResult) -> Section:
    """Each formula that cases differ from and that nobody verified with these versions, with its first case."""
    changed = [result for result in run.results if result.verdict is Verdict.CHANGED]
    by_formula: dict[str, dict[str, Finding]] = {}
    for result in changed:
        for finding in result.findings:
            by_formula.setdefault(finding.formula, {}).setdefault(result.case_id, finding)
    lines = []
    for formula, findings in by_formula.items():
        name, first = next(iter(findings.items()))
        lines.append(f"{formula} in {counted(len(findings), 'case')}, first in {name}: {first.first_line}")
    unreleased = next((result.unreleased for result in changed if result.unreleased), "")
    counts = f"{unreleased} is not a release: this does not change the exit code. " if unreleased else ""
    lines.append(f"{counts}`compare` and `parity --against` show what is new since another build")
    title = "formulas that nobody verified with these versions disagree"
    return Section(title=title, blocks=(Items(tuple(lines)),) if changed else ())


def damage_section(lines: Sequence[str]) -> Section:
    """Return the lines of stored runs that were not read, because they are not as they were written."""
    return Section(
        title=f"damaged lines ({len(lines)}), not read: run their cases again", blocks=(Items(tuple(lines)),)
    )


def not_judged_section(run: RunResult) -> Section:
    """Return every check that was not checked somewhere, with its reason and the number of cases."""
    return _not_judged("not checked", [unjudged for result in run.results for unjudged in result.not_judged])


def _not_judged(title: str, skipped: Sequence[NotJudged]) -> Section:
    """Reasons that differ in what to do alone share a line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for unjudged in sorted(skipped, key=lambda unjudged: (unjudged.check, unjudged.reason)):
        reasons.setdefault((unjudged.check, unjudged.reason.partition("; `")[0]), []).append(unjudged.reason)
    lines = (f"{check} in {counted(len(alike), 'case')}: {alike[0]}" for (check, _), alike in reasons.items())
    return Section(title=title, blocks=(Items(tuple(lines)),))


def _references(run: RunResult) -> Iterator[str]:
    run_here = sum(result.golden == "run here" for result in run.results)
    if run_here:
        yield f"{counted(run_here, 'case')} compared with BF16 references that were run here: no golden is stored"
    derived = sum(bool(result.derived) for result in run.results)
    if derived:
        judgement = "checked with tolerances derived from BF16 runs with rounding errors: none was measured"
        yield f"{counted(derived, 'case')} {judgement}"


def references_line(references: Sequence[ReferenceRun]) -> str:
    """Return how many references were run, and the CPU seconds of each kind; empty where all were kept."""
    ran = [reference for reference in references if reference.ran]
    kinds = {kind: sum(each.cpu_s for each in ran if each.kind == kind) for kind in sorted({each.kind for each in ran})}
    return f"references: {len(ran)} of {len(references)} run, {_in_words(kinds)}" if ran else ""


def _in_words(parts: Mapping[str, float]) -> str:
    """Return the CPU seconds of all parts, and of each that has some: "7.5 s CPU (cases 5.5, harness 2.0)"."""
    told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if round(seconds, 1))
    return f"{sum(parts.values()):.1f} s CPU{f' ({told})' if told else ''}"


def devices_line(results: Iterable[CaseResult]) -> str:
    """Return which cases ran on GPUs, which on the CPU and why; empty without a GPU, and where all ran there alike."""
    places = [result.place for result in results if result.place is not None]
    on_cpu = [place for place in places if place.device == "cpu"]
    on_gpus = [place for place in places if place.device != "cpu"]
    if not on_cpu and not any(place.exact for place in on_gpus):
        return ""
    exact = Counter(place_words(place) for place in on_gpus if place.exact)
    words = []
    for where, count in Counter(map(place_words, on_gpus)).items():
        some = f"{exact[where]} of them " if exact[where] < count else ""
        words.append(f"{count} on {where}{f', {some}with the exact matmul' if exact[where] else ''}")
    if on_cpu:
        reasons = Counter(place.why for place in on_cpu).most_common()
        why = ", ".join(f"{why} ({count})" for why, count in reasons) if len(reasons) > 1 else reasons[0][0]
        words.append(f"{len(on_cpu)} on the CPU: {why}")
    idle = "" if on_gpus else next((place.idle for place in on_cpu if place.idle), "")
    return "; ".join([*words, *([f"`{VERIFY_GPUS}` verifies {idle}"] if idle else [])])


def place_words(place: Place) -> str:
    """ "8 x NVIDIA H200", or "the CPU"."""
    return "the CPU" if place.device == "cpu" else f"{place.gpus} x {place.device}"


def totals_words(verdicts: Sequence[Verdict]) -> str:
    """Return the number of cases of every verdict that there is: "3 passed, 1 crash"."""
    return ", ".join(f"{count} {name}" for name, count in verdict_totals(verdicts).items() if count) or "nothing"


def totals_line(run: RunResult) -> str:
    """The run on one line: cases by verdict, checks that were judged and that were not, and the seconds it took.

    Of these, what another run of the same cases does not take: of references that are kept from now on.
    """
    counts = totals_words([result.verdict for result in run.results])
    stopped = " - interrupted" if run.end.interrupted else ""
    quarantined = sum(result.excused and bool(result.quarantined) for result in run.results)
    counts += f" ({quarantined} of them quarantined)" if quarantined else ""
    checks = run.check_totals
    judged = f"{counted(checks['judged'], 'check')} ran, {checks['not_judged']} did not; " if run.results else ""
    seconds = f"{run.end.wall_s:.1f} s wall, {_in_words(run.all_cpu_s)}"
    if saved := round(sum(reference.cpu_s for reference in run.end.references if reference.stored), 1):
        seconds += f", of which a second run saves {saved}"
    return f"{counted(len(run.results), 'case')}: {counts}; {judged}{seconds}{stopped}"


def run_markdown(run: RunResult) -> str:
    """The report for pull requests and CI summary pages: totals, the cases that are not good, and collapsed details."""
    bad = [result for result in run.results if not result.verdict.good and result.verdict is not Verdict.CHANGED]
    *notes, last = totals(run)
    blocks: list[Section | Table | str] = []
    if bad:
        blocks.append(case_table(bad))
        blocks += [
            Section(
                title=f"{result.case_id}: {result.verdict.value}",
                blocks=(Verbatim(text_of([section]).rstrip(), "text"),),
                folded=True,
            )
            for result, section in zip(bad, case_sections(bad, whole=True), strict=True)
        ]
    every = Section(title=f"all cases ({len(run.results)})", blocks=(case_table(run.results),), folded=True)
    state = "good" if run.exit_code == 0 else "not good"
    return markdown([Section(title=f"fp8-harness: {state}", blocks=(*last.blocks, *blocks, *notes, every))])


_NOT_COVERED: tuple[Fate, ...] = ("known", "refused", "skipped", "excluded")


def coverage_section(
    accounts: Sequence[tuple[Selection, Coverage]], listed: Collection[Fate] = _NOT_COVERED
) -> Section:
    """What became of every combination of axis values of tiers, with the rules that exclude some; each of `listed`."""
    counts = (
        f"{account.name}: {counted(len(selection.cases), 'case')} of {selection.candidates} cells, "
        f"{counted(len(account.tuples), 'combination')} of {account.strength} axis values."
        for selection, account in accounts
    )
    tables = (table for selection, account in accounts for table in _tables(selection, account, listed))
    return Section(name="coverage", title="Coverage", blocks=(*counts, *tables))


def _tables(selection: Selection, account: Coverage, listed: Collection[Fate]) -> Iterable[Table]:
    fates = tuple((fate, str(count), FATES[fate]) for fate, count in account.counts.items())
    yield Table(title=f"combinations in {account.name}", columns=("kind", "number", "meaning"), rows=fates)
    yield Table(
        title=f"rules that exclude, in {account.name}",
        columns=("rule", "combinations", "cells", "reason"),
        rows=tuple(
            (
                name,
                str(account.by_rule.get(name, 0)),
                str(selection.excluded.get(name, 0)),
                account.reasons.get(name, ""),
            )
            for name in sorted({*account.by_rule, *selection.excluded})
        ),
    )
    for fate in listed:
        combinations = account.of(fate)
        if combinations:
            yield Table(
                title=f"{fate} in {account.name} ({len(combinations)})",
                columns=("block", "values", "rules"),
                rows=tuple(
                    (combination.block, " / ".join(combination.values), ", ".join(combination.rules))
                    for combination in combinations
                ),
                folded=True,
            )
