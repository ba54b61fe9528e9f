"""A case on thousands of ranks by formula: what refuses it, what it sends and keeps, and layouts in order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli.main import main
from harness.errors import HarnessError
from harness.expect.work import work
from harness.matrix.case import Case, Layout
from harness.matrix.caseid import parse_case_id
from harness.matrix.dims.ep import sent_back
from harness.matrix.dims.fsdp import fsdp_units
from harness.matrix.linears import OUTPUT_FQN, linear_features, linear_fqns, linear_name, parameter_count
from harness.matrix.models import MODELS, training
from harness.plugins.predict.cost import active_parameter_count, flops_per_token, memory
from harness.plugins.predict.gains import predicted_gains
from harness.plugins.predict.layouts import Simulation, _collective_of, layouts, simulate, sweep
from harness.plugins.predict.machine import crosses_nodes, machine, sent_back_if_balanced, transfers_if_balanced, wire
from harness.plugins.predict.sections import layout_sections, sweep_sections
from harness.report.sections import text_of
from harness.trace.counts import ExpertCall, Phase, Rows, collective_words
from tests.builders import make_case
from tests.strategies import DENSE_CASES

H100 = machine("h100")
GIB = 1 << 30


def of(name: str, **axes: object) -> Simulation:
    return simulate(training(MODELS[name], **axes), H100)


def names(reasons: Any) -> list[str]:
    return [reason.name for reason in reasons]


def test_8b_on_512_ranks() -> None:
    simulation = of("llama3-8b", tp=8, dp_shard=64, recipe="tensorwise", checkpointing="full")
    assert (simulation.world_size, simulation.nodes, simulation.refused, simulation.warnings) == (512, 64, (), ())
    # Measured with a fake process group: gradients in float32, activations in bfloat16, and one amax a cast.
    sent = {traffic.axis: (traffic.crosses_nodes, traffic.calls) for traffic in simulation.wire}
    assert sent == {"dp_shard": (True, 101), "tp": (False, 1608)}
    assert simulation.amax_reductions == 1184
    assert [(matmul.linear, matmul.m, matmul.n, matmul.k) for matmul in simulation.matmuls[:3]] == [
        ("attention.wq", 8192, 512, 4096),
        ("attention.wq", 8192, 4096, 512),
        ("attention.wq", 512, 4096, 8192),
    ]
    embedding = simulation.shards[0]
    assert (embedding.tp_rows, embedding.fsdp_rows) == ((16032,), (251, 219))
    text = text_of(layout_sections(simulation))
    assert "512 ranks on 64 nodes of 8 h100" in text and "between nodes" in text and "REFUSED" not in text


@pytest.mark.parametrize(
    ("axes", "published_gib"),
    [
        ({"name": "llama3-8b", "dp_shard": 8, "checkpointing": "selective_op"}, 47.65),
        ({"name": "llama3-70b", "dp_shard": 32, "tp": 8, "tokens": 16 * 8192, "checkpointing": "full"}, 71.9),
    ],
)
def test_published_peaks_are_a_little_above_the_bound(axes: dict[str, Any], published_gib: float) -> None:
    """Both runs are compiled; their blocks save other tensors."""
    simulation = simulate(training(MODELS[axes.pop("name")], **axes), H100)
    assert 1.1 < published_gib * GIB / simulation.peak_bytes < 1.2


def test_refusals_have_reasons() -> None:
    vocabulary = of("llama3-8b", tp=4, dp_shard=64, recipe="tensorwise", vocab_size=2250, output_layer=True)
    assert names(vocabulary.refused) == ["output_alignment"]
    bad = [(matmul.linear, matmul.role, matmul.tp_ranks) for matmul in vocabulary.matmuls if matmul.refused]
    assert bad == [("output", role, ranks) for ranks in (3, 1) for role in ("forward", "dgrad")]
    tokens = of("llama3-8b", dp_shard=8, recipe="tensorwise", seq_len=8200)
    assert names(tokens.refused) == ["token_alignment"]
    assert {matmul.role for matmul in tokens.matmuls if matmul.refused} == {"wgrad"}
    too_large = of("llama3-405b", dp_shard=64, recipe="tensorwise", checkpointing="full")
    assert names(too_large.refused) == ["memory"] and not too_large.fits
    text = text_of(layout_sections(too_large))
    assert "REFUSED memory: a rank keeps " in text


def test_float8_gathers_need_even_shards() -> None:
    """128 rows of wk on a TP rank do not divide by 256 ranks: torchao sends unpadded shards."""
    options = {"tp": 8, "recipe": "tensorwise", "fp8_all_gather": True, "checkpointing": "full"}
    uneven = of("llama3-8b", dp_shard=256, **options)
    assert names(uneven.refused) == ["fp8-all-gather-uneven-shards"]
    assert "256 ranks do not divide the rows of attention.wk, attention.wv" in uneven.refused[0].text
    assert of("llama3-8b", dp_shard=128, **options).refused == ()
    assert of("llama3-8b", dp_shard=256, **options | {"fp8_all_gather": False}).refused == ()
    assert names(uneven.warnings) == ["empty-shards"]


def test_tp_between_nodes_is_told() -> None:
    options = {"dp_shard": 4, "tp": 8, "recipe": "rowwise", "checkpointing": "full"}
    assert "tp-between-nodes" not in names(of("llama3-8b", **options).warnings)
    simulation = simulate(training(MODELS["llama3-8b"], **options), machine("h100", gpus_per_node=4))
    assert "tp-between-nodes" in names(simulation.warnings)


@pytest.mark.parametrize(
    ("layout", "axis", "crosses"),
    [
        (Layout(dp_shard=2, tp=8), "tp", False),
        (Layout(dp_shard=2, tp=8), "dp_shard", True),
        (Layout(dp_shard=2, tp=4), "dp_shard", False),
        (Layout(dp_shard=4, tp=6), "tp", True),  # ranks 6 to 11 are on two nodes
        (Layout(dp_shard=2, tp=3), "tp", False),  # one node has all
        (Layout(dp_replicate=2, dp_shard=8), "dp_shard", False),
        (Layout(dp_replicate=2, dp_shard=8), "dp_replicate", True),
    ],
)
def test_groups_that_leave_a_node(layout: Layout, axis: str, crosses: bool) -> None:
    assert crosses_nodes(layout, axis, 8) is crosses


@given(DENSE_CASES)
def test_no_byte_and_no_parameter_is_lost(case: Case) -> None:
    terms = transfers_if_balanced(case, step=2, rank=0)
    by_axis = wire(case, gpus_per_node=8)
    assert sum(traffic.payload_bytes for traffic in by_axis) == sum(term.payload_bytes for term in terms)
    assert sum(traffic.calls for traffic in by_axis) == sum(term.times for term in terms)
    reductions = sum(term.times for term in terms if "amax" in term.purpose)
    assert sum(traffic.amax_reductions for traffic in by_axis) == reductions
    moments = [memory(case, rank=rank) for rank in range(case.layout.dp_shard * case.layout.tp)]
    item = 2 if case.train.parameter_dtype == "bfloat16" else 8 if case.train.dtype == "float64" else 4
    replicated = [weight for unit in fsdp_units(case, 0) for weight in unit.weights if "norm" in weight.fqn]
    repeated = (case.layout.tp - 1) * sum(weight.rows for weight in replicated)
    if not case.model.bias:  # biases of rowwise linears are on every TP rank
        update, linears = case.train.update, [fqn for fqn in linear_fqns(case) if fqn != OUTPUT_FQN]
        matrices = sum(math.prod(linear_features(case, linear_name(fqn))) for fqn in linears)
        states = update.states * (parameter_count(case) + repeated - matrices) + update.of_linears * matrices
        assert sum(moment.optimizer for moment in moments) == states * item
    assert all(moment.peak >= moment.before_backward >= moment.state for moment in moments)
    assert moments[0].optimizer == max(moment.optimizer for moment in moments)


def test_a_sweep_keeps_the_batch_and_ranks_what_is_refused_last() -> None:
    case = training(MODELS["llama3-70b"], layers=8, dp_shard=512, recipe="tensorwise", checkpointing="full")
    ranking = sweep(case, H100)
    assert {ranked.layout.world_size for ranked in ranking} == {512}
    assert {candidate.train.global_batch for candidate in layouts(case)} == {512}
    ended = [bool(ranked.refused) for ranked in ranking]
    assert ended == sorted(ended) and True in ended
    good = [ranked for ranked in ranking if not ranked.refused and ranked.fits]
    assert [ranked.step_s for ranked in good] == sorted(ranked.step_s for ranked in good)
    refused = {ranked.layout.tp for ranked in ranking if "heads_divide_tp" in names(ranked.refused)}
    assert refused == {16, 32, 64}  # 8 heads of keys
    text = text_of(sweep_sections(ranking))
    assert "REFUSED TP 16 with replicas x FSDP 1 x 32, " in text and "heads_divide_tp: TP splits attention" in text


def test_a_dtype_without_a_peak_has_no_time_and_all_other_numbers() -> None:
    case = parse_case_id("fsdp2-tp2-rowwise-v2048-s2-f32")
    untimed, in_bfloat16 = simulate(case, H100), simulate(parse_case_id("fsdp2-tp2-rowwise-v2048-s2-b16"), H100)
    assert (untimed.step_s, untimed.tokens_s) == (None, None) and len(untimed.matmuls) == len(in_bfloat16.matmuls)
    text = text_of(layout_sections(untimed))
    assert "no time is predicted: the data sheet of h100 has no peak in the dtype of this case" in text
    best = sweep(case, H100)[0]
    assert (best.refused, best.step_s, best.tokens_s) == ((), 0, 0) and best.peak_bytes > 0


def test_405b_on_4096_ranks() -> None:
    simulation = of("llama3-405b", tp=8, dp_shard=512, recipe="rowwise", checkpointing="full")
    assert simulation.fits and simulation.nodes == 512 and not simulation.refused
    assert names(simulation.warnings) == ["empty-shards"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("predict", "layouts", "--model", "llama3-8b", "--set", "layers=2", "--recipe", "tensorwise", "--tp", "8")
    assert main([*model, "--world", "64", "--json", "-"]) == 0
    simulation = json.loads(capsys.readouterr().out)["simulation"]
    assert (simulation["world_size"], simulation["nodes"], simulation["tokens"]) == (64, 8, 8192)
    assert main([*model, "--world", "64", "--set", "seq_len=8200", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["simulation"]["refused"][0]["name"] == "token_alignment"
    assert main(["predict", "layouts", "fsdp2-tp2-rowwise-v2048-s2-b16", "--world", "16", "--sweep"]) == 0
    assert "predicted s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--world", "511"), "511 ranks are no multiple of tp x dp_replicate x pp = 2."),
        (("--world", "512", "--dp-shard", "4"), "--dp-shard: --world gives it."),
        (("--set", "steps=3"), "--set steps: every step costs the same."),
        (("--sweep", "--verify"), "a sweep is of many layouts."),
        (("--set", "evaluate=true", "--verify"), "which ignores evaluate."),
    ],
)
def test_what_the_command_refuses(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "layouts", "fsdp2-tp2-rowwise-v2048-s2-b16", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("predict", [simulate, predicted_gains])
def test_a_model_without_formulas(predict: Callable[..., object]) -> None:
    with pytest.raises(HarnessError, match="no formula for the model of my_pkg"):
        predict(make_case(target="my_pkg.my_target"), H100)


B200 = machine("b200")
SHARED = {"dp_shard": 4, "tp": 2, "ep": 4}
PHASES: tuple[Phase, ...] = ("forward", "recompute")


def mixture(**axes: object) -> Case:
    return training(MODELS["debugmodel"], experts=8, **axes)


def test_deepseek_v3_has_the_published_sizes() -> None:
    """671 and 37 billion parameters, but for latent attention."""
    case = training(MODELS["deepseek-v3"])
    assert parameter_count(case) == pytest.approx(671e9, rel=0.04)
    assert active_parameter_count(case) == pytest.approx(37e9, rel=0.04)


@given(
    st.sampled_from([{"dp_shard": 1}, {"dp_shard": 2, "ep": 2}, SHARED, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}]),
    st.integers(1, 8),
)
def test_ranks_share_the_work_of_all_tokens(layout: dict[str, int], top_k: int) -> None:
    case = mixture(top_k=top_k, **layout)
    norms = 6 * (2 * case.model.shape.layers + 1) * case.model.shape.dim
    total = sum(entry.flops for rank in range(case.world_size) for entry in work(case, rank=rank))
    assert total == (flops_per_token(case) - norms) * case.train.tokens


def test_a_token_meets_top_k_experts() -> None:
    one, two, whole = (active_parameter_count(mixture(top_k=top_k)) for top_k in (1, 2, 8))
    model = mixture().model
    assert two - one == len(model.expert_layers) * 3 * model.shape.dim * model.expert_dim
    assert whole == parameter_count(mixture())


def test_what_comes_back_is_what_calls_of_as_many_rows_send_back() -> None:
    case = mixture(checkpointing="full", accumulation=2, global_batch=8, dp_shard=2, ep=2)
    empty: dict[str, Any] = {"tokens": b"", "chosen": b"", "weights": b"", "counts": (), "values": Rows()}
    rows = (case.sent_rows,)
    calls = [
        ExpertCall(step=1, fqn=f"layers.{layer}.moe", phase=phase, number=number, local_counts=rows, **empty)
        for number in range(case.train.accumulation)
        for layer in case.model.expert_layers
        for phase in PHASES
    ]
    wanted = sum(transfer.payload_bytes for transfer in sent_back(case, calls))
    assert sum(transfer.payload_bytes for transfer in sent_back_if_balanced(case, 0)) == wanted > 0


def test_traffic_along_every_axis_of_experts() -> None:
    ranks_by_axis = {traffic.axis: traffic.ranks for traffic in wire(mixture(**SHARED), gpus_per_node=8)}
    assert ranks_by_axis == {"dp_shard": 4, "tp": 2, "efsdp": 2, "ep": 4}


def test_an_imbalance_costs_time_and_memory() -> None:
    experts, case = simulate(mixture(**SHARED), B200).experts, mixture(**SHARED)
    assert experts is not None
    assert experts.rows == case.tokens_per_rank  # each of a half of them is sent to two experts
    assert experts.more_s and experts.more_bytes
    whole = simulate(mixture(checkpointing="full", **SHARED), B200).experts
    assert whole is not None and whole.more_bytes == 0  # a block that is recomputed whole saves its input alone


def test_what_grouped_matmuls_gain_is_not_predicted() -> None:
    with pytest.raises(HarnessError, match="was not measured"):
        predicted_gains(parse_case_id("fsdp2-ep2-rowwise-moe8-v2048-b16"), B200)


NAMES = st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True)


@given(kind=NAMES, op=st.just("") | NAMES, dtype=NAMES, axes=st.lists(NAMES, min_size=1, max_size=3))
def test_the_words_of_a_collective_can_be_read(kind: str, op: str, dtype: str, axes: list[str]) -> None:
    given_ = {"axis": "+".join(axes), "kind": kind, "op": op, "dtype": dtype}
    assert _collective_of(collective_words(**given_)) == given_


@pytest.mark.parametrize("words", ["all_gather", "all_gather along tp", "all_gather in uint8 along tp, dp", "(max) in"])
def test_other_words_name_no_collective(words: str) -> None:
    assert _collective_of(words) is None
