"""The check `stated` compares every number that a target states, and no other; notes say what it stands in for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks import stated as stated_rules
from harness.checks.judge import judge
from harness.checks.rule import Rule
from harness.checks.stated import check_stated
from harness.expect.expectations import Expectations
from harness.matrix.caseid import parse_case_id
from harness.trace import Run
from harness.trace.counts import MATMULS, SAVED_BYTES, TRAFFIC, Sent, Stated, collective_of, collective_words
from harness.verdict import Finding
from tests.builders import make_sent, make_signed_run, make_witnesses, not_judged, partly_judged, run_of

CASE = parse_case_id("target.mine-fsdp2-tensorwise-v2048-s2-f32")
GATHERS = "all_gather in uint8 along dp_shard"
TRUE = {"matmuls": 4, "saved_bytes": {"float32": 128, "float8_e4m3fn": 0}, "traffic": {GATHERS: (4, 2048)}}


def statement(step: int, **stated: Any) -> Stated:
    sent = {words: Sent(calls=calls, payload_bytes=size) for words, (calls, size) in stated.get("traffic", {}).items()}
    return Stated(step=step, **{**stated, "traffic": sent})


def stating(step: int = 2, **stated: Any) -> Run:
    """A run of two ranks whose target states the truth, and this of one step."""
    of_steps = tuple(statement(number, **(TRUE | stated if number == step else TRUE)) for number in (1, 2))
    return make_signed_run(steps=2, stated=of_steps)


def check(run: Run) -> list[Finding]:
    return check_stated(CASE, run, make_witnesses(CASE))


def test_what_is_stated_and_seen_is_good_and_what_is_not_stated_is_free() -> None:
    assert check(stating()) == []
    assert check(make_signed_run(steps=2, stated=(Stated(step=1), Stated(step=2, matmuls=4)))) == []


@pytest.mark.parametrize(
    ("stated", "rule", "what", "expected", "found"),
    [
        ({"matmuls": 5}, stated_rules.MATMULS, "number of scaled matmuls", "5", "4"),
        (
            {"saved_bytes": {"float32": 64}},
            stated_rules.SAVED,
            "number of float32 bytes saved for backward",
            "64",
            "128",
        ),
        ({"saved_bytes": {"bfloat16": 2}}, stated_rules.SAVED, "number of bfloat16 bytes saved for backward", "2", "0"),
        (
            {"traffic": {GATHERS: (4, 1)}},
            stated_rules.TRAFFIC,
            f"number or size of {GATHERS}",
            "4 with 1 bytes",
            "4 with 2048 bytes",
        ),
        (
            {"traffic": {GATHERS: (0, 0)}},
            stated_rules.TRAFFIC,
            f"number or size of {GATHERS}",
            "0 with 0 bytes",
            "4 with 2048 bytes",
        ),
        (
            {"traffic": {"all_gather in uint8 along tp": (4, 2048)}},
            stated_rules.TRAFFIC,
            "number or size of all_gather in uint8 along tp",
            "4 with 2048 bytes",
            f"0 with 0 bytes, but 4 with 2048 bytes of {GATHERS}",
        ),
    ],
)
@pytest.mark.parametrize("step", [1, 2])
def test_another_number_is_told_with_both(
    step: int, stated: Any, rule: Rule, what: str, expected: str, found: str
) -> None:
    (finding,) = check(stating(step, **stated))
    assert (finding.rule, finding.ranks) == (rule.name, (0, 1))
    assert dict(finding.values) == {"what": what, "target": "mine"}
    assert (finding.step, finding.expected, finding.found) == (step, expected, found)
    assert finding.fix is not None and "return it from expect()" in finding.fix


def test_collectives_of_one_kind_add_up() -> None:
    run = stating()
    split = tuple(make_sent(step, times=2) for step in (1, 2) for _ in range(2))
    assert check(run_of(*(replace(trace, traffic=split) for trace in run.traces))) == []


def test_it_is_judged_where_something_is_stated_and_named_where_not() -> None:
    assert judge(CASE, stating(), "ok", make_witnesses(CASE), [check_stated]).checks == (check_stated.name,)
    (skipped,) = judge(CASE, make_signed_run(steps=2), "ok", make_witnesses(CASE), [check_stated]).not_judged
    assert "its module has no `expect`" in skipped.reason


def test_notes_say_whether_the_target_or_a_signature_stands_in_for_a_formula() -> None:
    compiled = parse_case_id("target.mine-fsdp2-tensorwise-graph-v2048-s2-f32")

    def stand_ins(*stated: str) -> list[str]:
        expect = Expectations(compiled, stated=stated)
        reasons = {**not_judged(expect), **partly_judged(expect)}
        return [reasons[check].partition("; see ")[2] for check in ("matmuls", "memory", "traffic")]

    assert stand_ins() == ["`signature`"] * 3
    assert stand_ins(MATMULS, SAVED_BYTES, TRAFFIC) == ["`stated`"] * 3
    assert stand_ins(SAVED_BYTES) == ["`signature`", "`stated`", "`signature`"]


def test_topics_are_what_is_stated() -> None:
    assert statement(1, **TRUE).topics == {MATMULS, SAVED_BYTES, TRAFFIC}
    assert Stated(step=1, matmuls=0).topics == {MATMULS}
    assert Stated(step=1).topics == frozenset()


NAMES = st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True)


@given(kind=NAMES, op=st.just("") | NAMES, dtype=NAMES, axes=st.lists(NAMES, min_size=1, max_size=3))
def test_the_words_of_a_collective_can_be_read(kind: str, op: str, dtype: str, axes: list[str]) -> None:
    given_ = {"axis": "+".join(axes), "kind": kind, "op": op, "dtype": dtype}
    assert collective_of(collective_words(**given_)) == given_


@pytest.mark.parametrize("words", ["all_gather", "all_gather along tp", "all_gather in uint8 along tp, dp", "(max) in"])
def test_other_words_name_no_collective(words: str) -> None:
    assert collective_of(words) is None
