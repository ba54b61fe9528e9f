"""The reference target on real ranks: every layout computes what it must, and computes it again bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.spec.case import Case, Checkpointing, Float8, Layout, Model, Train
from harness.spec.gemms import converted_fqns, scaled_mm_calls
from harness.trace import RankTrace

SHARP = Train(steps=3, global_batch=4, seq_len=32)
TENSORWISE = Float8(recipe="tensorwise")
ROWWISE = Float8(recipe="rowwise")


def losses(traces: tuple[RankTrace, ...]) -> list[float]:
    assert len({tuple(step.loss for step in trace.steps) for trace in traces}) == 1, "ranks report different losses"
    return [step.loss for step in traces[0].steps]


def numbers(traces: tuple[RankTrace, ...]) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in traces[0].steps]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(tp=4),
        Layout(tp=2, sequence_parallel=False, loss_parallel=False),
        Layout(tp=2, loss_parallel=False),
    ],
    ids=["tp2", "tp4", "tp2-no-sp", "tp2-no-loss-parallel"],
)
@pytest.mark.parametrize("float8", [Float8(), TENSORWISE], ids=["bf16", "tensorwise"])
def test_tensor_parallel_computes_what_one_rank_computes(train, layout, float8):
    """With the global amax, TP quantizes exactly what one rank quantizes: the first step differs by summation only."""
    single = train(Case(float8=float8, train=SHARP))
    parallel = train(Case(layout=layout, float8=float8, train=SHARP))
    assert losses(parallel)[0] == pytest.approx(losses(single)[0], abs=2e-6)
    assert parallel[0].steps[0].grad_norm == pytest.approx(single[0].steps[0].grad_norm, rel=2e-5)
    assert losses(parallel) == pytest.approx(losses(single), abs=2e-3)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=2), Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=2)],
    ids=["fsdp2", "fsdp4", "hsdp"],
)
def test_data_parallel_without_fp8_computes_what_one_rank_computes(train, layout):
    single = train(Case(train=SHARP))
    parallel = train(Case(layout=layout, train=SHARP))
    assert losses(parallel) == pytest.approx(losses(single), abs=2e-5)
    assert parallel[0].steps[0].grad_norm == pytest.approx(single[0].steps[0].grad_norm, rel=2e-5)


@pytest.mark.parametrize("precompute_scale", [False, True])
def test_fp8_all_gather_changes_no_bit(train, precompute_scale):
    """The gathered scale is the scale of the full weight, so where the cast happens cannot matter."""
    layout = Layout(dp_shard=2)
    gathered = Float8(recipe="tensorwise", fp8_all_gather=True, precompute_scale=precompute_scale)
    off = train(Case(layout=layout, float8=TENSORWISE, train=SHARP))
    on = train(Case(layout=layout, float8=gathered, train=SHARP))
    assert numbers(on) == numbers(off)


def test_float8_tp_styles_change_no_bit(train):
    styled = Float8(recipe="tensorwise", tp_styles="float8")
    assert numbers(train(Case(layout=Layout(tp=2), float8=styled, train=SHARP))) == numbers(
        train(Case(layout=Layout(tp=2), float8=TENSORWISE, train=SHARP))
    )


@pytest.mark.parametrize("mode", ["full", "selective_op", "selective_layer"])
@pytest.mark.parametrize("float8", [TENSORWISE, ROWWISE], ids=["tensorwise", "rowwise"])
def test_checkpointing_changes_no_bit_and_recomputes_as_many_matmuls_as_expected(train, mode, float8):
    case = Case(float8=float8, checkpointing=Checkpointing(mode=mode), train=SHARP)
    recomputed = train(case)
    assert numbers(recomputed) == numbers(train(Case(float8=float8, train=SHARP)))
    assert {step.scaled_mm_calls for step in recomputed[0].steps} == {scaled_mm_calls(case)}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("output_layer", [False, True])
def test_the_expected_linears_are_converted_and_used(train, recipe, output_layer):
    case = Case(float8=Float8(recipe=recipe, output_layer=output_layer, filter_fqns=("wk", "nothing")), train=SHARP)
    (trace,) = train(case)
    assert trace.converted_fqns == converted_fqns(case)
    assert trace.unmatched_filters == ("nothing",)
    assert not any("wk" in fqn for fqn in trace.converted_fqns)
    assert {step.scaled_mm_calls for step in trace.steps} == {scaled_mm_calls(case)}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, loss_parallel=False)])
def test_padding_the_vocabulary_is_invisible_to_the_loss(train, layout):
    """2250 is no multiple of 16; 2304 is one of 16 and of 16 x TP."""
    plain = train(Case(model=Model(vocab_size=2250), train=SHARP))
    padded = train(Case(model=Model(vocab_size=2250, pad_vocab_to_multiple_of=128), layout=layout, train=SHARP))
    assert losses(padded) == pytest.approx(losses(plain), abs=2e-5)
    assert padded[0].data_digest == plain[0].data_digest


def test_an_unaligned_vocabulary_shard_is_refused_with_torchs_words(submit):
    output = Float8(recipe="tensorwise", output_layer=True)
    outcome = submit(Case(model=Model(vocab_size=2256), layout=Layout(tp=2), float8=output, train=SHARP))
    assert outcome.status == "crash"
    assert {rank.status for rank in outcome.ranks} == {"raised"}
    assert "divisible by 16" in outcome.message


def test_bfloat16_is_mixed_precision_close_to_float32(train):
    sharp = losses(train(Case(train=SHARP)))
    mixed = losses(train(Case(train=Train(steps=3, global_batch=4, seq_len=32, dtype="bfloat16"))))
    assert mixed != sharp
    assert mixed == pytest.approx(sharp, abs=5e-3)


def test_the_loss_falls(train):
    curve = losses(train(Case(float8=TENSORWISE, train=Train(steps=5, lr=4e-3))))
    assert curve[-1] < curve[0] - 0.5


def test_every_layout_of_a_family_sees_the_same_data(train):
    layouts = [Layout(), Layout(tp=2), Layout(dp_shard=2)]
    digests = {trace.data_digest for layout in layouts for trace in train(Case(layout=layout, train=SHARP))}
    assert len(digests) == 1
    assert train(Case(train=Train(steps=3, global_batch=4, seq_len=32, seed=1)))[0].data_digest not in digests


def test_an_injection_runs_in_every_rank_before_the_target_is_built(train, tmp_path):
    patch = tmp_path / "patch.py"
    patch.write_text(
        "import torch\nfrom torchao.float8 import float8_utils\n"
        "def halve():\n    float8_utils.EPS = float8_utils.EPS\n"
        "    torch.nn.RMSNorm.forward = lambda self, x: x * 0.5\n"
    )
    case = Case(train=SHARP)
    assert losses(train(case, injections=(f"{patch}:halve",))) != losses(train(case))


def test_an_injection_that_raises_is_named(submit, tmp_path: Path):
    patch = tmp_path / "patch.py"
    patch.write_text("def broken():\n    raise ValueError('no such module')\n")
    outcome = submit(Case(train=SHARP), injections=(f"{patch}:broken",))
    assert outcome.status == "crash"
    assert f"injection {patch}:broken raised ValueError: no such module" in outcome.message
