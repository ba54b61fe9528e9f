"""The reference target on real ranks: layouts compute what they must, neutral options and resuming change no bit.

And rounding errors drawn at random are as large as those of float8.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.checks.measuring import DRAWS, derived_parity_tolerance, derived_tolerance
from harness.evidence.tolerance import noise, parity_key, read_evidence, tolerance_key
from harness.expect.expectations import Expectations
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id, reference_case, resumed_in
from harness.matrix.linears import converted_fqns
from harness.matrix.recipes import E5M2
from harness.request import Noise, noise_of
from harness.trace import RankTrace
from harness.worker.training.noise import add_noise
from tests.builders import make_case, run_of
from tests.worker.runs import numbers, sweep

NO_LP = {"loss_parallel": False}
HSDP = {"dp_replicate": 2, "dp_shard": 2}


def short(**axes: object) -> Case:
    return make_case(**{"steps": 2, "global_batch": 4, **axes})


@pytest.fixture(scope="module")
def traces(trained):
    """The traces of a short run with these axis values, without probes."""
    return lambda **axes: trained(short(**axes), probes=()).traces


def losses(traces: tuple[RankTrace, ...]) -> list[float]:
    assert len({tuple(step.loss for step in trace.steps) for trace in traces}) == 1, "ranks report different losses"
    return [step.loss for step in traces[0].steps]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        sweep("bf16", {"tp": 2}),
        ("tensorwise", {"tp": 2}),
        ("tensorwise", {"tp": 4}),
        ("tensorwise", {"tp": 2, "sequence_parallel": False, **NO_LP}),
        sweep("bf16", {"tp": 2, **NO_LP}),
    ],
    ids=["bf16-tp2", "tp2", "tp4", "tp2-no-sp", "bf16-tp2-no-loss-parallel"],
)
def test_tensor_parallel_computes_what_one_rank_computes(traces, layout, recipe):
    """With the global amax, TP quantizes exactly what one rank quantizes: the first step differs by summation only."""
    single, parallel = traces(recipe=recipe), traces(recipe=recipe, **layout)
    assert losses(parallel)[0] == pytest.approx(losses(single)[0], abs=2e-6)
    assert parallel[0].steps[0].grad_norm == pytest.approx(single[0].steps[0].grad_norm, rel=2e-5)
    assert losses(parallel) == pytest.approx(losses(single), abs=2e-3)


def test_a_trace_has_the_names_of_all_that_was_put_into_torch(traces):
    (trace,) = traces()
    hooks = {f"hooks of {name}" for name in ("collectives", "matmuls", "products")}
    assert {"casts", "collectives", "scaled_mm"} <= set(trace.virtual) < set(trace.installed) >= hooks
    assert len(set(trace.installed)) == len(trace.installed)


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"dp_shard": 4}, HSDP], ids=["fsdp2", "fsdp4", "hsdp"])
def test_data_parallel_without_fp8_computes_what_one_rank_computes(traces, layout):
    single, parallel = traces(), traces(**layout)
    assert losses(parallel) == pytest.approx(losses(single), abs=2e-5)
    assert parallel[0].steps[0].grad_norm == pytest.approx(single[0].steps[0].grad_norm, rel=2e-5)


@pytest.mark.parametrize("precompute_scale", [sweep(False), True])
def test_fp8_all_gather_changes_no_bit(traces, precompute_scale):
    """The gathered scale is the scale of the full weight, so where the cast happens cannot matter."""
    off = {"recipe": "tensorwise", "dp_shard": 2}
    on = traces(**off, fp8_all_gather=True, precompute_scale=precompute_scale)
    assert numbers(on) == numbers(traces(**off))


@pytest.mark.parametrize(
    "axes",
    [
        {"dp_shard": 2, "fp8_all_gather": True, "precompute_scale": True, "recipe": "tensorwise", "dtype": "bfloat16"},
        sweep({"tp": 2, "recipe": "rowwise", "checkpointing": "full", "dtype": "float64"}),
    ],
    ids=["precomputed", "tp2-ac.full"],
)
def test_an_evaluation_changes_no_bit_and_has_the_loss_of_training(traces, axes):
    evaluated = traces(**axes, evaluate=True)
    pairs = [(step.evaluation_loss, step.loss) for trace in evaluated for step in trace.steps]
    assert all(found == expected for found, expected in pairs)
    trained = [[(loss, norm) for _, loss, norm in steps] for steps in numbers(evaluated)]
    assert trained == [[(loss, norm) for _, loss, norm in steps] for steps in numbers(traces(**axes))]
    assert {step.scaled_mm_calls for trace in evaluated for step in trace.steps} == {
        Expectations(short(**axes, evaluate=True)).scaled_mm_calls[1]
    }


def test_float8_tp_styles_change_no_bit(traces):
    off = {"recipe": "tensorwise", "tp": 2}
    assert numbers(traces(**off, tp_styles="float8")) == numbers(traces(**off))


@pytest.mark.parametrize("mode", ["full", "selective_op", "selective_layer"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_checkpointing_changes_no_bit_and_recomputes_as_many_matmuls_as_expected(traces, mode, recipe):
    recomputed = traces(recipe=recipe, checkpointing=mode)
    assert numbers(recomputed) == numbers(traces(recipe=recipe))
    expected = Expectations(short(recipe=recipe, checkpointing=mode)).scaled_mm_calls[1]
    assert {step.scaled_mm_calls for step in recomputed[0].steps} == {expected}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("output_layer", [False, True])
def test_the_expected_linears_are_converted_and_used(traces, recipe, output_layer):
    axes = {"recipe": recipe, "output_layer": output_layer, "filter_fqns": ("wk", "nothing")}
    (trace,) = traces(**axes)
    assert trace.converted_fqns == converted_fqns(short(**axes))
    assert trace.unmatched_filters == ("nothing",)
    assert not any("wk" in fqn for fqn in trace.converted_fqns)
    assert {step.scaled_mm_calls for step in trace.steps} == {Expectations(short(**axes)).scaled_mm_calls[1]}


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, sweep({"tp": 2, **NO_LP})])
def test_padding_the_vocabulary_is_invisible_to_the_loss(traces, layout):
    """2250 is no multiple of 16; 2304 is one of 16 and of 16 x TP."""
    plain = traces(vocab_size=2250)
    padded = traces(vocab_size=2250, pad_vocab_to_multiple_of=128, **layout)
    assert losses(padded) == pytest.approx(losses(plain), abs=2e-5)
    assert padded[0].data_digest == plain[0].data_digest


def test_an_unaligned_vocabulary_shard_is_refused_with_torchs_words(submit):
    outcome = submit(short(vocab_size=2256, tp=2, recipe="tensorwise", output_layer=True))
    assert outcome.status == "crash"
    assert {rank.status for rank in outcome.ranks} == {"raised"}
    assert "divisible by 16" in outcome.message


def test_bfloat16_is_mixed_precision_close_to_float32(traces):
    sharp, mixed = losses(traces()), losses(traces(dtype="bfloat16"))
    assert mixed != sharp
    assert mixed == pytest.approx(sharp, abs=5e-3)


def test_the_loss_falls(traces):
    curve = losses(traces(recipe="tensorwise", steps=5, global_batch=8, lr=4e-3))
    assert curve[-1] < curve[0] - 0.5


def test_every_layout_of_a_family_sees_the_same_data(traces):
    digests = {trace.data_digest for layout in ({}, {"tp": 2}, {"dp_shard": 2}) for trace in traces(**layout)}
    assert len(digests) == 1
    assert traces(seed=1)[0].data_digest not in digests


def test_an_injection_runs_in_every_rank_before_the_target_is_built(train, traces, plant):
    halve = "import torch\ndef apply():\n    torch.nn.RMSNorm.forward = lambda self, x: x * 0.5\n"
    assert losses(train(short(), injections=plant(halve))) != losses(traces())


def test_an_injection_that_raises_is_named(submit, plant):
    broken = plant("def broken():\n    raise ValueError('no such module')\n", "broken")
    outcome = submit(short(), injections=broken)
    assert outcome.status == "crash"
    assert f"injection {broken[0]} raised ValueError: no such module" in outcome.message


GATHERED = {"recipe": "tensorwise", "fp8_all_gather": True, "precompute_scale": True}
OFF = {"resume": "none"}


@pytest.mark.parametrize(
    "axes",
    [
        {"dp_shard": 2, **GATHERED, "resume": "same"},
        sweep({"tp": 2, "recipe": "rowwise", "resume": "resharded"}),  # `test_own_models.py` reshards in every run
        sweep({"resume": "same"}),
        sweep({"dp_shard": 2, "tp": 2, **GATHERED, "resume": "resharded"}),
        sweep({"dp_replicate": 2, "dp_shard": 2, **GATHERED, "resume": "resharded"}),
        sweep({"dp_shard": 4, **GATHERED, "resume": "resharded"}),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(trained, axes):
    case, plain = (
        make_case(**{"steps": 3, "global_batch": 4, "dtype": "bfloat16", **axes, **last}) for last in ({}, OFF)
    )
    resumed, through = (trained(variant, probes=("sketches", "saved_memory")).traces for variant in (case, plain))
    assert numbers(resumed) == numbers(through)
    for one, other in zip(resumed, through, strict=True):
        assert one.sketches == other.sketches
        assert one.inputs == other.inputs
        assert one.saved_memory == other.saved_memory
        assert one.resumed is not None
        assert other.resumed is None
        assert one.resumed.after_step == 1
        assert one.resumed.loaded == (one.resumed.saved,) * len(resumed_in(case))


def test_the_state_is_that_of_model_and_optimizer(trained):
    (trace,) = trained(make_case(steps=2, global_batch=4, resume="same", dtype="float64"), probes=()).traces
    state = trace.resumed.saved
    assert {"norm.weight", "norm.weight exp_avg", "norm.weight exp_avg_sq", "norm.weight step"} <= state.keys()
    assert state["norm.weight lr"] == "0.001"
    assert state["output.weight exp_avg"].startswith("float64 [2048, 128] ")


PROJECT = Path(__file__).parents[2]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "text",
    [
        "tp2-tensorwise-v2048-b16",
        "tp2-tensorwise-v2048-f32",
        "tp2-rowwise-v2048-b16",
        "tp2-rowwise_with_gw_hp-v2048-b16",
        "tp2-tensorwise-head.fp8-v2048-b16",
        "tp2-rowwise-head.fp8-v2048-b16",
        "tp2-bf16-v2048-b16",
    ],
)
def test_derived_tolerances_are_above_the_measured_noise_and_not_far_above(trained, text: str):
    case = parse_case_id(text)
    errors = noise_of(case, tuple(range(1, DRAWS + 1)), converted_fqns(case))
    reference = trained(reference_case(case), noise=errors)
    draws = [run_of(draw) for draw in reference.traces[0].draws]
    loss, parity = (derive(case, reference, draws) for derive in (derived_tolerance, derived_parity_tolerance))
    for derived, key in ((loss, tolerance_key(case)), (parity, parity_key(case))):
        samples = [sample for sample in read_evidence(PROJECT, derived.name).samples if sample.key == key]
        for allowed, measured in zip(derived.per_step, noise(derived.name, samples), strict=False):
            assert 1.3 * measured < allowed < 13 * measured, derived.name


def test_a_draw_is_the_same_every_time_and_another_one_differs(trained, train):
    case = parse_case_id("tp2-tensorwise-v2048-gb4-s1-b16")
    (together,) = trained(reference_case(case), noise=noise_of(case, (1, 2), converted_fqns(case))).traces
    assert numbers([together]) == numbers(train(reference_case(case), probes=("sketches",)))
    for number, draw in enumerate(together.draws, start=1):
        alone = noise_of(case, (number,), converted_fqns(case))
        assert numbers([draw]) == numbers(train(reference_case(case), noise=alone, probes=("sketches",)))
    assert len({repr(numbers([trace])) for trace in (together, *together.draws)}) == 3


STATEFUL = """
import harness.worker.training.train as training

def apply():
    before, built = training.build_target, []

    def build_target(*given):
        built.append(before(*given))
        {then}
        return built[-1]

    training.build_target = build_target
"""


SCALED = "built[-1].model.register_forward_hook(lambda _, __, output: output * len(built))"


@pytest.mark.parametrize("then", [SCALED, "assert len(built) == 1"])
def test_there_are_no_draws_where_one_training_changes_the_next(train, plant, then: str):
    case = parse_case_id("single-bf16-v2048-gb4-s1-b16")
    injections = plant(STATEFUL.format(then=then))
    (trace,) = train(case, noise=noise_of(case, (1, 2), ()), probes=("sketches",), injections=injections)
    assert trace.draws is None
    assert numbers([trace]) == numbers(train(case, probes=("sketches",)))


def test_a_linear_keeps_its_bias():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with torch.no_grad():
        model[0].bias.fill_(100.0)
    add_noise(model, Noise(draws=(1,), float8_fqns=(), grad_output_dtype=E5M2), 1)
    assert model(torch.zeros(1, 16)).min() > 99
