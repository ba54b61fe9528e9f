"""Predictions of models with experts: the work of all ranks is that of every token, and what an imbalance costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.expect.expert_traffic import sent_back, sent_back_if_balanced, sent_rows
from harness.expect.work import work
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.linears import active_parameter_count, parameter_count
from harness.matrix.models import MODELS, training
from harness.plugins.predict.cost import flops_per_token
from harness.plugins.predict.gains import predicted_gains
from harness.plugins.predict.layouts import simulate
from harness.plugins.predict.machine import machine, wire
from harness.trace.experts import ExpertCall, Phase, Rows

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
    calls = [
        ExpertCall(
            step=1,
            fqn=f"layers.{layer}.moe",
            phase=phase,
            number=number,
            tokens=b"",
            chosen=b"",
            weights=b"",
            counts=(),
            local_counts=(sent_rows(case),),
            values=Rows(),
        )
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
    assert experts.more_s
    assert experts.more_bytes
    whole = simulate(mixture(checkpointing="full", **SHARED), B200).experts
    assert whole is not None
    assert whole.more_bytes == 0  # a block that is recomputed whole saves its input alone


def test_what_grouped_matmuls_gain_is_not_predicted() -> None:
    with pytest.raises(HarnessError, match="was not measured"):
        predicted_gains(parse_case_id("fsdp2-ep2-rowwise-moe8-v2048-b16"), B200)
