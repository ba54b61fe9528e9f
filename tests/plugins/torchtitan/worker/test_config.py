"""A case in the words of torchtitan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.matrix.case import Case
from harness.matrix.linears import converted_fqns, linear_features, linear_fqns
from harness.worker.targets.target import World
from tests.builders import make_case


def config_of(case: Case, **changes: Any) -> Any:
    from torchtitan.components.loss import CrossEntropyLoss

    from harness.plugins.torchtitan.worker.trainer import trainer_config

    given = {"fsdp": case.uses_fsdp, "dp_rank": 0, "microbatches": 1, "local_batch": case.local_batch}
    return trainer_config(case, World(device=torch.device("cpu"), **(given | changes)), CrossEntropyLoss.Config())


def test_layout() -> None:
    parallelism = config_of(make_case(dp_replicate=2, dp_shard=2, tp=2, sequence_parallel=False)).parallelism
    assert parallelism.data_parallel_replicate_degree == 2
    assert parallelism.data_parallel_shard_degree == 2
    assert parallelism.tensor_parallel_degree == 2
    assert not parallelism.enable_sequence_parallel
    assert parallelism.spmd_backend == "spmd_types"


@pytest.mark.parametrize(("order", "balancer"), [("headtail", "headtail"), ("contiguous", None)])
def test_context_parallel_ranks_are_of_the_shards(order: str, balancer: str | None) -> None:
    config = config_of(make_case(dp_shard=4, cp=2, sequence_order=order, seq_len=192))
    assert config.parallelism.data_parallel_shard_degree == config.parallelism.context_parallel_degree == 2
    assert config.parallelism.context_parallel_load_balancer == balancer
    assert config.model_spec.model.layers[0].attention.inner_attention.block_size == 32  # divides 96 queries and 128


@pytest.mark.parametrize(
    ("dtype", "master", "param", "reduce"),
    [("float64", "float64", "float64", "float64"), ("bfloat16", "float32", "bfloat16", "float32")],
)
def test_dtypes(dtype: str, master: str, param: str, reduce: str) -> None:
    training = config_of(make_case(dtype=dtype)).training
    assert (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce) == (master, param, reduce)


def test_gradient_accumulation_of_the_single_rank_reference() -> None:
    training = config_of(make_case(global_batch=8, seq_len=32), microbatches=4, local_batch=2).training
    assert training.num_tokens_per_microbatch_per_dp_rank == 2 * 32
    assert training.num_tokens_per_train_step == 8 * 32


@pytest.mark.parametrize(
    ("schedule", "theirs"), [("1f1b", "1F1B"), ("gpipe", "GPipe"), ("zero_bubble", "InterleavedZeroBubble")]
)
def test_a_pipeline_has_the_stages_and_microbatches_of_the_case(schedule: str, theirs: str) -> None:
    case = make_case(target="torchtitan", pp=2, schedule=schedule, accumulation=4, global_batch=8)
    config = config_of(case, microbatches=4, local_batch=2)
    parallelism = config.parallelism
    assert (parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule) == (2, theirs)
    assert parallelism.num_pp_microbatches == 4
    first, last = parallelism.module_fqns_per_model_part
    assert (first, last) == (["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"])


@pytest.mark.parametrize(("mode", "theirs"), [("none", None), ("full", "FullAC"), ("selective_op", "SelectiveAC")])
def test_checkpointing(mode: str, theirs: str | None) -> None:
    asked = config_of(make_case(checkpointing=mode)).activation_checkpoint
    assert (asked and type(asked)._owner.__name__) == theirs


@pytest.mark.parametrize(("mode", "backend"), [("graph", "fp8_harness_graph"), ("inductor", "inductor")])
def test_compile(mode: str, backend: str) -> None:
    asked = config_of(make_case(compile=mode, tp=2, async_tp=True)).compile
    assert (asked.enable, asked.components, asked.backend) == (True, ["model"], backend)
    assert asked.enable_async_tensor_parallel


@pytest.mark.parametrize(
    "axes",
    [
        {"recipe": "bf16"},
        {"recipe": "rowwise"},
        {"recipe": "rowwise_with_gw_hp", "output_layer": True},
        {"recipe": "rowwise", "filter_fqns": ("wk", "wv", "layers.1")},
        {"recipe": "rowwise", "model": "debug"},
        {"recipe": "mxfp8", "dtype": "bfloat16"},
        {"recipe": "mxfp8", "dtype": "bfloat16", "output_layer": True},
        {"recipe": "mxfp8", "dtype": "bfloat16", "filter_fqns": ("wk", "wv", "layers.1")},
    ],
)
def test_sizes_and_conversions_are_those_of_the_case(axes: dict[str, Any]) -> None:
    from harness.plugins.torchtitan.worker.model import add_names
    from harness.worker.probes.discovery import converted_linears, linears

    case = make_case(**axes)
    with torch.device("meta"):
        model = config_of(case).model_spec.model.build()
    add_names(model)
    by_fqn = linears(model)
    assert sorted(by_fqn) == sorted(linear_fqns(case))
    assert tuple(sorted(converted_linears(model))) == converted_fqns(case)
    for fqn, linear in by_fqn.items():
        assert (linear.in_features, linear.out_features) == linear_features(case, fqn.split(".", 2)[-1])
