"""The JSON report of a run, with the schema `harness/schemas/result.schema.json`.

Fields may be added; any other change increments `SCHEMA`. Numbers that are not finite are the strings "NaN", "Infinity"
and "-Infinity".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from harness.environment import Environment
from harness.jsonform import to_json
from harness.measured import Measured
from harness.result import Attempt, CaseResult, RunResult, WithFix, WitnessMade
from harness.trace import RankFailure, Run
from harness.verdict import (
    FailureSignature,
    Finding,
    GoldenSource,
    NotJudged,
    Verdict,
    run_exit_code,
)

SCHEMA = 2
# The fields that `RunResult` and `RunDocument` share.
_SHARED_FIELDS = ("interrupted", "witnesses", "left_out", "environment", "name", "started", "shard")


class CaseDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One case. `losses` (nats) and `grad_norms` are those of the lowest rank that finished; empty if none did."""

    id: str
    verdict: Verdict
    good: bool
    headline: str  # the sentence of the first finding; empty where there is none
    findings: tuple[Finding, ...]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    seconds: float
    cpu_s: float
    world_size: int
    attempts: tuple[Attempt, ...]
    expectation: str | None
    checks: tuple[str, ...]
    not_judged: tuple[NotJudged, ...]
    failures: tuple[RankFailure, ...]
    golden: GoldenSource
    golden_losses: tuple[float, ...]
    derived: tuple[str, ...]
    command: str
    with_fix: WithFix | None
    failure_signature: FailureSignature | None = None
    measured: Measured | None = None
    quarantined: str = ""

    @property
    def ran(self) -> bool:
        """True for a result of ranks, False for a case that the run never got to."""
        return self.verdict is not Verdict.NOT_RUN


class RunDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A run. `totals` has the number of cases of every verdict, including zeros; `check_totals`, of checks in them.

    `witnesses` are those that had to be run; `left_out` are ids that did not fit into `--budget-s`. `name` is that of
    `--name`, `shard` that of `--shard`, such as "2/4". Documents of earlier versions say nothing of the environment.
    """

    schema: int
    exit_code: int
    interrupted: bool
    seconds: float
    cpu_s: float
    totals: dict[str, int]
    check_totals: dict[str, int]
    provenance: dict[str, str]
    cases: tuple[CaseDocument, ...]
    witnesses: tuple[WitnessMade, ...]
    left_out: tuple[str, ...]
    environment: Environment | None = None
    name: str = ""
    started: str = ""  # UTC, ISO 8601, seconds
    shard: str = ""


def json_report(run: RunResult) -> bytes:
    """The report as indented JSON with a trailing newline."""
    return document_json(run_document(run))


def document_json(document: RunDocument) -> bytes:
    """The document as `run --json` writes it."""
    return to_json(document, indent=2) + b"\n"


def run_document(run: RunResult) -> RunDocument:
    """The report of a run, with its cases in the order of the results."""
    return document_of(
        [_case_document(result) for result in run.results],
        seconds=run.wall_s,
        provenance=dict(sorted(run.provenance.items())),
        **{name: getattr(run, name) for name in _SHARED_FIELDS},
    )


def run_result(document: RunDocument) -> RunResult:
    """The document as a `RunResult`, for code that prints results; without what ranks recorded."""
    return RunResult(
        results=tuple(_case_result(case) for case in document.cases),
        wall_s=document.seconds,
        provenance=document.provenance,
        **{name: getattr(document, name) for name in _SHARED_FIELDS},
    )


def document_of(cases: Sequence[CaseDocument], *, interrupted: bool, shard: str = "", **facts: Any) -> RunDocument:
    """The report of these cases: their totals and the exit code, with the other `facts` of a run."""
    verdicts = [case.verdict for case in cases]
    return RunDocument(
        schema=SCHEMA,
        exit_code=int(run_exit_code(cases, interrupted=interrupted, shard=shard)),
        interrupted=interrupted,
        cpu_s=sum(case.cpu_s for case in cases),
        totals=verdict_totals(verdicts),
        check_totals=check_totals(cases),
        cases=tuple(cases),
        shard=shard,
        **facts,
    )


def verdict_totals(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """The number of cases of every verdict, in the order of `Verdict`."""
    return {verdict.value: verdicts.count(verdict) for verdict in Verdict}


def check_totals(cases: Sequence[CaseResult] | Sequence[CaseDocument]) -> dict[str, int]:
    """How many checks were judged over all cases, and how many were not."""
    return {
        "judged": sum(len(case.checks) for case in cases),
        "not_judged": sum(len(case.not_judged) for case in cases),
    }


def _case_result(case: CaseDocument) -> CaseResult:
    names = [name for name in CaseResult.__struct_fields__ if name not in ("case_id", "run")]
    run = Run(traces=(), failures=case.failures) if case.failures else None
    return CaseResult(case_id=case.id, run=run, **{name: getattr(case, name) for name in names})


def _case_document(result: CaseResult) -> CaseDocument:
    traces = sorted(result.run.traces, key=lambda trace: trace.rank) if result.run else []
    steps = traces[0].steps if traces else ()
    return CaseDocument(
        id=result.case_id,
        good=result.verdict.good,
        headline=result.findings[0].first_line if result.findings else "",
        losses=tuple(step.loss for step in steps),
        grad_norms=tuple(step.grad_norm for step in steps),
        failures=result.run.failures if result.run else (),
        **{name: getattr(result, name) for name in CaseDocument.__struct_fields__ if hasattr(result, name)},
    )
