"""The JSON document of a whole run, for other programs. Its schema is `harness/schemas/result.schema.json`.

Fields are only added; a change of meaning raises `SCHEMA`. Numbers that are not finite are the strings "NaN",
"Infinity" and "-Infinity".
"""

from __future__ import annotations

import msgspec

from harness.jsonform import to_json
from harness.result import Attempt, CaseResult, RunResult
from harness.trace import RankFailure
from harness.verdict import Finding, Verdict

SCHEMA = 1


class CaseDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One case. `losses` (nats) and `grad_norms` are those of the lowest rank that finished; empty when none did."""

    id: str
    verdict: Verdict
    good: bool
    findings: tuple[Finding, ...]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    seconds: float
    cpu_s: float
    world_size: int
    attempts: tuple[Attempt, ...]
    expectation: str | None
    checks: tuple[str, ...]
    failures: tuple[RankFailure, ...]
    command: str


class RunDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `totals` counts the cases of every verdict, also of those that did not occur."""

    schema: int
    exit_code: int
    interrupted: bool
    seconds: float
    cpu_s: float
    totals: dict[str, int]
    provenance: dict[str, str]
    cases: tuple[CaseDocument, ...]


def json_report(run: RunResult) -> bytes:
    """The document as indented JSON text with a line break at its end."""
    return to_json(run_document(run), indent=2) + b"\n"


def run_document(run: RunResult) -> RunDocument:
    """The document of a run, its cases in the order of the results."""
    return RunDocument(
        schema=SCHEMA,
        exit_code=int(run.exit_code),
        interrupted=run.interrupted,
        seconds=run.wall_s,
        cpu_s=sum(result.cpu_s for result in run.results),
        totals=verdict_totals(run),
        provenance=dict(sorted(run.provenance.items())),
        cases=tuple(_case_document(result) for result in run.results),
    )


def verdict_totals(run: RunResult) -> dict[str, int]:
    """How many cases ended with each verdict, in the order of `Verdict`."""
    verdicts = [result.verdict for result in run.results]
    return {verdict.value: verdicts.count(verdict) for verdict in Verdict}


def _case_document(result: CaseResult) -> CaseDocument:
    traces = sorted(result.run.traces, key=lambda trace: trace.rank) if result.run else []
    steps = traces[0].steps if traces else ()
    return CaseDocument(
        id=result.case_id,
        verdict=result.verdict,
        good=result.verdict.good,
        findings=result.findings,
        losses=tuple(step.loss for step in steps),
        grad_norms=tuple(step.grad_norm for step in steps),
        seconds=result.seconds,
        cpu_s=result.cpu_s,
        world_size=result.world_size,
        attempts=result.attempts,
        expectation=result.expectation,
        checks=result.checks,
        failures=result.run.failures if result.run else (),
        command=result.command,
    )
