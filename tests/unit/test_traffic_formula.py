"""The formulas of traffic and of saved memory: numbers worked out by hand, and what must hold for every case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.traffic import CollectiveKey, expected_traffic
from harness.expect.expectations import Expectations
from harness.expect.memory import expected_saved
from harness.expect.traffic import expected_transfers
from harness.matrix.case import Case, Checkpointing
from harness.matrix.dims.fsdp import converted_weight_shards
from harness.matrix.linears import BLOCK_LINEARS, is_recomputed
from tests.builders import make_case
from tests.strategies import EAGER_CASES, EAGER_DENSE_CASES

RESIDUAL = 4 * 32 * 128  # elements of one activation: sequences, tokens, dim
BLOCK = 4 * 128 * 128 + 3 * 128 * 256 + 2 * 128  # parameters of one block of the tiny model


def case_of(recipe: str = "bf16", **axes: object) -> Case:
    return make_case(**{"recipe": recipe, "global_batch": 4, **axes})


def traffic(case: Case, step: int = 1) -> dict[CollectiveKey, tuple[int, int]]:
    expected = expected_traffic(Expectations(case), step=step, rank=0)
    return {key: (amount.times, amount.payload_bytes) for key, amount in expected.items()}


def test_one_rank_sends_nothing() -> None:
    for dtype in ("float32", "bfloat16"):
        assert traffic(case_of("tensorwise", dtype=dtype)) == {}


def test_fsdp_gathers_blocks_and_embedding_twice_and_reduces_every_gradient_once() -> None:
    embedding = 2048 * 128
    case = case_of(dp_shard=2)
    gathered = 2 * (embedding + 2 * BLOCK) + embedding + 128
    assert traffic(case) == {
        CollectiveKey("dp_shard", "all_gather", "", "float32"): (7, gathered // 2 * 4),
        CollectiveKey("dp_shard", "reduce_scatter", "sum", "float32"): (4, (2 * embedding + 128 + 2 * BLOCK) * 4),
    }


@pytest.mark.parametrize(("resharding", "times"), [("always", 2), ("never", 1)])
def test_weights_are_gathered_in_backward_again_where_they_were_freed(resharding: str, times: int) -> None:
    case = case_of("tensorwise", dp_shard=2, fp8_all_gather=True, reshard_after_forward=resharding)
    embedding = 2048 * 128
    assert traffic(case)[CollectiveKey("dp_shard", "all_gather", "", "float32")] == (
        2 * times,
        times * (2 * embedding + 128) // 2 * 4,
    )
    assert traffic(case)[CollectiveKey("dp_shard", "all_gather", "", "uint8")][0] == 2 * times
    assert traffic(case)[CollectiveKey("dp_shard", "all_reduce", "max", "float32")] == (14 * times, 14 * times * 4)


@pytest.mark.parametrize(("reduce_grads", "reductions"), [("every_microbatch", 8), ("last_microbatch", 4)])
def test_microbatches_repeat_everything_but_a_deferred_reduction(reduce_grads: str, reductions: int) -> None:
    one = case_of("tensorwise", dp_shard=2, tp=2, global_batch=4, sequence_parallel=False)
    two = case_of(
        "tensorwise",
        dp_shard=2,
        tp=2,
        global_batch=8,
        sequence_parallel=False,
        accumulation=2,
        reduce_grads=reduce_grads,
    )
    for key, (times, payload) in traffic(one).items():
        more = reductions // 4 if key.kind == "reduce_scatter" else 2
        assert traffic(two)[key] == (more * times, more * payload)
    assert traffic(two).keys() == traffic(one).keys()


def test_tied_ends_are_gathered_and_reduced_once() -> None:
    untied, tied = (traffic(case_of("rowwise", dp_shard=2, tied=tied)) for tied in (False, True))
    weights = 2048 * 128 * 4
    gathered, reduced = (
        CollectiveKey("dp_shard", kind, op, "float32") for kind, op in (("all_gather", ""), ("reduce_scatter", "sum"))
    )
    # of its own, the embedding is gathered in forward and in backward; the unit of the output layer is not freed
    assert untied[gathered] == (tied[gathered][0] + 2, tied[gathered][1] + 2 * weights // 2)
    assert untied[reduced] == (tied[reduced][0] + 1, tied[reduced][1] + weights)


def test_the_ends_of_a_pipeline_send_one_another_the_gradient_of_their_copy() -> None:
    sizes = {"layers": 4, "tied": True, "vocab_size": 2050, "global_batch": 24}
    case = case_of("rowwise", pp=4, dp_shard=3, accumulation=4, **sizes)
    sent = [
        next(
            (transfer for transfer in expected_transfers(case, step=1, rank=rank) if "tied ends" in transfer.purpose),
            None,
        )
        for rank in range(case.world_size)
    ]
    rows = [684, 684, 682]  # of each shard
    assert [transfer and (transfer.axis, transfer.kind, transfer.elements, transfer.times) for transfer in sent] == [
        *(("pp", "send", count * 128, 1) for count in rows),
        *[None] * 6,
        *(("pp", "send", count * 128, 1) for count in rows),
    ]


def test_the_norm_of_all_gradients_has_those_of_biases_and_tied_weights_once() -> None:
    key = CollectiveKey("dp_shard", "all_reduce", "sum", "float64")
    counts = [
        traffic(case_of(dp_shard=2, tied=tied, max_norm=0.5, dtype="float64", **stages))[key]
        for stages in ({}, {"pp": 2, "accumulation": 2})
        for tied in (False, True)
    ]
    assert counts[0][1] - counts[1][1] == 8 and counts[2] == counts[3]  # rank 0 has the embedding
    key = CollectiveKey("tp", "all_reduce", "sum", "float64")
    plain, biased = (
        traffic(case_of(tp=2, sequence_parallel=False, max_norm=0.5, dtype="float64", bias=bias))[key]
        for bias in (False, True)
    )
    assert (biased[0] - plain[0], biased[1] - plain[1]) == (0, 14 * 8)


@pytest.mark.parametrize(("tp", "features"), [(1, 5 * 128 + 2 * 256), (2, 3 * 64 + 2 * 128 + 2 * 128)])
def test_biases_are_gathered_and_reduced_with_their_block(tp: int, features: int) -> None:
    """TP shards those of wq, wk, wv, w1 and w3 with the outputs; every rank holds those of wo and w2 whole."""
    without, with_bias = (traffic(case_of(dp_shard=2, tp=tp, bias=bias)) for bias in (False, True))
    more = {
        key: (volume[0] - without[key][0], volume[1] - without[key][1])
        for key, volume in with_bias.items()
        if volume != without[key]
    }
    assert more == {
        CollectiveKey("dp_shard", "all_gather", "", "float32"): (0, 2 * 2 * features // 2 * 4),
        CollectiveKey("dp_shard", "reduce_scatter", "sum", "float32"): (0, 2 * features * 4),
    }


@pytest.mark.parametrize(("parameters", "amax"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_the_amax_of_a_gathered_weight_has_the_dtype_of_the_parameter(parameters: str, amax: str) -> None:
    case = case_of("tensorwise", dp_shard=2, fp8_all_gather=True, dtype="bfloat16", parameter_dtype=parameters)
    assert {key.dtype for key in traffic(case) if key.op == "max"} == {amax}
    assert {key.dtype for key in traffic(case) if key.op == "sum"} == {"float32"}


def test_selective_checkpointing_saves_no_matmul_that_adds_a_bias() -> None:
    """`aten.addmm` is not in the list of saved operators, `aten.mm` of a converted linear is."""
    high, full = (saved(case_of(bias=True, checkpointing=mode)) for mode in ("selective_op", "full"))
    assert high == full
    converted = [saved(case_of("tensorwise", bias=bias, checkpointing="selective_op")) for bias in (False, True)]
    assert converted[0] == converted[1]
    filtered = case_of("rowwise", bias=True, checkpointing="selective_op", filter_fqns=["wq", "w3"])
    again = [name for name in BLOCK_LINEARS if is_recomputed(filtered, 0, name)]
    assert again == ["attention.wq", "attention.wv", "feed_forward.w1", "feed_forward.w3"]


@pytest.mark.parametrize(("evaluate", "times"), [(False, 1), (True, 2)])
def test_ranks_add_up_their_labels_where_some_are_ignored(evaluate: bool, times: int) -> None:
    layout = {"dp_shard": 2, "dp_replicate": 2, "evaluate": evaluate}
    counted = traffic(case_of(ignored_tokens="half", **layout))
    more = {
        CollectiveKey(axis, "all_reduce", "sum", "int64"): (times, 8 * times) for axis in ("dp_shard", "dp_replicate")
    }
    assert counted == traffic(case_of(**layout)) | more
    assert traffic(case_of(ignored_tokens="half", tp=2)) == traffic(case_of(tp=2))


def test_uneven_shards_are_padded_to_the_largest() -> None:
    """2048 rows over 3 ranks are 683 each; 128 are 43, 256 are 86."""
    case = case_of(dp_shard=3, global_batch=6)
    block = 4 * 43 * 128 + 2 * 86 * 128 + 43 * 256 + 2 * 43
    units = [683 * 128, block, block, 683 * 128 + 43]
    sent = traffic(case)
    assert sent[CollectiveKey("dp_shard", "all_gather", "", "float32")] == (7, 4 * (2 * sum(units[:3]) + units[3]))
    assert sent[CollectiveKey("dp_shard", "reduce_scatter", "sum", "float32")] == (4, 4 * 3 * sum(units))


def test_hsdp_sums_the_shards_over_replicas() -> None:
    case = case_of(dp_replicate=2, dp_shard=2)
    total = (2 * 2048 * 128 + 128 + 2 * BLOCK) * 4
    assert traffic(case)[CollectiveKey("dp_replicate", "all_reduce", "sum", "float32")] == (4, total // 2)


def test_float8_all_gather_moves_one_byte_per_element_and_precomputed_scales_no_amax() -> None:
    case = case_of("tensorwise", dp_shard=2, fp8_all_gather=True)
    linears = (BLOCK - 2 * 128) // 2
    assert converted_weight_shards(case, 0) == 4 * linears
    assert traffic(case)[CollectiveKey("dp_shard", "all_gather", "", "uint8")] == (4, 4 * (linears + 128 * 4))
    assert traffic(case)[CollectiveKey("dp_shard", "all_reduce", "max", "float32")] == (28, 28 * 4)
    case = case_of("tensorwise", dp_shard=2, tp=2, fp8_all_gather=True, precompute_scale=True)
    key = CollectiveKey("dp_shard", "all_reduce", "max", "float32")
    assert traffic(case, step=1)[key] == (28 + 1, 28 * 4 + 14 * 4)
    assert traffic(case, step=2)[key] == (1, 14 * 4)
    assert traffic(case, step=2) == traffic(case, step=3)


def test_activations_over_tp() -> None:
    sent = traffic(case_of(tp=2))
    assert sent[CollectiveKey("tp", "all_gather", "", "float32")] == (10, 10 * RESIDUAL // 2 * 4)
    assert sent[CollectiveKey("tp", "reduce_scatter", "sum", "float32")] == (10, 10 * RESIDUAL * 4)
    without = traffic(case_of(tp=2, sequence_parallel=False))
    assert without[CollectiveKey("tp", "all_reduce", "sum", "float32")] == (12, 10 * RESIDUAL * 4 + 2 * 128 * 4)
    case = case_of(vocab_size=2050, tp=4, loss_parallel=False, sequence_parallel=False)
    assert traffic(case)[CollectiveKey("tp", "all_gather", "", "float32")] == (1, 128 * 513 * 4)
    sent = traffic(case_of("tensorwise", tp=2, tp_styles="float8"))
    shard = RESIDUAL // 2
    assert sent[CollectiveKey("tp", "all_gather", "", "float8_e4m3fn")] == (4, 4 * shard)
    assert sent[CollectiveKey("tp", "all_gather", "", "float8_e5m2")] == (4, 4 * shard)
    assert sent[CollectiveKey("tp", "all_gather", "", "float32")] == (2, 2 * shard * 4)
    assert sent[CollectiveKey("tp", "all_reduce", "max", "float64")] == (50, 50 * 8)


@pytest.mark.parametrize(
    ("recipe", "count", "elements"),
    [("tensorwise", 56, 56), ("rowwise", 28, 28 * 128), ("rowwise_with_gw_hp", 32, 18 * 128 + 14)],
)
def test_amax_over_tp_by_recipe(recipe, count, elements) -> None:
    assert traffic(case_of(recipe, tp=2))[CollectiveKey("tp", "all_reduce", "max", "float64")] == (count, elements * 8)


@pytest.mark.parametrize(
    ("mode", "gathers", "scatters", "amax"),
    [("none", 10, 10, 56), ("full", 14, 12, 74), ("selective_op", 14, 10, 74), ("selective_layer", 12, 11, 65)],
)
def test_recomputing_repeats_the_collectives_of_forward_but_the_last(mode, gathers, scatters, amax) -> None:
    sent = traffic(case_of("tensorwise", tp=2, checkpointing=mode))
    assert sent[CollectiveKey("tp", "all_gather", "", "float32")][0] == gathers
    assert sent[CollectiveKey("tp", "reduce_scatter", "sum", "float32")][0] == scatters
    assert sent[CollectiveKey("tp", "all_reduce", "max", "float64")][0] == amax


@given(EAGER_CASES, st.data())
def test_traffic_of_any_case(case: Case, data: st.DataObject) -> None:
    """Never less than nothing, along axes that exist, the same from step 2 on, nothing on one rank."""
    rank = data.draw(st.integers(0, case.world_size - 1))
    terms = expected_transfers(case, step=1, rank=rank)
    assert all(term.times > 0 and term.elements > 0 and term.payload_bytes > 0 for term in terms)
    layout = case.layout
    degrees = layout.degrees
    assert {term.axis for term in terms} <= {axis for axis, degree in degrees.items() if degree > 1}
    assert expected_transfers(case, step=2, rank=rank) == expected_transfers(case, step=7, rank=rank)
    assert bool(terms) == (case.world_size > 1)


def saved(case: Case, step: int = 1) -> dict[str, int]:
    return expected_saved(case, step=step, rank=0)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_converting_linears_keeps_not_one_byte_more_and_no_float8(recipe) -> None:
    plain = saved(case_of(tp=2))
    assert saved(case_of(recipe, tp=2)) == plain
    assert not any(dtype.startswith("float8") for dtype in plain)


def test_what_is_saved_for_backward() -> None:
    plain = saved(case_of("tensorwise", dp_shard=2, output_layer=True))["float32"]
    scales = {
        resharding: saved(
            case_of("tensorwise", dp_shard=2, output_layer=True, fp8_all_gather=True, reshard_after_forward=resharding)
        )["float32"]
        - plain
        for resharding in ("default", "always", "never")
    }
    assert scales == {"default": 14 * 4, "always": 15 * 4, "never": 0}
    plain = saved(case_of("tensorwise", tp=2))
    styled = saved(case_of("tensorwise", tp=2, tp_styles="float8"))
    per_block = 128 * (2 * 128 + 64 + 128)  # tokens x (two gathered inputs, that of wo, that of w2)
    assert styled["float8_e4m3fn"] == 2 * per_block
    assert sum(styled.values()) < sum(plain.values())
    # Per token: 2 inputs of 128; 2 x 128 + 1 of the last norm; 128 into the output layer; 2048 log-probabilities.
    tokens = 4 * 32
    head = tokens * (2 * 128 + 1 + 128 + 2048) + 1
    assert saved(case_of(checkpointing="full")) == {"float32": 4 * (head + 2 * tokens * 128)}


@given(EAGER_DENSE_CASES, st.integers(1, 3))
def test_full_checkpointing_saves_less_than_any_other_mode(case: Case, step: int) -> None:
    modes = [Checkpointing(mode=mode) for mode in ("full", "selective_op", "selective_layer", "none")]
    full, *others = (sum(saved(replace(case, checkpointing=mode), step).values()) for mode in modes)
    assert full < min(others) or case.model.shape.layers == 1 or (case.model.bias and full == min(others))
