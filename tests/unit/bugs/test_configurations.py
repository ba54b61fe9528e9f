"""Configurations of other tools become cases; what no case has is told, or refused by its name."""

from __future__ import annotations

import datetime

import pytest

from harness.bugs.importing import import_configuration
from harness.bugs.report import read_report
from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.rules import exclusions

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
MEGATRON = """torchrun --nproc_per_node 8 pretrain_gpt.py \\
  --num-layers 16 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --num-query-groups 8 \\
  --seq-length 4096 --micro-batch-size 2 --tensor-model-parallel-size 4 --sequence-parallel --bf16 \\
  --recompute-granularity full --make-vocab-size-divisible-by 100 --pipeline-model-parallel-size 1
"""
TORCHAO = """
config = Float8LinearConfig.from_recipe_name("rowwise")
model = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024))
convert_to_float8_training(model, config=config)
fully_shard(model)
torch.compile(model)
"""
ACCELERATE = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true
fp8_config:
  backend: AO
  enable_fsdp_float8_all_gather: true
mixed_precision: fp8
num_processes: 4
"""


def configured(text: str, ranks: int | None = None, where: str = "job", **axes: object) -> tuple[Case, tuple[str, ...]]:
    report = read_report(text.encode(), where=where)
    return import_configuration(report, axes, today=datetime.date(2026, 11, 24), ranks=ranks)


@pytest.mark.parametrize(
    ("text", "tied"),
    [
        ("model:\n  tie_word_embeddings: true\n  hidden_size: 2048\n", True),
        ("model:\n  tie_word_embeddings: false\n  hidden_size: 2048\n", False),
        (MEGATRON.rstrip() + " --untie-embeddings-and-output-weights\n", False),
        (MEGATRON, False),
    ],
)
def test_shared_ends_are_read(text: str, tied: bool) -> None:
    case, notes = configured(text)
    assert case.model.tied is tied
    assert not [note for note in notes if "untie" in note or "tie_word" in note]


def test_a_file_becomes_a_small_case_with_the_same_traits() -> None:
    case, notes = configured(LLAMA3_8B, where="8b.toml")
    name = "target.torchtitan-fsdp2-atp2-nowait-tensorwise-ag.fp8pre-ac.op-graph-kvheads.4-v2048-gb2-b16"
    assert case_id(case) == name
    text = " ".join(notes)
    assert "how many FSDP2 ranks? 2" in text and "4096 made smaller: 128" in text
    assert "dump_folder" not in text and "not understood" not in text


def test_the_ranks_of_the_job_tell_how_many_share_a_parameter() -> None:
    assert configured(LLAMA3_8B, ranks=8)[0].layout.dp_shard == 4
    case, notes = configured(LLAMA3_8B, ranks=64)
    assert case.world_size <= 8 and any("32 made smaller" in note for note in notes)
    with pytest.raises(HarnessError, match="7 ranks are no multiple"):
        configured(LLAMA3_8B, ranks=7)


def test_axes_replace_what_the_configuration_says() -> None:
    case, _ = configured(LLAMA3_8B, ranks=8, recipe="rowwise", fp8_all_gather=False, precompute_scale=False, tp=1)
    assert (case.float8.recipe, case.float8.fp8_all_gather) == ("rowwise", False)
    assert (case.layout.tp, case.layout.dp_shard, case.layout.async_tp) == (1, 8, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--parallelism.tensor_parallel_degree 4 --activation_checkpoint.mode none", "fsdp2-tp4-bf16-v2048-gb4-b16"),
        (
            "--parallelism.data_parallel_shard_degree=1 --activation_checkpoint.mode=full",
            "single-bf16-ac.full-v2048-gb2-b16",
        ),
        (
            (
                "--model.converters quantize.linear.float8 --quantize.linear.float8.recipe_name rowwise "
                "--parallelism.data-parallel-shard-degree 2 --activation_checkpoint.selective_ac_option 1"
            ),
            "fsdp2-rowwise-head.fp8-ac.layer1-v2048-gb4-b16",
        ),
        (
            (
                "--model.converters float8 --float8.filter_fqns attention.wk,output,auto_filter_small_kn "
                "--parallelism.data_parallel_replicate_degree 2 --activation_checkpoint.mode none"
            ),
            "hsdp2x2-tensorwise-filter.attention.wk-v2048-b16",
        ),
        (
            (
                "--parallelism.tensor_parallel_degree 2 --parallelism.disable_loss_parallel --compile.enable "
                "--activation_checkpoint.mode none"
            ),
            "fsdp2-tp2-nowait-nolp-bf16-graph-v2048-gb4-b16",
        ),
        (
            "--parallelism.fsdp_reshard_after_forward never --activation_checkpoint.mode none",
            "fsdp2-reshard.never-bf16-v2048-gb4-b16",
        ),
        (
            "--training.mixed_precision_param float32 --compile.no-enable --activation_checkpoint.mode none",
            "fsdp2-bf16-v2048-gb4-f32",
        ),
        (
            (
                "--training.tensor_parallel_degree 2 --training.data_parallel_degree 2 --training.compile "
                "--float8.enable_float8_linear --float8.recipe_name all_axiswise "
                "--training.enable_loss_parallel false --activation_checkpoint.mode none"
            ),
            "fsdp2-tp2-nowait-nolp-rowwise-head.fp8-graph-v2048-gb4-b16",
        ),
    ],
)
def test_flags_of_torchtitan(given: str, expected: str) -> None:
    assert case_id(configured(given)[0]) == f"target.torchtitan-{expected}"


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        (MEGATRON, "run.sh", "fsdp2-tp4-bf16-ac.full-kvheads.4-v2048-vpad100-gb4-b16"),
        (TORCHAO, "train.py", "fsdp2-rowwise-graph-v2048-gb4-b16"),
        (ACCELERATE, "fsdp.yaml", "fsdp4-tensorwise-ag.fp8-pad-ac.full-v2048-b16"),
    ],
)
def test_other_tools(text: str, where: str, expected: str) -> None:
    assert case_id(configured(text, where=where)[0]) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--parallelism.expert_tensor_parallel_degree 2", "expert tensor parallelism"),
        ("--model.name deepseek_v3 --parallelism.tensor_parallel_degree 2", "a mixture of experts"),
        ("--model.name qwen3", "trains its llama3"),
        ("--model.converters quantize.linear.mx", "MX formats"),
        ("--activation_checkpoint.mode memory_budget", "the compiler chooses"),
        ("--fp8-format hybrid --tensor-model-parallel-size 2", "TransformerEngine"),
        (
            "--model.converters float8 --float8.recipe_name rowwise --float8.enable_fsdp_float8_all_gather",
            "only supports tensorwise",
        ),
        ("--float8.recipe_name rowwise --float8.recipe_name tensorwise", "which is it"),
        ("tensor_parallel_degree", "holds no option"),
        ("--tp", "holds no option"),
    ],
)
def test_what_no_case_has_is_refused_by_name(given: str, message: str) -> None:
    with pytest.raises(HarnessError, match=message) as raised:
        configured(given)
    assert raised.value.fix


TITAN_PIPELINE = """[model]
name = "llama3"
flavor = "debugmodel"
converters = ["quantize.linear.float8"]
[parallelism]
data_parallel_shard_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
"""


@pytest.mark.parametrize(
    ("given", "where", "expected"),
    [
        (TITAN_PIPELINE, "train.toml", "pp4-fsdp2-interleaved-tensorwise-ac.layer2-dim.256-layers.8-heads.16"),
        (
            "torchrun --nproc_per_node 4 pretrain_gpt.py --pipeline-model-parallel-size 2 --bf16",
            "run.sh",
            "pp2-fsdp2-bf16",
        ),
    ],
)
def test_a_pipeline_gets_the_blocks_and_microbatches_that_fill_it(given: str, where: str, expected: str) -> None:
    case = configured(given, where=where)[0]
    assert case_id(case).startswith(expected)
    assert case.train.accumulation % case.layout.pp == 0 and not exclusions(case)


TITAN_CONTEXT = """[parallelism]
data_parallel_shard_degree = 2
context_parallel_degree = 8
context_parallel_load_balancer = "headtail"
[compile]
enable = true
"""


@pytest.mark.parametrize(
    ("given", "where", "expected"),
    [
        (TITAN_CONTEXT, "train.toml", "fsdp8-cp4-bf16"),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --context-parallel-size 2",
            "run.sh",
            "fsdp4-tp2-cp2-bf16",
        ),
    ],
)
def test_ranks_that_share_sequences_are_ranks_of_fsdp(given: str, where: str, expected: str) -> None:
    case = configured(given, where=where)[0]
    assert case_id(case).startswith(expected)
    assert case.local_seq_len >= 16 and not exclusions(case)


TITAN_EXPERTS = """
[model]
name = "deepseek_v3"
flavor = "debugmodel"
converters = ["quantize.linear.float8", "quantize.grouped_mm.float8"]
[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
expert_parallel_degree = 8
expert_tensor_parallel_degree = 1
[quantize.linear.float8]
recipe_name = "rowwise"
"""
MEGATRON_EXPERTS = """torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --bf16 \\
  --expert-model-parallel-size 4 --num-experts 64 --moe-router-topk 6 --moe-router-score-function sigmoid \\
  --moe-router-enable-expert-bias --sequence-parallel
"""


@pytest.mark.parametrize(
    ("given", "where", "expected"),
    [
        (MEGATRON_EXPERTS, "run.sh", "fsdp4-tp2-ep4-bf16-moe8-top6-sigmoid-balance-v2048-b16"),
        (TITAN_EXPERTS, "train.toml", "fsdp4-tp2-ep8-rowwise-gmm.fp8-ac.layer2-moe8-v2048-b16"),
        ("torchrun --nproc_per_node 4 train.py --ep-size 2 --num-experts 4", "run.sh", "fsdp4-ep2-bf16-moe4-v2048-b16"),
        ("torchrun --nproc_per_node 2 train.py --expert-parallel-degree 1 --tp 2", "run.sh", "tp2-bf16-v2048-gb2-b16"),
    ],
)
def test_experts_of_other_tools(given: str, where: str, expected: str) -> None:
    assert case_id(configured(given, where=where)[0]) == expected


def test_how_many_experts_is_asked_where_only_their_ranks_are_given() -> None:
    case, notes = configured("torchrun --nproc_per_node 4 train.py --ep-size 2", where="run.sh")
    assert case.model.experts == 8
    assert any("how many experts?" in note for note in notes)


TITAN_MXFP8 = """
config.parallelism = ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=1)
config.model_spec = model_registry("debugmodel", converters=[MXFP8LinearConverter.Config(model_compile_enabled=True)])
"""
WRAPPED = "quantize_(model, MXFP8TrainingOpConfig({}))"
RECIPE = "quantize_(model, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.{}))"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("model = MXFP8Linear(128, 256, wgrad_with_hp=True)", ("mxfp8_with_gw_hp", "module", False)),
        (TITAN_MXFP8, ("mxfp8", "module", False)),
        (WRAPPED.format("wgrad_with_hp=False"), ("mxfp8", "wrapper", False)),
        (WRAPPED.format("scale_calculation_mode=ScaleCalculationMode.FLOOR"), ("mxfp8_floor", "wrapper", False)),
        (RECIPE.format("MXFP8_RCEIL"), ("mxfp8", "wrapper", False)),
        (RECIPE.format("MXFP8_RCEIL_WGRAD_WITH_HP"), ("mxfp8_with_gw_hp", "wrapper", False)),
        (f"{TITAN_MXFP8}parallelize_module(model, mesh, plan)\nquantize_(model, config)", ("mxfp8", "module", True)),
        (f"{TITAN_MXFP8}quantize_(model, config)\nparallelize_module(model, mesh, plan)", ("mxfp8", "module", False)),
    ],
)
def test_mxfp8(given: str, expected: tuple[str, str, bool]) -> None:
    float8 = configured(given, where="train.py")[0].float8
    assert (float8.recipe, float8.conversion, float8.convert_after_tp) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (WRAPPED.format("kernel_preference=KernelPreference.EMULATED"), "emulated MXFP8"),
        (RECIPE.format("MXFP8_EMULATED_RCEIL"), "emulated MXFP8"),
        (WRAPPED.format("scale_calculation_mode=ScaleCalculationMode.FLOOR, wgrad_with_hp=True"), "which of both"),
    ],
)
def test_mxfp8_that_no_case_has(given: str, message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        configured(given, where="train.py")


def test_what_changes_no_number_is_noted() -> None:
    _, notes = configured("--training.enable_cpu_offload --metrics.log_freq 1 --float8.emulate")
    assert "--training.enable_cpu_offload: not understood" in notes
    assert any("never emulated" in note for note in notes)
    assert not any("log_freq" in note for note in notes)
