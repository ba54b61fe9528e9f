"""The list of stored runs as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from harness.environment import Environment
from harness.jsonform import to_json
from harness.plural import counted
from harness.report.run import totals_words
from harness.report.sections import printable
from harness.report.wording import aligned
from harness.result import verdict_totals
from harness.running.stored import Stored
from harness.store import RunStore
from harness.timestamp import to_the_minute
from harness.verdict import Verdict


def verdicts_of(run: Stored) -> list[Verdict]:
    """How its cases ended; those without a result were not run."""
    found = [case.verdict for case in RunStore(run.path).numbers(lambda _: True).values()]
    return [*found, *[Verdict.NOT_RUN] * (len(run.start.cases) - len(found))]


def runs_text(found: Sequence[Stored]) -> str:
    """Two lines for every run: its number, as in `last~2`, when it started, and how it ended; where it comes from."""
    if not found:
        return "no runs are stored"
    heads = [
        (
            str(number),
            to_the_minute(run.start.started),
            run.state,
            f"{counted(len(verdicts), 'case')}: {totals_words(verdicts)}",
        )
        for number, (run, verdicts) in enumerate((run, verdicts_of(run)) for run in found)
    ]
    lines = aligned(heads, right=(0,)).splitlines()
    return printable("\n".join(f"{line}\n     {_origin(run)}" for line, run in zip(lines, found, strict=True)))


def runs_json(found: Sequence[Stored]) -> bytes:
    """The same as JSON."""
    return to_json([_document(number, run) for number, run in enumerate(found)], indent=2) + b"\n"


def _document(number: int, run: Stored) -> dict[str, object]:
    verdicts = verdicts_of(run)
    return {
        "number": number,
        "name": run.start.name,
        "path": str(run.path),
        "started": run.start.started,
        "state": run.state,
        "imported": run.is_imported,
        "cases": len(verdicts),
        "totals": verdict_totals(verdicts),
        "argv": run.start.argv,
        "environment": run.start.environment,
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
