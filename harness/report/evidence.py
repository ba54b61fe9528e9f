"""The evidence of a ring as text: a summary for people, in markdown, which is stored beside the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from harness.evidence.ring import Ring, RingItem, RingReport
from harness.plural import counted

_SHOWS: dict[Ring, str] = {
    "kernel": "The float8 matmul of the device, beside the exact one",
    "proof": "The exact matmul with the collectives, sharding and compiler of the device",
    "native": "The kernels and collectives of the device in bfloat16",
}
_MOST_CHANGES = 40


def headline(report: RingReport) -> str:
    """One line: ring, class, whether all is good, how many of what."""
    verdicts = Counter(item.verdict for item in report.items)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    kind = "rehearsal of " if report.rehearsed else ""
    result = "good" if report.good else "NOT GOOD"
    return f"{kind}{report.ring} on {report.hardware}: {result}; {counts}; {report.seconds:g} s"


def ring_markdown(report: RingReport, changed: Sequence[str] | None) -> str:
    """The summary. `changed` since the evidence that it replaces; None where there was none."""
    return "\n".join(_lines(report, changed)) + "\n"


def _lines(report: RingReport, changed: Sequence[str] | None) -> Iterator[str]:
    yield f"# {_SHOWS[report.ring]}"
    yield ""
    if report.rehearsed:
        yield "**A rehearsal on a CPU.** It shows that the command works, and nothing about a GPU."
        yield ""
    yield f"{headline(report)}."
    yield ""
    yield from _bad([item for item in report.items if not item.good])
    yield from _section("Largest numbers", _largest(report.items))
    yield from _section("Left out, and doubts", report.notes)
    if changed is not None:
        more = [f"and {len(changed) - _MOST_CHANGES} more"] if len(changed) > _MOST_CHANGES else []
        yield from _section("Changed", [*changed[:_MOST_CHANGES], *more] or ["nothing"])
    yield from _section("Made by", _origin(report))


def _bad(items: Sequence[RingItem]) -> Iterator[str]:
    if items:
        told = [f"{item.name}: {item.verdict}{''.join(f'; {line}' for line in item.says[:2])}" for item in items]
        yield from _section(counted(len(items), "problem"), told)


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"## {title}"
        yield ""
        yield from (f"- {line}" for line in lines)
        yield ""


def _largest(items: Sequence[RingItem]) -> list[str]:
    """Of every number that was measured, the largest with what it is of, and what was allowed there."""
    names = dict.fromkeys(name for item in items for name in item.numbers if name != "allowed")
    lines = []
    for name in names:
        item = max((each for each in items if name in each.numbers), key=lambda each: each.numbers[name])
        allowed = f" of {item.numbers['allowed']:.3g}" if "allowed" in item.numbers else ""
        lines.append(f"{name}: {item.numbers[name]:.3g}{allowed}, {item.name}")
    return lines


def _origin(report: RingReport) -> list[str]:
    here = report.environment
    facts = {
        "command": f"`{report.command}`",
        "created": report.created,
        "devices": "; ".join(report.memory) or f"{counted(report.devices, 'rank')} of {here.cpu or 'a CPU'}",
        "driver": here.driver,
        "packages": ", ".join(f"{name} {version}" for name, version in here.packages.items()),
        "commit": here.commit,
        "variables": ", ".join(f"{name}={value}" for name, value in report.variables.items()),
    }
    return [f"{name}: {value}" for name, value in facts.items() if value]
