"""The lines of a run are what their schema says, and the schema is what the structs and their facts are."""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.jsonform import compact
from harness.result import CaseResult, RunEnd, RunResult, RunStart
from harness.run_options import RunOptions
from harness.store import RunStore, line_schema, run_lines
from harness.trace import RankTrace
from harness.verdict import NotJudged, Verdict
from tests.builders import a_finding, make_attempt, make_failure, make_result, make_results, make_trace, run_of

FILE = Path(__file__).parents[2] / "harness/schemas/result.schema.json"
SCHEMA = json.loads(FILE.read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

# Options are those that are given as words, with limits of their own.
OF_TYPES: dict[Any, st.SearchStrategy[Any]] = {
    float: st.floats(),
    int: st.integers(-9, 9),
    str: st.text(max_size=9),
    RunOptions: st.just(RunOptions()),
}


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type; structs have any values in all of their fields but live traces."""
    if kind in OF_TYPES:
        return OF_TYPES[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {field.name: any_of(field.type) for field in msgspec.structs.fields(kind) if field.name != "run"}
        return st.builds(kind, **fields)
    origin = get_origin(kind)
    inner = [argument for argument in get_args(kind) if argument is not ...]
    if origin in (Union, UnionType):
        return st.one_of(map(any_of, inner))
    if origin is tuple:
        many = ... in get_args(kind)
        return st.lists(any_of(*inner), max_size=2).map(tuple) if many else st.tuples(*map(any_of, inner))
    if origin in (dict, Mapping):
        return st.dictionaries(*map(any_of, inner), max_size=2)
    return st.from_type(kind)


def trace(rank: int, losses: list[float]) -> RankTrace:
    steps = make_trace(losses=losses).steps
    return make_trace(rank=rank, steps=tuple(replace(step, grad_norm=-step.loss) for step in steps))


def lines(run: RunResult) -> list[Any]:
    return [json.loads(line) for line in run_lines(run).splitlines()]


def example() -> list[Any]:
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
    return lines(make_results(bad, wall_s=4.0, provenance={"torch": "2.13.0"}))


def test_the_stored_schema_is_that_of_the_structs() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert f"{compact(line_schema())}\n" == FILE.read_text(), (
        "run `fp8-harness show --schema > harness/schemas/result.schema.json`: a field has changed"
    )


def test_structs_facts_and_options_are_described_where_they_are_declared() -> None:
    of = {name: part.get("properties", {}) for name, part in SCHEMA["$defs"].items()}
    assert all(part["description"] for part in SCHEMA["$defs"].values())
    assert of["RunEnd"]["totals"]["description"] == "The number of cases of every verdict."
    assert of["CaseResult"]["cpu_s"]["description"].startswith("User + system seconds")
    assert all(field["description"] for field in of["RunOptions"].values())


some_runs = st.builds(
    RunResult,
    results=st.lists(any_of(CaseResult), max_size=2, unique_by=lambda result: result.case_id).map(tuple),
    start=any_of(RunStart),
    end=any_of(RunEnd),
)


@given(some_runs)
def test_every_line_is_valid_and_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, run: RunResult
) -> None:
    start, *cases, end = all_lines = lines(run)
    for line in all_lines:
        VALIDATOR.validate(line)
    assert start["cases"] == [case["id"] for case in cases]
    assert end["exit_code"] == run.exit_code and sum(end["totals"].values()) == len(cases)
    path = tmp_path_factory.getbasetemp() / "run.jsonl"
    path.write_bytes(run_lines(run))
    stored = RunStore(path).read()
    assert run_lines(stored) == run_lines(run) and not stored.damaged


def test_the_values_are_those_of_the_lowest_rank_in_full() -> None:
    _, case, end = example()
    assert case["losses"] == [7.123456789012345, "NaN"]
    assert case["grad_norms"] == [-7.123456789012345, "NaN"]
    assert (case["id"], case["verdict"], case["good"]) == ("tp2", "numeric", False)
    assert (case["seconds"], case["cpu_s"], case["world_size"]) == (2.0, 3.0, 2)
    assert case["headline"] == case["three_lines"]["what"] == "finite/test: loss is nan [step 2, rank 0]"
    assert case["findings"][0]["step"] == 2 and case["findings"][0]["module"] is None
    assert case["failures"][0]["kind"] == "stuck" and "run" not in case
    assert case["not_judged"] == [{"check": "traffic", "reason": "no rank recorded traffic", "unverified": False}]
    assert (end["exit_code"], end["totals"]["numeric"], end["cpu_s"]) == (1, 1, 3.0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((0, "schema"), 1),
        ((0, "line"), "other"),
        ((0, "extra"), 1),
        ((1, "verdict"), "fine"),
        ((1, "losses"), [None]),
        ((1, "losses"), ["nan"]),
        ((1, "findings", 0, "step"), "2"),
        ((1, "not_judged"), ["traffic"]),
        ((1, "not_judged", 0, "check"), None),
        ((1, "not_judged", 0, "extra"), 1),
        ((2, "exit_code"), 7),
        ((2, "totals"), []),
    ],
)
def test_the_schema_refuses_what_no_run_writes(path: tuple[str | int, ...], value: object) -> None:
    part = spoiled = copy.deepcopy(example())
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert not all(VALIDATOR.is_valid(line) for line in spoiled)


def test_no_field_of_a_line_may_be_left_out() -> None:
    for line in example():
        for key in line:
            assert not VALIDATOR.is_valid({name: value for name, value in line.items() if name != key}), key
