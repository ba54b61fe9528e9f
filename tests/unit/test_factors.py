"""Wrong numbers that are the right ones times a number of the case are named, with whose mistake that is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from harness.checks.assembly import assemble
from harness.checks.factors import explain_gradients, explain_loss, explain_scale, factor
from harness.matrix.case import Case
from harness.trace import Run
from tests.builders import make_case, make_run, make_sketch, make_trace, run_of, with_step

CASE = make_case(dp_shard=2, tp=4, global_batch=6, seq_len=32, steps=1)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (16.0, "2 times (the data-parallel degree)"),
        (2.0, "1/4 (the tensor-parallel degree)"),
        (64.0, "8 times (the number of ranks)"),
        (8.0 / 3, "1/3 (the sequences of a microbatch)"),
        (8.0 * 192, "192 times (the tokens of the global batch)"),
    ],
)
def test_numbers_of_the_case_are_named(found: float, words: str) -> None:
    assert str(factor(found, 8.0, CASE)) == words


@pytest.mark.parametrize("found", [8.0, 8.1, 40.0, 0.0, -8.0, float("nan"), float("inf")])
def test_other_numbers_are_not(found: float) -> None:
    assert factor(found, 8.0, CASE) is None


def explained(case: Case, run: Run, golden: float = 8.0, solo: float = 8.0) -> str:
    found = explain_loss(case, run, run_of(make_trace(losses=[solo])), 1, [golden])
    return "" if found is None else f"{found.what}: {found.fix}"


def test_losses_of_each_rank_are_told_from_a_wrong_mean() -> None:
    case = make_case(dp_shard=2, steps=1)
    own = with_step(make_run(case, losses=[7.0]), 1, 1, loss=9.0)
    assert "a loss of its own batch; the mean over ranks is the reference's loss" in explained(case, own)
    shares = with_step(make_run(case, losses=[3.0]), 1, 1, loss=5.0)
    assert "the sum over ranks is the reference's loss" in explained(case, shares)
    assert "2 times (the data-parallel degree" in explained(case, make_run(case, losses=[16.0]))
    assert explained(case, make_run(case, losses=[8.3])) == ""


def test_a_reference_that_is_wrong_itself_is_told_by_bf16() -> None:
    case = make_case(dp_shard=2, steps=1)
    text = explained(case, make_run(case, losses=[8.0]), solo=16.0)
    assert "the reference is wrong" in text and "len(microbatches)" in text


def gradients(*factors: float) -> Run:
    sketches = tuple(make_sketch(fqn, value=value) for fqn, value in zip("abc", factors, strict=False))
    return run_of(make_trace(sketches=sketches))


def test_gradients_that_are_all_off_by_one_factor() -> None:
    case = make_case(dp_shard=2, steps=1)
    halved = explain_gradients(case, assemble(gradients(0.5, 0.5).traces), assemble(gradients(1, 1).traces), 1, None)
    assert halved is not None and halved.what.startswith("every gradient is 1/2 (the data-parallel degree")
    assert "averages gradients over data-parallel ranks already" in halved.fix
    off = explain_gradients(case, assemble(gradients(1.3, 1.2).traces), assemble(gradients(1, 1).traces), 1, None)
    assert off is None


def test_gradients_summed_over_microbatches() -> None:
    case = make_case(tp=2, accumulation=2, steps=1)
    found = explain_gradients(case, assemble(gradients(2, 2).traces), assemble(gradients(1, 1).traces), 1, None)
    assert found is not None and "the microbatches of an update" in found.what
    assert found.fix.startswith("divide the loss of every microbatch")


def test_some_gradients_that_are_off_are_named() -> None:
    case = make_case(tp=2, steps=1)
    found = explain_gradients(case, assemble(gradients(1, 2, 1).traces), assemble(gradients(1, 1, 1).traces), 1, None)
    assert found is not None and found.what.startswith("1 of 3 are 2 times (the tensor-parallel degree")
    assert "over tensor-parallel ranks" in found.fix


def test_gradients_of_another_direction_are_no_factor() -> None:
    case = make_case(dp_shard=2, steps=1)
    turned = replace(make_sketch("a", value=2.0), sums=make_sketch("a", value=-2.0).sums)
    run = run_of(make_trace(sketches=(turned,)))
    assert explain_gradients(case, assemble(run.traces), assemble(gradients(1).traces), 1, None) is None


def test_a_first_loss_that_looks_like_a_sum() -> None:
    case = make_case(global_batch=8, seq_len=32, vocab_size=2048)
    found = explain_scale(case, 2000.0)
    assert found is not None and "256 times" in found.what and "not the sum" in found.fix
    assert explain_scale(case, 8.3) is None
    assert explain_scale(case, float("nan")) is None
