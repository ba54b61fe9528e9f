"""What the records of ranks tell of a script whatever it meant: steps, batches, gradients and conversion."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks import model, recompute, scales, traffic
from harness.checks.check import Rule
from harness.headline import headline_of
from harness.matrix.case import Case, Float8, Layout
from harness.plugins.exec.expectations import Meant
from harness.plugins.exec.judge import _unknown, _with_way_on, judge_jobs, judge_records
from harness.plugins.exec.request import ProcessRecord
from harness.verdict import Finding
from tests.builders import make_sketch, make_trace

CASE = Case(target="script", layout=Layout(dp_shard=2))


def records(*of_ranks: dict[str, Any], **of_all: Any) -> list[ProcessRecord]:
    """What two data-parallel ranks recorded."""
    given = {"case": CASE, "steps": 4, "backwards": 4, **of_all}
    return [
        ProcessRecord(pid=rank, rank=rank, world_size=2, **{"trace": make_trace(rank=rank), **given, **own})
        for rank, own in enumerate(of_ranks)
    ]


def found(rule: str, ranks: list[ProcessRecord], meant: Meant | None = None) -> list[Finding]:
    return [finding for finding in judge_jobs(ranks, meant).findings if finding.rule == rule]


STEPPED: dict[str, Any] = {"stepped": ((1, 2, 3, 4),)}


@pytest.mark.parametrize(("missed", "step"), [((2, 3, 4), 1), ((1, 3, 4), 2), ((1, 2, 3), 4)])
def test_a_rank_that_does_not_step_is_named_with_the_step(missed: tuple[int, ...], step: int) -> None:
    ranks = records(STEPPED, {"stepped": (missed,)})
    (finding, *others) = judge_jobs(ranks).findings
    assert (finding.rule, finding.step, finding.ranks, others) == ("watch/step-missed", step, (1,), [])
    what, why, fix = headline_of([finding], command="", ranks=2).texts
    assert what == f"watch/step-missed: rank 1 made 3 optimizer steps, where rank 0 made 4 [step {step}]"
    assert why == f"expected optimizer step {step}, as on rank 0, found none"
    assert fix.startswith("fix: call optimizer.step() on all ranks or on none")


def test_ranks_that_failed_at_other_places_have_missed_no_step() -> None:
    ended = {"stepped": ((1, 2, 3),), "exit_code": 1}
    assert found("watch/step-missed", records(STEPPED, ended))
    assert not found("watch/step-missed", records(STEPPED, {**ended, "backwards": 3}))
    assert not found("watch/step-missed", records(STEPPED, STEPPED))


def test_one_of_two_optimizers_may_miss_a_step() -> None:
    both = {"stepped": ((1, 3), (2, 4))}
    (finding,) = found("watch/step-missed", records(both, {"stepped": ((1, 3), (2,))}))
    assert (finding.values["count"], finding.values["meant"], finding.step) == (1, 2, 2)


BATCHES: dict[str, Any] = {"inputs": ("a", "b", "c")}


def test_data_parallel_ranks_with_the_same_batches_are_named_unless_that_is_meant() -> None:
    ranks = records(BATCHES, BATCHES)
    (finding,) = found("watch/same-batch", ranks)
    assert (finding.ranks, finding.values["steps"]) == ((0, 1), 3)
    assert not found("watch/same-batch", ranks, Meant(allowed=("watch/same-batch",)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BATCHES, {"inputs": ("a", "b", "d")}),
        ({"inputs": ("a", "a", "a")}, {"inputs": ("a", "a", "a")}),  # one batch over and over
        (BATCHES, {**BATCHES, "trace": make_trace(rank=1, losses=(1.0, 2.0))}),
        ({**BATCHES, "exchanged": "all_gather over ranks 0-1"}, {**BATCHES, "exchanged": "all_gather over ranks 0-1"}),
    ],
)
def test_other_batches_or_losses_are_no_finding(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert not found("watch/same-batch", records(first, second))


def test_ranks_of_tensor_parallelism_have_the_same_batch() -> None:
    assert not found("watch/same-batch", records(BATCHES, BATCHES, case=replace(CASE, layout=Layout(tp=2))))


@pytest.mark.parametrize(("others", "words"), [(BATCHES, "look at what makes"), ({"inputs": ("d",)}, "give tensor-")])
def test_inputs_of_tensor_parallelism_that_differ_have_a_way_on(others: dict[str, Any], words: str) -> None:
    finding = scales.REPLICAS.finding(module="up", operand="input in forward", expected="a", found="b")
    case = replace(CASE, layout=Layout(tp=2))
    (told,) = _with_way_on(case, records(BATCHES, others), [finding])
    assert told.fix and told.fix.startswith(words)


@pytest.mark.parametrize("rule", [scales.RULES.amax, recompute.SCALE])
def test_a_scale_of_the_step_before_has_a_way_on_where_scales_are_precomputed(rule: Rule) -> None:
    finding = rule.finding(module="up", operand="weight in all_gather", step=2, expected="a", found="b")
    gathered = replace(CASE, float8=Float8(recipe="tensorwise", fp8_all_gather=True))
    told = [next(_with_way_on(of, records({}, {}), [finding])).fix or "" for of in (CASE, gathered)]
    assert told[0] == "" and told[1].startswith("call precompute_float8_dynamic_scale_for_fsdp(model) behind each")


def test_gradients_that_are_not_summed_are_told_and_not_that_nothing_changes() -> None:
    alone = [rule.finding(expected="a", found="b") for rule in (model.NOTHING_UPDATED, traffic.NOT_SUMMED)]
    (told,) = _with_way_on(CASE, records({}, {}), alone)
    assert told.rule == "traffic/gradients-not-summed" and told.fix and told.fix.startswith("reduce gradients")


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("twice", "watch/backward-twice"), ("kept", "watch/gradients-kept"), ("cleared", "watch/gradients-cleared")],
)
def test_mistakes_are_named_with_the_line_and_the_ranks(kind: str, rule: str) -> None:
    (finding,) = found(rule, records({}, {"mistakes": {kind: (2, "train.py:41")}}))
    assert (finding.step, finding.ranks, finding.values["line"]) == (2, (1,), "train.py:41")


def test_what_is_converted_on_one_rank_alone_is_told_of_a_run_that_failed() -> None:
    first, second = records({"converted": ("up", "down")}, {"converted": ("up",)}, trace=None, exit_code=1)
    (finding,) = judge_records([first, second]).findings
    assert (finding.rule, finding.ranks, finding.values["names"]) == ("watch/converted", (1,), "down")


def test_two_losses_of_one_forward_or_optimizers_in_turn_leave_counts_open() -> None:
    once = {"stepped": ((1, 2, 3),)}
    assert not _unknown(records(once, once), CASE).fullmatch("scales/number")
    for stepped in (((2, 4, 6),), ((1, 3, 5), (2, 4, 6))):
        unknown = _unknown(records({"stepped": stepped}, once), CASE)
        assert unknown.fullmatch("scales/number") and not unknown.fullmatch("scales/amax")


def test_ranks_that_share_experts_or_sequences_are_not_compared_as_replicas() -> None:
    replicas = replace(CASE, layout=Layout(dp_replicate=2))
    assert _unknown(records({}, {"exchanged": "all_to_all over ranks 0, 1"}), replicas).fullmatch("parity/replicas")
    assert not _unknown(records({}, {}), replicas).fullmatch("parity/replicas")


@pytest.mark.parametrize(("kind", "words"), [("grad", "reduce gradients before"), ("param", "update replicas alike")])
def test_replicas_that_differ_have_a_way_on(kind: str, words: str) -> None:
    own: list[dict[str, Any]] = [
        {"trace": make_trace(rank=rank, sketches=(make_sketch("up", 1, kind, value=rank + 1.0, digest=f"{rank}"),))}
        for rank in range(2)
    ]
    (finding, *_) = found("parity/replicas", records(*own, case=replace(CASE, layout=Layout(dp_replicate=2))))
    assert finding.fix and finding.fix.startswith(words)
