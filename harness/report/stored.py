"""The list of stored runs as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.document import verdict_totals
from harness.environment import Environment
from harness.jsonform import to_json
from harness.plural import counted
from harness.report.run import totals_words
from harness.report.sections import printable
from harness.report.wording import aligned
from harness.running.stored import Stored
from harness.timestamp import to_the_minute
from harness.verdict import Verdict


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A stored run and how its cases ended."""

    run: Stored
    verdicts: tuple[Verdict, ...]

    @property
    def all_verdicts(self) -> tuple[Verdict, ...]:
        """Those of planned cases without a result too."""
        missing = len(self.run.start.cases) - len(self.verdicts)
        return (*self.verdicts, *[Verdict.NOT_RUN] * missing)


def runs_text(found: Sequence[Listed]) -> str:
    """Two lines for every run: its number, as in `last~2`, when it started, and how it ended; where it comes from."""
    if not found:
        return "no runs are stored"
    heads = [
        (
            str(number),
            to_the_minute(each.run.start.started),
            each.run.state,
            f"{counted(len(each.all_verdicts), 'case')}: {totals_words(each.all_verdicts)}",
        )
        for number, each in enumerate(found)
    ]
    lines = aligned(heads, right=(0,)).splitlines()
    return printable("\n".join(f"{line}\n     {_origin(each.run)}" for line, each in zip(lines, found, strict=True)))


def runs_json(found: Sequence[Listed]) -> bytes:
    """The same as JSON."""
    return to_json([_document(number, each) for number, each in enumerate(found)], indent=2) + b"\n"


def _document(number: int, each: Listed) -> dict[str, object]:
    return {
        "number": number,
        "name": each.run.start.name,
        "path": str(each.run.path),
        "started": each.run.start.started,
        "state": each.run.state,
        "imported": each.run.is_imported,
        "cases": len(each.all_verdicts),
        "totals": verdict_totals(each.all_verdicts),
        "asked": each.run.start.asked,
        "environment": each.run.start.environment,
    }


def _origin(run: Stored) -> str:
    """Its name and where it comes from."""
    imported = ["imported"] if run.is_imported else []
    return "; ".join([*filter(None, [run.start.name]), *imported, environment_words(run.start.environment)])


def environment_words(environment: Environment | None) -> str:
    """An environment in short: "torch 2.13.0, torchao 0.18.0, cpu, 1234abcde"."""
    if environment is None:
        return "environment not recorded"
    packages = [f"{name} {environment.packages[name]}" for name in ("torch", "torchao") if name in environment.packages]
    return ", ".join(filter(None, [*packages, environment.device, environment.short_commit]))
