"""The merge of shards: every case once, and nothing that contradicts is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.result import CaseResult, Environment, Measured, RunResult, WitnessMade
from harness.running.merging import Named, environment_differences, merged
from harness.store import run_lines
from harness.verdict import Verdict
from tests.builders import make_attempt, make_result, make_results
from tests.unit.test_result_schema import VALIDATOR

HERE = Environment(packages={"torch": "2.13.0"}, device="cpu", commit="abc")
OTHER = replace(HERE, packages={"torch": "2.12.0"})


def shard(*results: CaseResult, called: str = "", **facts: object) -> Named:
    given = {"wall_s": 2.0, "environment": HERE, "name": "", "started": "2026-01-01T00:00:00+00:00", **facts}
    return called or "+".join(result.case_id for result in results), make_results(*results, **given)


def not_run(case_id: str) -> CaseResult:
    return make_result(case_id, Verdict.NOT_RUN, attempts=())


def verdicts(run: RunResult) -> dict[str, str]:
    return {case.case_id: case.verdict.value for case in run.results}


def test_shards_become_one_run() -> None:
    solo = WitnessMade(name="solo", cpu_s=1.0)
    run = merged(
        [
            shard(make_result("a"), make_result("b", Verdict.CRASH), name="v1", witnesses=(solo,), left_out=("c", "d")),
            shard(make_result("c"), name="v1", started="2025-01-01T00:00:00+00:00", provenance={"torch": "2"}),
        ]
    )
    assert verdicts(run) == {"a": "passed", "b": "crash", "c": "passed"}
    assert (run.end.wall_s, run.cpu_s, run.exit_code, run.end.interrupted) == (4.0, 7.5, 1, False)
    assert (run.start.name, run.start.started, run.start.left_out) == ("v1", "2025-01-01T00:00:00+00:00", ("d",))
    assert (run.start.environment, run.end.provenance, run.end.witnesses) == (HERE, {"torch": "2"}, (solo,))
    assert run.totals["passed"] == 2 and run.totals["crash"] == 1
    for line in run_lines(run).splitlines():
        VALIDATOR.validate(json.loads(line))


def test_a_missing_shard_is_named() -> None:
    first, empty = shard(make_result("a"), shard="1/3"), shard(called="empty", shard="3/3")
    with pytest.raises(HarnessError, match="1 shard of the run is missing: 2/3"):
        merged([first, empty])
    whole = merged([first, shard(make_result("b"), shard="2/3"), empty])
    assert (verdicts(whole), whole.start.shard, whole.exit_code) == ({"a": "passed", "b": "passed"}, "", 0)


def test_a_case_counts_where_it_was_run() -> None:
    first = shard(make_result("a"), not_run("b"), interrupted=True)
    assert merged([first, shard(make_result("b"))]).exit_code == 0
    assert verdicts(merged([shard(make_result("b")), first])) == {"b": "passed", "a": "passed"}
    still = merged([first, shard(make_result("c"))])
    assert (still.end.interrupted, still.exit_code) == (True, 130)


def test_different_results_of_a_case_are_an_error_that_names_both_shards() -> None:
    one, other = shard(make_result("a"), called="one.json"), shard(make_result("a", Verdict.HANG), called="other.json")
    with pytest.raises(
        HarnessError, match=r"one\.json and other\.json have different results.*passed and hang"
    ) as error:
        merged([one, other])
    assert error.value.text.startswith("a: ") and "--latest" in error.value.text


def test_the_latest_result_counts_where_that_is_asked_for() -> None:
    new = shard(make_result("a", Verdict.HANG), started="2026-01-02T00:00:00+00:00")
    old = shard(make_result("a"))
    for order in ([old, new], [new, old]):
        assert verdicts(merged(order, latest=True)) == {"a": "hang"}
    missing = shard(not_run("a"), started="2026-01-03T00:00:00+00:00")
    assert verdicts(merged([missing, old], latest=True)) == {"a": "passed"}


def test_results_that_differ_in_times_alone_are_the_same_and_nan_is_equal_to_itself() -> None:
    slow = make_result("a", attempts=(make_attempt(wall_s=9.0),))
    assert merged([shard(make_result("a")), shard(slow)]).results[0].seconds == 1.25
    moved = make_result("a", measured=Measured(digests={"casts": "x"}))
    with pytest.raises(HarnessError, match="different results"):
        merged([shard(make_result("a")), shard(moved)])
    result = make_result("a", measured=Measured(loss_distance=float("nan")))
    assert len(merged([shard(result), shard(result)]).results) == 1


def test_environments_that_differ_are_an_error_unless_they_may() -> None:
    shards = [shard(make_result("a")), shard(make_result("b"), environment=OTHER)]
    with pytest.raises(HarnessError, match=r"a and b: torch 2\.13\.0 -> 2\.12\.0"):
        merged(shards)
    assert merged(shards, mixed=True).start.environment is None
    assert list(environment_differences(shards)) == ["a and b: torch 2.13.0 -> 2.12.0"]
    unknown = shard(make_result("c"), environment=None)
    with pytest.raises(HarnessError, match="environments differ"):
        merged([shards[0], unknown])
    assert merged([unknown]).start.environment is None


def test_a_shard_that_trains_other_targets_has_no_other_environment() -> None:
    one, two, three = (replace(HERE, targets=targets) for targets in ({"x": "1"}, {"y": "2"}, {"x": "9"}))
    a, b, c = (
        shard(make_result(name), environment=environment)
        for name, environment in zip("abc", (one, two, three), strict=True)
    )
    assert merged([a, b]).start.environment == replace(HERE, targets={"x": "1", "y": "2"})
    for shards in ([a, c], [b, a, c]):
        with pytest.raises(HarnessError, match="x sources 1 -> 9"):
            merged(shards)


@given(st.lists(st.sampled_from(list(Verdict)), min_size=1, max_size=6), st.data())
def test_however_a_run_is_split_the_merge_is_the_run(case_verdicts: list[Verdict], data: st.DataObject) -> None:
    results = [make_result(f"c{number}", verdict) for number, verdict in enumerate(case_verdicts)]
    at = data.draw(st.integers(0, len(results)))
    whole = merged([shard(*results[:at], called="1"), shard(*results[at:], called="2")])
    assert verdicts(whole) == {result.case_id: result.verdict.value for result in results}
    _, expected = shard(*results)
    assert (whole.totals, whole.exit_code, whole.cpu_s) == (expected.totals, expected.exit_code, expected.cpu_s)
    assert merged([("x", whole), ("x", whole)], latest=data.draw(st.booleans())).results == whole.results
