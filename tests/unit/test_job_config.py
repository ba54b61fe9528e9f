"""Configurations of torchtitan become cases; what no case has is noted or refused by its name."""

from __future__ import annotations

import pytest

from harness.errors import HarnessError
from harness.matrix.caseid import case_id
from harness.matrix.job_config import import_flags, import_toml

LLAMA3_8B = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
converters = ["quantize.linear.float8"]
[optimizer]
lr = 3e-4
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
filter_fqns = ["output"]
"""


def flags(text: str, ranks: int | None = None) -> str:
    return case_id(import_flags(text, where="flags", ranks=ranks).case)


def test_a_file_becomes_a_small_case_of_the_same_kind() -> None:
    found = import_toml(LLAMA3_8B, where="8b.toml")
    name = "target.torchtitan-fsdp2-atp2-nowait-tensorwise-ag.fp8pre-ac.op-graph-v2048-b16"
    assert case_id(found.case) == name
    notes = " ".join(found.notes)
    assert "2 layers of dim 128" in notes and "--ranks N" in notes and "max_norm" in notes
    assert "dump_folder" not in notes and "no case has it" not in notes


def test_the_ranks_of_the_job_tell_how_many_share_a_parameter() -> None:
    assert case_id(import_toml(LLAMA3_8B, where="8b.toml", ranks=8).case).startswith("target.torchtitan-fsdp4-atp2-")
    found = import_toml(LLAMA3_8B, where="8b.toml", ranks=64)
    assert "dp_shard 32 is 4 here" in found.notes
    with pytest.raises(HarnessError, match="7 ranks are no multiple"):
        import_toml(LLAMA3_8B, where="8b.toml", ranks=7)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--parallelism.tensor_parallel_degree 4 --activation_checkpoint.mode none", "fsdp2-tp4-bf16-v2048-b16"),
        (
            "--parallelism.data_parallel_shard_degree=1 --activation_checkpoint.mode=full",
            "single-bf16-ac.full-v2048-b16",
        ),
        (
            (
                "--model.converters quantize.linear.float8 --quantize.linear.float8.recipe_name rowwise "
                "--parallelism.data-parallel-shard-degree 2 --activation_checkpoint.selective_ac_option 1"
            ),
            "fsdp2-rowwise-head.fp8-ac.layer1-v2048-b16",
        ),
        (
            (
                "--model.converters float8 --float8.filter_fqns attention.wk,output,auto_filter_small_kn "
                "--parallelism.data_parallel_replicate_degree 2 --activation_checkpoint.mode none"
            ),
            "hsdp2x2-tensorwise-filter.attention.wk-v2048-b16",
        ),
        ("--parallelism.tensor_parallel_degree 16 --activation_checkpoint.mode none", "fsdp2-tp4-bf16-v2048-b16"),
        (
            (
                "--parallelism.tensor_parallel_degree 2 --parallelism.disable_loss_parallel --compile.enable "
                "--activation_checkpoint.mode none"
            ),
            "fsdp2-tp2-nowait-nolp-bf16-graph-v2048-b16",
        ),
        (
            "--parallelism.fsdp_reshard_after_forward never --activation_checkpoint.mode none",
            "fsdp2-reshard.never-bf16-v2048-b16",
        ),
        (
            "--training.mixed_precision_param float32 --compile.no-enable --activation_checkpoint.mode none",
            "fsdp2-bf16-v2048-f32",
        ),
    ],
)
def test_flags(given: str, expected: str) -> None:
    assert flags(given) == f"target.torchtitan-{expected}"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("--parallelism.pipeline_parallel_degree 2", "pipeline parallelism"),
        ("--parallelism.context_parallel_degree 2", "context parallelism"),
        ("--parallelism.expert_parallel_degree 2", "expert parallelism"),
        ("--model.name qwen3", "trains its llama3"),
        ("--model.converters quantize.linear.mx", "quantize.linear.mx: no case has it"),
        ("--activation_checkpoint.mode memory_budget", "the compiler chooses"),
        (
            "--model.converters float8 --float8.recipe_name rowwise --float8.enable_fsdp_float8_all_gather",
            "only supports tensorwise",
        ),
        ("tensor_parallel_degree", "belongs to no flag"),
        ("--tp", "holds no option of torchtitan"),
    ],
)
def test_what_no_case_has_is_refused_by_name(given: str, what: str) -> None:
    with pytest.raises(HarnessError, match=what) as raised:
        flags(given)
    assert raised.value.fix


def test_older_names_mean_the_same() -> None:
    given = (
        "--training.tensor_parallel_degree 2 --training.data_parallel_degree 2 --training.compile "
        "--float8.enable_float8_linear --float8.recipe_name all_axiswise --training.enable_loss_parallel false "
        "--activation_checkpoint.mode none"
    )
    assert flags(given) == "target.torchtitan-fsdp2-tp2-nowait-nolp-rowwise-head.fp8-graph-v2048-b16"


def test_what_changes_no_number_is_noted() -> None:
    found = import_flags("--training.enable_cpu_offload --metrics.log_freq 1 --float8.emulate", where="flags")
    assert "training.enable_cpu_offload = True: no case has it" in found.notes
    assert not any("log_freq" in note for note in found.notes)
    with pytest.raises(HarnessError, match="not a TOML file"):
        import_toml("[model", where="x.toml")
