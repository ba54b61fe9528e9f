"""One case for a terminal of 60 columns: what is wrong, curves as sparklines, numbers, checks and the command."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from harness.document import CaseDocument
from harness.measured import CastRange, Curve, Measured, Multiplied, Sent, Speedup
from harness.plural import binary_bytes, counted
from harness.report.sparkline import sparkline
from harness.report.wording import aligned, failure_text, findings_texts, printable

WIDTH = 60
_UNITS = ("", "k", "M", "G", "T", "P", "E")
_SHOWN_LINES = 12  # the last ones of a traceback


def case_text(case: CaseDocument) -> str:
    """The case in blocks under short titles; a block without content is left out. Only ids and commands are longer."""
    parts = [
        "\n".join([printable(case.id), *_wrapped(_headline(case), 2)]),
        _block("findings", findings_texts(case.findings)),
        _block("stacks", [_tail(failure_text(each)) for each in case.failures if not each.consequence]),
        *(_of_measured(case.measured) if case.measured is not None else ()),
        _block("judged by", [", ".join(case.checks)] if case.checks else []),
        _block("not judged", [printable(f"{each.check}: {each.reason}") for each in case.not_judged]),
        f"run it again\n  {printable(case.command)}" if case.command else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _headline(case: CaseDocument) -> str:
    expected = f", as expected: {case.expectation}" if case.expectation else ""
    ranks = counted(case.world_size, "rank")
    return printable(f"{case.verdict.value}{expected}; {ranks}, {case.seconds:.1f} s wall, {case.cpu_s:.1f} s CPU")


def _of_measured(measured: Measured) -> Iterable[str]:
    yield _lines("curves", _curves(measured.curves))
    yield _lines("numbers", _numbers(measured))
    yield _lines("casts to float8 that lose the most", _casts(measured.casts))
    yield _lines("wire, of all ranks and steps", _wire(measured.wire, measured.expected_wire))
    yield _lines("fused", [f"{count} x {name}" for name, count in measured.fused.items()])


def _curves(curves: Mapping[str, Curve]) -> Iterable[str]:
    """Every curve with its first and last value; those of one quantity have one scale."""
    rows = []
    for title, field in (("loss", "losses"), ("gradient", "grad_norms")):
        named = {name: getattr(curve, field) for name, curve in curves.items() if getattr(curve, field)}
        finite = [value for values in named.values() for value in values if math.isfinite(value)]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        for name, values in named.items():
            ends = f"{values[0]:.6g} -> {values[-1]:.6g}"
            rows.append((title, name, sparkline(_thinned(values), low, high), ends))
    return aligned(rows).splitlines() if rows else ()


def _thinned(values: Sequence[float], most: int = 20) -> Sequence[float]:
    """At most so many of the values, evenly spaced, the last one among them."""
    if len(values) <= most:
        return values
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]


def _numbers(measured: Measured) -> Iterable[str]:
    allowed = f" (allowed {max(measured.allowed_loss):.3g})" if measured.allowed_loss else ""
    rows = [
        ("loss, from the golden", _number(measured.loss_distance, f" nats{allowed}")),
        ("gradients, from one rank", _number(measured.parity)),
        ("modules, from their replay", _number(measured.local_parity)),
        ("scaled matmuls", "" if measured.scaled_mm_calls is None else str(measured.scaled_mm_calls)),
        *(
            (f"FLOPs of {words}", flops_text(found, measured.expected_flops.get(words)))
            for words, found in measured.flops.items()
        ),
        ("speed", "" if measured.speedup is None else speedup_words(measured.speedup)),
        ("casts to float8", "" if measured.cast_calls is None else str(measured.cast_calls)),
        ("saved for backward", _against(measured.saved_bytes, measured.expected_saved_bytes)),
    ]
    shown = [row for row in rows if row[1]]
    return aligned(shown).splitlines() if shown else ()


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.3g}{unit}"


def _against(found: int | None, expected: int | None) -> str:
    if found is None:
        return ""
    return binary_bytes(found) + _formula(found == expected, None if expected is None else binary_bytes(expected))


def flops_text(found: Multiplied, expected: Multiplied | None) -> str:
    """FLOPs and calls of all ranks and steps, and whether the formula says the same."""
    wanted = None if expected is None else f"{flop_words(expected.flops)} in {expected.calls} calls"
    return f"{flop_words(found.flops)} in {found.calls} calls{_formula(found == expected, wanted)}"


def _formula(equal: bool, expected: str | None) -> str:
    if expected is None:
        return ""
    return ", as the formula" if equal else f", the formula: {expected}"


def _wire(found: Mapping[str, Sent], expected: Mapping[str, Sent]) -> Iterable[str]:
    for words in sorted({*found, *expected}):
        wanted, sent = expected.get(words), found.get(words)
        yield words
        yield f"  {_sent(sent)}{_formula(wanted == sent, None if wanted is None else _sent(wanted))}"


def _sent(sent: Sent | None) -> str:
    return "none" if sent is None else f"{sent.calls} calls, {binary_bytes(sent.payload_bytes)}"


def _casts(casts: Sequence[CastRange]) -> Iterable[str]:
    for each in sorted(casts, key=lambda each: each.lost, reverse=True)[:3]:
        if each.lost:
            yield f"step {each.step} {printable(each.fqn)} {each.role}"
            yield f"  flushed {each.flushed:.2%}, saturated {each.saturated:.2%}, amax {each.amax:.3g}"


def speedup_words(found: Speedup) -> str:
    """How much faster than the twin, with the interval: "1.234 times as fast as ID: 1.21 to 1.25, 6 pairs"."""
    pairs = counted(found.pairs, "pair")
    return f"{found.ratio:.3f} times as fast as {found.twin}: {found.low:.3f} to {found.high:.3f}, {pairs}"


def flop_words(count: float) -> str:
    """A number of FLOPs with a unit: "57.91 GFLOP"."""
    power = min(max(int(math.log10(count)) // 3, 0) if count > 0 else 0, len(_UNITS) - 1)
    return f"{count / 1000**power:.4g} {_UNITS[power]}FLOP"


def _tail(text: str) -> str:
    head, *lines = text.splitlines()
    return "\n".join([head, *(f"  {line}" for line in lines[-_SHOWN_LINES:])])


def _block(title: str, texts: Sequence[str]) -> str:
    """Wrapped texts under a title."""
    return _lines(title, [line for text in texts for line in _unfolded(text)])


def _unfolded(text: str) -> Iterable[str]:
    """The lines of a text, wrapped; the rows of a table in it with columns as narrow as they can be, where they fit."""
    for is_table, group in itertools.groupby(text.splitlines(), lambda line: len(_cells(line)) > 2):
        lines = list(group)
        indents = [len(line) - len(line.lstrip()) for line in lines]
        table = _narrowed(lines, min(indents)) if is_table else []
        if table and max(map(len, table)) <= WIDTH - 2:
            yield from table
        else:
            for line, indent in zip(lines, indents, strict=True):
                yield from _wrapped(line.strip(), indent, room=WIDTH - 2)


def _narrowed(lines: Sequence[str], indent: int) -> list[str]:
    rows = [_cells(line) for line in lines]
    most = max(map(len, rows))
    table = aligned([(*row, *[""] * (most - len(row))) for row in rows], right=range(most))
    return [" " * indent + line for line in table.splitlines()]


def _cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def _lines(title: str, lines: Iterable[str]) -> str:
    shown = [f"  {line}" for line in lines]
    return "\n".join([title, *shown]) if shown else ""


def _wrapped(text: str, indent: int, room: int = WIDTH) -> list[str]:
    first, rest = " " * indent, " " * (indent + 2)
    return textwrap.wrap(text, room, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
