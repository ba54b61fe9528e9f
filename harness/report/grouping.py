"""What moved between the two sides of a gate, by origin and cause: a table first, then every cause with an example."""

from __future__ import annotations

from collections.abc import Iterator

from harness.gate.causes import Group, Origin
from harness.gate.gate import Gate
from harness.gate.reason import Topic
from harness.plural import counted
from harness.report.sections import printable, wrapped
from harness.report.wording import aligned

_PACKAGES = ("torch", "torchao", "torchtitan", "numpy")


def groups_text(found: Gate, width: int) -> str:
    """The end of a gate on a terminal of this width; empty where nothing moved."""
    if not found.groups:
        return ""
    table = aligned(summary_rows(found), right=range(1, len(Origin) + 1))
    return "\n\n".join([f"{what_moved(found)}:", table, origins_text(found, width)])


def what_moved(found: Gate) -> str:
    """The title: which packages differ."""
    differ = [each for each in found.differences if each.split(" ")[0] in _PACKAGES]
    return f"what moved, by cause ({', '.join(differ)})" if differ else "what moved, by cause"


def origins_text(found: Gate, width: int) -> str:
    """Every cause under its origin."""
    parts = []
    for origin in Origin:
        groups = [group for group in found.groups if group.origin is origin]
        if groups:
            parts.append("\n".join([f"{phrase(origin)}:", *(line for each in groups for line in _group(each, width))]))
    return "\n\n".join(parts)


def summary_rows(found: Gate) -> list[tuple[str, ...]]:
    """The origins as columns; then in how many cases something moved, and what."""
    groups = [[group for group in found.groups if group.origin is origin] for origin in Origin]
    rows = [("", *(origin.value for origin in Origin))]
    rows.append(("causes", *(str(len(each)) for each in groups)))
    rows.append(("cases", *(str(len({case for group in each for case in group.cases})) for each in groups)))
    for topic in Topic:
        counts = [len({case for group in each for case in group.moved.get(topic, ())}) for each in groups]
        rows += [(topic.value, *map(str, counts))] if any(counts) else []
    return rows


def phrase(origin: Origin) -> str:
    """What an origin means."""
    return {
        Origin.TORCH: "torch: changed on purpose, or a fault on record",
        Origin.OURS: "ours: what the candidate was not judged by",
        Origin.UNEXPLAINED: "unexplained: nothing on record accounts for it",
    }[origin]


def title(group: Group) -> str:
    """The cause, whether it came or went, and the number of cases."""
    came = {"candidate": ", new", "baseline": ", gone", "": ""}[group.side]
    return f"{group.name}{came}: {counted(len(group.cases), 'case')}"


def group_lines(group: Group) -> list[str]:
    """The cause, what moved in how many cases, and the example, without the command."""
    moved = ", ".join(f"{topic.value} {len(cases)}" for topic, cases in group.moved.items())
    before, after = group.verdicts
    example = f"{group.example}: {before} -> {after}" if before != after else group.example
    return [printable(line) for line in (group.what, group.link, f"moved: {moved}", example, group.first) if line]


def _group(group: Group, width: int) -> Iterator[str]:
    yield f"  {title(group)}"
    for line in group_lines(group):
        yield from wrapped(line, width, "    ", "      ")
    if group.command:
        yield f"    $ {group.command}"
