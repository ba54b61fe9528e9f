"""One case: what is wrong with it, how its ranks failed, what was measured, and the command that runs it again."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import TypeVar

from msgspec.structs import replace

from harness.checks.catalogue import first_effect
from harness.checks.failures import LAST_OUTPUT, is_misfit
from harness.checks.scales import check_underflow
from harness.headline import alike
from harness.hints import EXPLAIN_RULE
from harness.report.sections import Block, Entry, Facts, Items, Section, Table, Verbatim
from harness.result import CaseResult, Curve, Measured, Multiplied, Sent, Speedup
from harness.text import binary_bytes, counted, format_ranks
from harness.trace import RankFailure
from harness.verdict import Finding, Verdict

SHOWN_TRACEBACK_LINES = 25  # the last ones; the JSON report has all
_UNITS = ("", "k", "M", "G", "T", "P", "E")
_T = TypeVar("_T")
_MOST_BARS = 20
_BARS = "▁▂▃▄▅▆▇█"
_NOTE_CHARS = 400  # of an error, whose text the section of its case has whole


def outcome(result: CaseResult) -> str:
    """Return how a case ended, as the end of a sentence that starts with its id."""
    unjudged = bool(result.findings) and not any(finding.judged for finding in result.findings)
    return "could not be checked" if unjudged else result.verdict.phrase


def headline(result: CaseResult) -> str:
    """What is wrong with a case, or what was unusual about it, on one line; empty if nothing was. An error is cut."""
    if result.findings:
        others = len(result.findings) - len(alike(result.findings))
        more = f" (+{others} more)" if others and result.verdict is not Verdict.KNOWN else ""
        excused = f"{result.quarantined.partition(':')[0]}: " if result.quarantined and result.excused else ""
        line = result.headline
        if result.verdict is Verdict.CHANGED:  # the summary has the rest, once for each formula
            formulas = dict.fromkeys(finding.formula for finding in result.findings)
            line, more = f"differs from what the formula says of {', '.join(formulas)}", ""
        return f"{excused}{line if len(line) <= _NOTE_CHARS else line[:_NOTE_CHARS] + ' …'}{more}"
    parts = (result.expectation and f"as expected: {result.expectation}", retried(result))
    return "; ".join(part for part in parts if part).replace("\n", " ")


def retried(result: CaseResult) -> str:
    """Return the number of attempts and the reasons for retrying; empty after a single attempt."""
    if len(result.attempts) < 2:
        return ""
    earlier = "; ".join(f"{attempt.verdict.value}: {attempt.message}" for attempt in result.attempts[:-1])
    return f"{len(result.attempts)} attempts, earlier: {earlier}"


def finding_entry(finding: Finding) -> Entry:
    """Return a finding: rule, place and sentence, then what was expected and found, and what to do."""
    where = f" [{finding.place}]" if finding.place else ""
    values = (("expected", finding.expected), ("found", finding.found), ("fix", finding.fix))
    first, _, details = finding.message.partition("\n")
    lines = (f"{name}: {value}" for name, value in values if value is not None)
    return Entry(title=f"{finding.rule}{where}: {first}", lines=(*filter(None, [details]), *lines))


def three_lines(result: CaseResult) -> tuple[Block, ...]:
    """Return what is wrong, why we say so and what to do next; then what else was found, on one line."""
    texts = [Verbatim(text) if text.startswith("next: ") else text for text in result.three_lines.texts]
    also = _also(result.findings) if result.findings and result.verdict is not Verdict.KNOWN else ""
    return (*texts, *filter(None, [also]))


def _also(findings: Sequence[Finding]) -> str:
    """Return the rules of the other findings: those as near to the cause, then those that likely follow."""
    same, split = alike(findings), first_effect(findings) or len(findings)
    step, groups = same[0].step or 1, defaultdict[str, list[Finding]](list)
    for place, finding in enumerate(findings):
        if finding not in same:
            follows = place >= split or (finding.step or 0) > step
            groups["not checked" if not finding.judged else "follow" if follows else "near"].append(finding)
    # Any other number moves the shares that underflow.
    effects = [finding for finding in groups["follow"] if finding.check != check_underflow.name]
    parts = (
        _rules(groups["near"], step),
        f"{len(effects)} that likely follow: {_rules(effects, step)}" if effects else "",
        f"not checked: {_rules(groups['not checked'], step)}" if groups["not checked"] else "",
    )
    return f"also: {'; '.join(filter(None, parts))}" if any(parts) else ""


def _rules(findings: Sequence[Finding], step: int) -> str:
    """Return each rule with the number of its modules or findings, and the step in which it is first broken."""
    words = []
    for rule in dict.fromkeys(finding.rule for finding in findings):
        found = [finding for finding in findings if finding.rule == rule]
        modules, first = {finding.module for finding in found}, min(finding.step or 0 for finding in found)
        many = f" in {len(modules)} modules" if len(modules) > 1 else f" ({len(found)})" if len(found) > 1 else ""
        words.append(f"{rule}{many}{f' from step {first}' if first > step else ''}")
    return ", ".join(words)


def evidence(findings: Sequence[Finding]) -> Section:
    """Return every complete finding, with its numbers and digests."""
    more = f"`{EXPLAIN_RULE}` has the meaning of a rule, its usual causes and what to do."
    return Section(title="findings", blocks=(*map(finding_entry, findings), *([more] if findings else [])))


def case_section(
    result: CaseResult, first: Mapping[str, str] = MappingProxyType({}), *, whole: bool = False
) -> Section:
    """Return a case that is not good. `first`: the case that shows a traceback; the others refer to it.

    `whole`: with all that is known of its findings.
    """
    more = (retried(result), result.quarantined if result.excused else "")
    return Section(
        title=f"{result.case_id} {outcome(result)}",
        blocks=(
            *three_lines(result),
            *([evidence(result.findings)] if whole else []),
            *_failures(result, first),
            *filter(None, more),
            *reproduce(result),
        ),
    )


def reproduce(result: CaseResult) -> tuple[Block, ...]:
    """Return the command that runs a case again, where the third line is another one."""
    said = result.three_lines.next.startswith(result.command)
    return () if said or not result.command else (Verbatim(f"reproduce: {result.command}"),)


def case_sections(results: Sequence[CaseResult], *, whole: bool = False) -> list[Section]:
    """Return a section for every case that is not good. The first one with a traceback shows it."""
    bad = [result for result in results if not result.verdict.good]
    first: dict[str, str] = {}
    for result in bad:
        for failure in result.failures:
            first.setdefault(_raised(failure), result.case_id)
    return [case_section(result, first, whole=whole) for result in bad]


def _failures(result: CaseResult, first: Mapping[str, str]) -> Iterator[Block]:
    """Yield how ranks failed, each traceback once, without consequences."""
    causes = [failure for failure in result.failures if not failure.consequence] or result.failures
    shown = [failure for failure in (_shortened(cause, result.case_id, first) for cause in causes) if failure.traceback]
    shown.sort(key=lambda failure: (failure.traceback, failure.rank))
    for _, group in groupby(shown, key=lambda failure: failure.traceback):
        yield from failure_blocks(next(group))


def _shortened(failure: RankFailure, case_id: str, first: Mapping[str, str]) -> RankFailure:
    """The failure without what its finding says: where ranks are stuck, a misfit; or the traceback of another case."""
    _, mark, output = failure.traceback.partition(LAST_OUTPUT)
    if failure.kind == "stuck" or is_misfit(failure.message):
        return replace(failure, traceback=mark + output)
    other = first.get(_raised(failure), case_id)
    return failure if other == case_id else replace(failure, traceback=f"same traceback as {other}")


def _raised(failure: RankFailure) -> str:
    return failure.traceback.partition(LAST_OUTPUT)[0].rstrip()


def failure_blocks(failure: RankFailure, *, most: int | None = SHOWN_TRACEBACK_LINES) -> tuple[Block, ...]:
    """Return how a rank failed, with the last lines of its traceback or the first of its stack dump."""
    lines = failure.traceback.rstrip().splitlines()
    omitted = 0 if most is None else max(len(lines) - most, 0)
    if omitted:  # a dump begins with the most recent call
        dump = [*lines[:most], f"({omitted} more lines)"]
        lines = dump if failure.kind == "stuck" else [f"({omitted} earlier lines)", *lines[omitted:]]
    text = "\n".join(lines)
    return (failure_words(failure, [failure.rank]), *([Verbatim(text)] if lines else []))


def failure_words(failure: RankFailure, ranks: Sequence[int]) -> str:
    """Return how ranks failed in the same way: "ranks 0-2 raised in step 1: ValueError: x"."""
    phase = f" in {failure.phase}" if failure.phase else ""
    because = " (after another rank failed)" if failure.consequence else ""
    return f"{format_ranks(ranks)} {failure.kind}{phase}{because}: {failure.message}"


def shown_case(case: CaseResult) -> Iterator[Section]:
    """Yield what `show` prints."""
    expected = f", as expected: {case.expectation}" if case.expectation else ""
    took = f"{counted(case.world_size, 'rank')}, {case.seconds:.1f} s wall, {case.cpu_s:.1f} s CPU"
    yield Section(title=case.case_id, blocks=(f"{case.verdict.value}{expected}; {took}",))
    yield Section(title="what is wrong", blocks=three_lines(case))
    yield evidence(case.findings)
    causes = [failure for failure in case.failures if not failure.consequence]
    yield Section(title="stacks", blocks=tuple(block for cause in causes for block in failure_blocks(cause, most=12)))
    if case.measured is not None:
        yield from _measured_sections(case.measured)
    yield Section(title="checked", blocks=(", ".join(case.checks),) if case.checks else ())
    skipped = tuple(f"{unjudged.check}: {unjudged.reason}" for unjudged in case.not_judged)
    yield Section(title="not checked", blocks=(Items(skipped),))
    yield Section(title="run it again", blocks=(Verbatim(case.command),) if case.command else ())


def _measured_sections(measured: Measured) -> Iterator[Section]:
    yield Section(title="curves", blocks=(Table(rows=tuple(_curve_rows(measured.curves))),))
    more = (
        ("speed", "" if measured.speedup is None else speedup_words(measured.speedup)),
        ("casts to float8", "" if measured.cast_calls is None else str(measured.cast_calls)),
    )
    yield Section(title="numbers", blocks=(Facts((*distances(measured), *more)),))
    sent = tuple((*cells, "differs" if differs else "") for *cells, differs in communicated(measured))
    table = Table(columns=("", "found", "formula", ""), rows=sent)
    yield Section(title="communicated, by all ranks in all steps", blocks=(table,))
    fused = tuple(f"{count} x {name}" for name, count in measured.fused.items())
    yield Section(title="fused", blocks=(Items(fused),))


def communicated(measured: Measured) -> list[tuple[str, str, str, bool]]:
    """Return what ranks sent and saved, found and by the formula, and whether these differ: what differs first."""
    wire, expected = measured.wire, measured.expected_wire
    rows = []
    for words in sorted({*wire, *(expected or {}), *measured.limited_wire}):
        if expected is None or words in measured.limited_wire:
            rows.append((words, _sent(wire.get(words)), "not given" if expected is None else "limits only", False))
        else:
            found, formula = wire.get(words), expected.get(words)
            rows.append((words, _sent(found), _sent(formula), found != formula))
    if (saved := measured.saved_bytes) is not None:
        by_formula = measured.expected_saved_bytes
        shown = "not given" if by_formula is None else binary_bytes(by_formula)
        rows.append(("saved for backward", binary_bytes(saved), shown, by_formula not in (None, saved)))
    return sorted(rows, key=lambda row: not row[-1])


def _curve_rows(curves: Mapping[str, Curve]) -> Iterator[tuple[str, ...]]:
    """Yield every curve with its first and last value; those of one quantity have one scale."""
    for title, field in (("loss", "losses"), ("gradient", "grad_norms")):
        named = {name: getattr(curve, field) for name, curve in curves.items() if getattr(curve, field)}
        finite = [value for values in named.values() for value in values if math.isfinite(value)]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        for name, values in named.items():
            ends = f"{values[0]:.6g} -> {values[-1]:.6g}"
            # Evenly spaced, the last one among them.
            some = [round(at * (len(values) - 1) / (_MOST_BARS - 1)) for at in range(_MOST_BARS)]
            shown = values if len(values) <= _MOST_BARS else [values[at] for at in some]
            yield title, name, sparkline(shown, low, high), ends


def distances(measured: Measured) -> tuple[tuple[str, str], ...]:
    """Return how far the numbers are from the references, and what was multiplied; empty values are not known."""
    allowed = f" (allowed {max(measured.allowed_loss):.3g})" if measured.allowed_loss else ""

    def shown(value: float | None, unit: str) -> str:
        return "" if value is None else f"{value:.3g}{unit}"

    return (
        ("loss, from the golden", shown(measured.loss_distance, f" nats{allowed}")),
        ("gradients, from the reference", shown(measured.parity, " relative")),
        ("modules, from their replay", shown(measured.module_replay, " relative")),
        ("scaled matmuls", "" if measured.scaled_mm_calls is None else str(measured.scaled_mm_calls)),
        *(
            (f"FLOPs of {words}", _beside(multiplied, measured.expected_flops.get(words), _multiplied))
            for words, multiplied in measured.flops.items()
        ),
    )


def _beside(found: _T, expected: _T | None, words: Callable[[_T], str]) -> str:
    """Return what was measured, beside what the formula says where it says something."""
    if expected is None:
        return words(found)
    return f"{words(found)}{', as the formula' if found == expected else f', the formula: {words(expected)}'}"


def _multiplied(multiplied: Multiplied) -> str:
    return f"{flop_words(multiplied.flops)} in {multiplied.calls} calls"


def _sent(sent: Sent | None) -> str:
    return "none" if sent is None else f"{sent.calls} calls, {binary_bytes(sent.payload_bytes)}"


def speedup_words(speedup: Speedup) -> str:
    """Return the speedup over the BF16 counterpart: "1.234 times as fast as ID: 1.21 to 1.25, 6 pairs"."""
    pairs = counted(speedup.pairs, "pair")
    return f"{speedup.ratio:.3f} times as fast as {speedup.twin}: {speedup.low:.3f} to {speedup.high:.3f}, {pairs}"


def flop_words(count: float) -> str:
    """Return a number of FLOPs with a unit: "57.91 GFLOP"."""
    power = min(max(int(math.log10(count)) // 3, 0) if count > 0 else 0, len(_UNITS) - 1)
    return f"{count / 1000**power:.4g} {_UNITS[power]}FLOP"


def sparkline(values: Sequence[float | None], low: float | None = None, high: float | None = None) -> str:
    """A bar for every value, from `low` to `high` or of the finite ones; " " for None, "!" for what is not finite."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low = min(finite, default=0.0) if low is None else low
    high = max(finite, default=0.0) if high is None else high
    return "".join(_bar(value, low, high) for value in values)


def _bar(value: float | None, low: float, high: float) -> str:
    if value is None:
        return " "
    if not math.isfinite(value):
        return "!"
    share = (value - low) / (high - low) if high > low else 0.0
    return _BARS[min(max(round(share * (len(_BARS) - 1)), 0), len(_BARS) - 1)]
