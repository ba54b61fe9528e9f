"""The JSON document of a run is what its schema says, and the schema refuses what is not."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.document import json_report, run_document, run_result
from harness.environment import Environment
from harness.measured import CastRange, Curve, Measured, Sent
from harness.result import Attempt, CaseResult, RunResult, WithFix
from harness.trace import RankFailure, RankTrace, Run
from harness.verdict import FailureSignature, Finding, NotJudged, Verdict
from tests.builders import a_finding, make_attempt, make_failure, make_result, make_trace, run_of

SCHEMA = json.loads((Path(__file__).parents[2] / "harness/schemas/result.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

seconds = st.floats(0, 1e6)
floats = st.floats()
texts = st.text(max_size=10)
some_text = st.text(min_size=1, max_size=10)
findings = st.builds(
    Finding,
    rule=some_text,
    says=some_text,
    values=st.dictionaries(texts, texts | floats | st.integers(), max_size=2),
    judged=st.booleans(),
    ranks=st.lists(st.integers(0, 7), max_size=2).map(tuple),
    operand=texts,
    within=texts,
    notes=st.lists(texts, max_size=2).map(tuple),
    details=texts,
    verdict=st.sampled_from([Verdict.NUMERIC, Verdict.INVARIANT]),
    step=st.none() | st.integers(0, 9),
    rank=st.none() | st.integers(0, 9),
    module=st.none() | texts,
    expected=st.none() | texts,
    found=st.none() | texts,
    size=st.none() | floats,
    fix=st.none() | texts,
)
signatures = st.builds(
    FailureSignature,
    kind=some_text,
    what=texts,
    where=st.tuples(texts),
    first_step=st.none() | st.integers(0, 9),
)
with_fixes = st.builds(
    WithFix,
    fixes=st.lists(texts, max_size=2).map(tuple),
    verdict=st.sampled_from(Verdict),
    findings=st.lists(findings, max_size=2).map(tuple),
    checks=st.lists(texts, max_size=2).map(tuple),
)
failures = st.builds(
    RankFailure,
    rank=st.integers(0, 9),
    kind=st.sampled_from(["raised", "exited", "signalled", "stuck", "stopped", "garbled"]),
    message=texts,
    traceback=texts,
    phase=texts,
    consequence=st.booleans(),
)
attempts = st.builds(
    Attempt,
    verdict=st.sampled_from(Verdict),
    message=texts,
    wall_s=seconds,
    cpu_s=seconds,
    detected_s=st.none() | seconds,
)


def trace(rank: int, losses: list[float]) -> RankTrace:
    steps = make_trace(losses=losses).steps
    return make_trace(rank=rank, steps=tuple(replace(step, grad_norm=-step.loss) for step in steps))


traces = st.builds(trace, st.integers(0, 7), st.lists(floats, max_size=3))
runs = st.builds(
    Run, traces=st.lists(traces, max_size=2).map(tuple), failures=st.lists(failures, max_size=2).map(tuple)
)
curves = st.builds(Curve, losses=st.tuples(floats), grad_norms=st.tuples(floats))
ranges = st.builds(
    CastRange, fqn=texts, role=st.sampled_from(["input", "weight", "grad_output"]), step=st.integers(1, 9)
)
sent = st.dictionaries(texts, st.builds(Sent, calls=st.integers(0, 9), payload_bytes=st.integers(0, 9)), max_size=1)
measurements = st.builds(
    Measured,
    curves=st.dictionaries(st.sampled_from(["case", "golden"]), curves, max_size=2),
    loss_distance=st.none() | floats,
    saved_bytes=st.none() | st.integers(0, 9),
    expected_saved_bytes=st.none() | st.integers(0, 9),
    wire=sent,
    expected_wire=sent,
    casts=st.lists(ranges, max_size=2).map(tuple),
)
environments = st.builds(Environment, packages=st.dictionaries(texts, texts, max_size=2), threads=st.integers(0, 9))
results = st.builds(
    CaseResult,
    measured=st.none() | measurements,
    golden=st.sampled_from(["stored", "run here", ""]),
    golden_losses=st.lists(floats, max_size=3).map(tuple),
    derived=st.lists(texts, max_size=2).map(tuple),
    case_id=some_text,
    verdict=st.sampled_from(Verdict),
    findings=st.lists(findings, max_size=2).map(tuple),
    attempts=st.lists(attempts, max_size=2).map(tuple),
    world_size=st.integers(1, 8),
    expectation=st.none() | texts,
    run=st.none() | runs,
    checks=st.lists(texts, max_size=2).map(tuple),
    not_judged=st.lists(
        st.builds(NotJudged, check=some_text, reason=some_text, unverified=st.booleans()), max_size=2
    ).map(tuple),
    command=texts,
    with_fix=st.none() | with_fixes,
    failure_signature=st.none() | signatures,
)


def document(run: RunResult) -> Any:
    return json.loads(json_report(run))


def example() -> Any:
    bad = make_result(
        "tp2",
        Verdict.NUMERIC,
        findings=(a_finding(check="finite", message="loss is nan", verdict=Verdict.NUMERIC, step=2, rank=0),),
        attempts=(make_attempt(Verdict.NUMERIC, wall_s=2.0, cpu_s=3.0),),
        world_size=2,
        run=run_of(
            trace(1, [9.0, 9.0]),
            trace(0, [7.123456789012345, math.nan]),
            make_failure(1, kind="stuck", consequence=True),
        ),
        checks=("finite",),
        not_judged=(NotJudged(check="traffic", reason="no rank recorded traffic"),),
    )
    return document(RunResult(results=(bad,), wall_s=4.0, provenance={"torch": "2.13.0"}))


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@given(st.lists(results, max_size=3), seconds, st.booleans(), st.none() | environments)
def test_every_document_is_valid(
    found: list[CaseResult], wall_s: float, interrupted: bool, environment: Environment | None
) -> None:
    run = RunResult(
        results=tuple(found),
        wall_s=wall_s,
        interrupted=interrupted,
        provenance={"torch": "2"},
        environment=environment,
    )
    VALIDATOR.validate(document(run))
    assert document(run)["exit_code"] == run.exit_code
    assert sum(document(run)["totals"].values()) == len(found)


@given(st.lists(results, max_size=3), seconds, st.booleans(), st.none() | environments)
def test_the_results_of_a_document_make_the_same_document(
    found: list[CaseResult], wall_s: float, interrupted: bool, environment: Environment | None
) -> None:
    untraced = [replace(each, run=None if each.run is None else replace(each.run, traces=())) for each in found]
    run = RunResult(results=tuple(untraced), wall_s=wall_s, interrupted=interrupted, environment=environment)
    assert json_report(run_result(run_document(run))) == json_report(run)


def test_the_values_are_those_of_the_lowest_rank_in_full() -> None:
    (case,) = example()["cases"]
    assert case["losses"] == [7.123456789012345, "NaN"]
    assert case["grad_norms"] == [-7.123456789012345, "NaN"]
    assert (case["id"], case["verdict"], case["good"]) == ("tp2", "numeric", False)
    assert (case["seconds"], case["cpu_s"], case["world_size"]) == (2.0, 3.0, 2)
    assert case["findings"][0]["step"] == 2 and case["findings"][0]["module"] is None
    assert case["failures"][0]["kind"] == "stuck"
    assert case["not_judged"] == [{"check": "traffic", "reason": "no rank recorded traffic", "unverified": False}]
    assert (example()["exit_code"], example()["totals"]["numeric"], example()["cpu_s"]) == (1, 1, 3.0)


def spoil(*path: str | int, value: object) -> Callable[[Any], None]:
    def apply(found: Any) -> None:
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    "change",
    [
        spoil("schema", value=1),
        spoil("exit_code", value=6),
        spoil("extra", value=1),
        spoil("totals", value={}),
        spoil("cases", 0, "verdict", value="fine"),
        spoil("cases", 0, "losses", value=[None]),
        spoil("cases", 0, "losses", value=["nan"]),
        spoil("cases", 0, "world_size", value=0),
        spoil("cases", 0, "id", value=""),
        spoil("cases", 0, "extra", value=1),
        spoil("cases", 0, "findings", 0, "verdict", value="passed"),
        spoil("cases", 0, "findings", 0, "step", value="2"),
        spoil("cases", 0, "attempts", 0, "wall_s", value=-1),
        spoil("cases", 0, "failures", 0, "kind", value="lost"),
        spoil("cases", 0, "not_judged", value=["traffic"]),
        spoil("cases", 0, "not_judged", 0, "check", value=None),
        spoil("cases", 0, "not_judged", 0, "reason", value=3),
        spoil("cases", 0, "not_judged", 0, "extra", value=1),
    ],
)
def test_the_schema_refuses_what_no_run_writes(change: Callable[[Any], None]) -> None:
    found = copy.deepcopy(example())
    VALIDATOR.validate(found)
    change(found)
    assert not VALIDATOR.is_valid(found)


@pytest.mark.parametrize("key", sorted(example()["cases"][0]))
def test_no_field_of_a_case_may_be_left_out(key: str) -> None:
    found = example()
    del found["cases"][0][key]
    assert not VALIDATOR.is_valid(found)
