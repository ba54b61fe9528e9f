"""A case in torchtitan's words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.matrix.case import Case
from harness.worker.targets.target import World
from tests.builders import make_case


def _world(case: Case, **changes: Any) -> World:
    given = {"fsdp": case.uses_fsdp, "dp_rank": 0, "microbatches": 1, "local_batch": case.local_batch}
    return World(device=torch.device("cpu"), **(given | changes))


def _config(case: Case, **changes: Any) -> Any:
    from harness.plugins.torchtitan.worker.v0_2.config import job_config

    return job_config(case, _world(case, **changes))


def test_layout() -> None:
    parallelism = _config(make_case(dp_replicate=2, dp_shard=2, tp=2, loss_parallel=False)).parallelism
    assert parallelism.data_parallel_replicate_degree == 2
    assert parallelism.data_parallel_shard_degree == 2
    assert parallelism.tensor_parallel_degree == 2
    assert parallelism.disable_loss_parallel


@pytest.mark.parametrize(
    ("dtype", "master", "param", "reduce"),
    [
        ("float64", "float64", "float64", "float64"),
        ("float32", "float32", "float32", "float32"),
        ("bfloat16", "float32", "bfloat16", "float32"),
    ],
)
def test_dtypes(dtype: str, master: str, param: str, reduce: str) -> None:
    training = _config(make_case(dtype=dtype)).training
    assert (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce) == (master, param, reduce)


def test_gradient_accumulation_of_the_single_rank_reference() -> None:
    training = _config(make_case(global_batch=8), microbatches=4, local_batch=2).training
    assert (training.local_batch_size, training.global_batch_size) == (2, 8)


@pytest.mark.parametrize(
    ("schedule", "theirs", "stages"), [("gpipe", "GPipe", 2), ("interleaved", "Interleaved1F1B", 4)]
)
def test_a_pipeline_has_the_stages_and_microbatches_of_the_case(schedule: str, theirs: str, stages: int) -> None:
    case = make_case(target="torchtitan", pp=2, schedule=schedule, layers=4, accumulation=4, global_batch=8)
    config = _config(case, microbatches=4, local_batch=2)
    parallelism = config.parallelism
    assert (parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule) == (2, theirs)
    assert (config.training.local_batch_size, parallelism.pipeline_parallel_microbatch_size) == (8, 2)
    first, *_, last = parts = parallelism.module_fqns_per_model_part
    assert (len(parts), first[0], last[-2:]) == (stages, "tok_embeddings", ["norm", "output"])


@pytest.mark.parametrize(
    ("recipe", "name"), [("tensorwise", None), ("rowwise", "rowwise"), ("rowwise_with_gw_hp", "rowwise_with_gw_hp")]
)
def test_recipes(recipe: str, name: str | None) -> None:
    config = _config(make_case(recipe=recipe))
    assert config.model.converters == ["quantize.linear.float8"]
    assert config.quantize.linear.float8.recipe_name == name
    assert config.quantize.linear.float8.filter_fqns == ["output"]


def test_bf16_has_no_converter() -> None:
    assert _config(make_case(recipe="bf16")).model.converters == []


def test_float8_head_and_filter() -> None:
    config = _config(make_case(recipe="rowwise", output_layer=True, filter_fqns=("attention.wk",)))
    assert config.quantize.linear.float8.filter_fqns == ["attention.wk"]


@pytest.mark.parametrize(
    ("mode", "theirs", "option"),
    [
        ("none", "none", "2"),
        ("full", "full", "2"),
        ("selective_op", "selective", "op"),
        ("selective_layer", "selective", "2"),
    ],
)
def test_checkpointing(mode: str, theirs: str, option: str) -> None:
    asked = _config(make_case(checkpointing=mode)).activation_checkpoint
    assert (asked.mode, asked.selective_ac_option) == (theirs, option)


@pytest.mark.parametrize(("mode", "backend"), [("graph", "fp8_harness_graph"), ("inductor", "inductor")])
def test_compile(mode: str, backend: str) -> None:
    config = _config(make_case(compile=mode))
    assert config.compile.enable
    assert config.compile.components == ["model"]
    assert config.compile.backend == backend


def test_learning_rate_is_constant() -> None:
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import build_optimizers

    config = _config(make_case(lr=0.01, steps=5))
    optimizers = build_optimizers([torch.nn.Linear(1, 1)], config.optimizer, None)
    schedulers = build_lr_schedulers(optimizers, config.lr_scheduler, config.training.steps)
    seen = []
    for _ in range(5):
        seen.append(schedulers.schedulers[0].get_last_lr()[0])
        optimizers.step()
        schedulers.step()
    assert seen == [0.01] * 5


@pytest.mark.parametrize(
    "axes", [{"model": "tiny"}, {"model": "debug"}, {"ffn_dim": 144}, {"dim": 96, "ffn_dim": 1024}]
)
def test_model_has_exactly_the_sizes_of_the_case(axes: dict[str, Any]) -> None:
    from torchtitan.models.llama3 import Transformer

    from harness.matrix.linears import linear_features, linear_fqns
    from harness.plugins.torchtitan.worker.v0_2.config import model_args

    case = make_case(**axes)
    with torch.device("meta"):
        model = Transformer(model_args(case))
    for fqn in linear_fqns(case):
        linear = model.get_submodule(fqn)
        assert (linear.in_features, linear.out_features) == linear_features(case, fqn.split(".", 2)[-1])
