"""Configurations of other tools become cases; what no case has is told, or refused by its name."""

import pytest

from harness.errors import HarnessError
from harness.matrix.caseid import case_id
from harness.matrix.rules import exclusions
from harness.plugins.bugs.sections import job_notes
from tests.plugins.bugs.unit.readers import configured, configured_case

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
WRAPPED = "quantize_(model, MXFP8TrainingOpConfig({}))"
RECIPE = "quantize_(model, MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.{}))"

TITAN_FLAGS = "--module llama3 --parallelism.data_parallel_shard_degree 2"


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
    job = configured(text, where="job.yaml" if "model:" in text else "run.sh")
    assert job.case is not None and job.case.model.tied is tied
    assert job.account.not_understood == ()


def test_a_file_becomes_a_small_case_with_the_same_traits() -> None:
    job = configured(LLAMA3_8B, 4, where="8b.toml")
    assert job.case is not None
    assert case_id(job.case) == "fsdp2-atp2-tensorwise-ag.fp8pre-ac.op-graph-kvheads.4-v2048-gb2-b16"
    text = " ".join(job_notes(job))
    assert "4096 made smaller: 128" in text and "0 not understood" in text
    mine = configured_case(LLAMA3_8B, 4, where="8b.toml", target="mine")
    assert case_id(mine) == f"target.mine-{case_id(job.case).replace('atp2', 'atp2-nowait')}"


def test_the_ranks_of_the_job_tell_how_many_share_a_parameter() -> None:
    assert configured_case(LLAMA3_8B, 8).layout.dp_shard == 4
    job = configured(LLAMA3_8B, 64)
    assert job.case is not None and job.case.world_size <= 8 and "32 made smaller" in job.derived["dp_shard"]
    with pytest.raises(HarnessError, match="7 ranks are no multiple"):
        configured(LLAMA3_8B, 7)
    with pytest.raises(HarnessError, match=r"how many FSDP2 ranks\? 2 until you say.*give --dp-shard"):
        configured(LLAMA3_8B)


def test_axes_replace_what_the_configuration_says() -> None:
    case = configured_case(LLAMA3_8B, 8, recipe="rowwise", fp8_all_gather=False, precompute_scale=False, tp=1)
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
            "fsdp2-tp2-nolp-bf16-graph-v2048-gb4-b16",
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
            "fsdp2-tp2-nolp-rowwise-head.fp8-graph-v2048-gb4-b16",
        ),
    ],
)
def test_flags_of_torchtitan(given: str, expected: str) -> None:
    shards = {} if "parallel_shard" in given or "data_parallel_degree" in given else {"dp_shard": 2}
    assert case_id(configured_case(given, where="flags", **shards)) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--parallelism.expert_tensor_parallel_degree 2", "expert tensor parallelism"),
        ("--model.name deepseek_v3 --parallelism.tensor_parallel_degree 2", "how many experts"),
        ("--model.converters quantize.linear.mx --mx.recipe_name mxfp4", "MX formats"),
        ("--activation_checkpoint.mode memory_budget", "the compiler chooses"),
        ("--fp8-format hybrid --tensor-model-parallel-size 2", "TransformerEngine"),
        (
            "--model.converters float8 --float8.recipe_name rowwise --float8.enable_fsdp_float8_all_gather",
            "only supports tensorwise",
        ),
        ("--module llama3 --config llama3_debugmodel_first_85_pct_layers_nvfp4", "NVFP4"),
        ("--module llama3 --config llama3_debugmodel_float8_emulate_lora", "LoRA"),
        (f"{TITAN_FLAGS} --config llama3_debugmodel_dist_gemm", "llama3_debugmodel_dist_gemm sets is not known here"),
        ("--float8.recipe_name rowwise --float8.recipe_name tensorwise", "which is it"),
        ("tensor_parallel_degree", "holds no option"),
        ("--tp", "which tp is it"),
        (WRAPPED.format("kernel_preference=KernelPreference.EMULATED"), "emulated MXFP8"),
        (RECIPE.format("MXFP8_EMULATED_RCEIL"), "emulated MXFP8"),
        (WRAPPED.format("scale_calculation_mode=ScaleCalculationMode.FLOOR, wgrad_with_hp=True"), "which of both"),
    ],
)
def test_what_no_case_has_is_refused_by_name(given: str, message: str) -> None:
    with pytest.raises(HarnessError, match=message) as raised:
        configured(given, where="train.py" if "(" in given else "flags")
    assert raised.value.fix


@pytest.mark.parametrize(
    ("config", "axes", "recipe"),
    [
        ("llama3_debugmodel", {}, "bf16"),
        ("llama3_debugmodel", {"recipe": "rowwise"}, "rowwise"),
        ("llama3_8b_mxfp8", {}, "mxfp8"),
        ("llama3_debugmodel_dist_gemm", {"recipe": "rowwise"}, "rowwise"),
    ],
)
def test_a_function_of_torchtitan_is_read_by_its_whole_name(config: str, axes: dict[str, object], recipe: str) -> None:
    given = f"{TITAN_FLAGS} --config {config}"
    assert configured_case(given, 2, where="flags", target="torchtitan", **axes).float8.recipe == recipe


def test_torchtitan_trains_its_llama_alone() -> None:
    with pytest.raises(HarnessError, match="trains its llama3"):
        configured("--model.name qwen3 --parallelism.data_parallel_shard_degree 2", target="torchtitan", where="flags")


ANSWERS = {"compile": "none"}  # to what a pipeline and shared sequences do without


TITAN_PIPELINE = """[model]
name = "llama3"
flavor = "debugmodel"
converters = ["quantize.linear.float8"]
[parallelism]
data_parallel_shard_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
"""
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
        (TITAN_PIPELINE, "train.toml", "pp4-fsdp2-interleaved-tensorwise-head.fp8-ac.layer2-dim.256-layers.8-heads.16"),
        (
            "torchrun --nproc_per_node 4 pretrain_gpt.py --pipeline-model-parallel-size 2 --bf16",
            "run.sh",
            "pp2-fsdp2-bf16",
        ),
        (TITAN_CONTEXT, "train.toml", "fsdp8-cp4-bf16"),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --context-parallel-size 2",
            "run.sh",
            "fsdp4-tp2-nosp-cp2-bf16",
        ),
    ],
)
def test_a_pipeline_is_filled_and_ranks_that_share_sequences_are_ranks_of_fsdp(
    given: str, where: str, expected: str
) -> None:
    case = configured_case(given, where=where, **ANSWERS)
    assert case_id(case).startswith(expected) and not exclusions(case)
    assert case.train.accumulation % case.layout.pp == 0 and case.local_seq_len >= 16


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
        (MEGATRON, "run.sh", "fsdp2-tp4-bf16-ac.full-kvheads.4-v2048-vpad100-gb4-b16"),
        (TORCHAO, "train.py", "fsdp2-rowwise-graph-v2048-gb4-b16"),
        (ACCELERATE, "fsdp.yaml", "fsdp4-tensorwise-ag.fp8-pad-ac.full-v2048-b16"),
        (MEGATRON_EXPERTS, "run.sh", "fsdp4-tp2-ep4-bf16-moe8-top6-sigmoid-balance-v2048-b16"),
        (TITAN_EXPERTS, "train.toml", "fsdp4-tp2-ep8-rowwise-gmm.fp8-head.fp8-ac.layer2-moe8-v2048-b16"),
        ("torchrun --nproc_per_node 4 train.py --ep-size 2 --num-experts 4", "run.sh", "fsdp4-ep2-bf16-moe4-v2048-b16"),
        ("torchrun --nproc_per_node 2 train.py --expert-parallel-degree 1 --tp 2", "run.sh", "tp2-bf16-v2048-gb2-b16"),
    ],
)
def test_other_tools(given: str, where: str, expected: str) -> None:
    answers = {"dp_shard": 2} if given == TORCHAO else {"experts": 8} if "deepseek" in given else {}
    assert case_id(configured_case(given, where=where, **answers)) == expected


def test_how_many_experts_is_asked_where_only_their_ranks_are_given() -> None:
    with pytest.raises(HarnessError, match=r"how many experts\? 8 until you say.*give --set experts"):
        configured("torchrun --nproc_per_node 4 train.py --ep-size 2", where="run.sh")


TITAN_MXFP8 = """
config.parallelism = ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=1)
config.model_spec = model_registry("debugmodel", converters=[MXFP8LinearConverter.Config(model_compile_enabled=True)])
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("model = MXFP8Linear(128, 256, wgrad_with_hp=True)", ("mxfp8_with_gw_hp", "module", False)),
        (TITAN_MXFP8, ("mxfp8", "module", False)),
        ("linear = Float8BlockwiseLinear.from_float(linear)", ("blockwise", "module", False)),
        ("quantize_(model, Float8BlockwiseLinearConfig())", ("blockwise", "module", False)),
        (WRAPPED.format("wgrad_with_hp=False"), ("mxfp8", "wrapper", False)),
        (WRAPPED.format("scale_calculation_mode=ScaleCalculationMode.FLOOR"), ("mxfp8_floor", "wrapper", False)),
        (RECIPE.format("MXFP8_RCEIL"), ("mxfp8", "wrapper", False)),
        (RECIPE.format("MXFP8_RCEIL_WGRAD_WITH_HP"), ("mxfp8_with_gw_hp", "wrapper", False)),
        (f"{TITAN_MXFP8}parallelize_module(model, mesh, plan)\nquantize_(model, config)", ("mxfp8", "module", True)),
        (f"{TITAN_MXFP8}quantize_(model, config)\nparallelize_module(model, mesh, plan)", ("mxfp8", "module", False)),
    ],
)
def test_scaled_blocks(given: str, expected: tuple[str, str, bool]) -> None:
    float8 = configured_case(given, where="train.py").float8
    assert (float8.recipe, float8.conversion, float8.convert_after_tp) == expected


def test_what_changes_no_number_is_noted() -> None:
    flags = (
        "--parallelism.data_parallel_shard_degree 2 --training.enable_cpu_offload --metrics.log_freq 1 --float8.emulate"
    )
    with pytest.raises(
        HarnessError, match=r"enable_cpu_offload.* is about checkpointing.*--ignore training.enable_cpu_offload"
    ):
        configured(flags, where="flags")
    job = configured(flags, where="flags", ignore=("training.enable_cpu_offload",))
    assert "training.enable_cpu_offload: --ignore" in job.ignored
    assert any("never emulated" in note for note in job.ignored)
    assert [line.words for line in job.account.without_effect] == ["--metrics.log_freq 1"]
    with pytest.raises(HarnessError, match=r"no line of this name is open. Fix: open are: training.enable_cpu_offload"):
        configured(flags, where="flags", ignore=("metrics",))


@pytest.mark.parametrize(
    ("version", "recipe"), [("", None), ("torchtitan==0.2.2", "tensorwise"), ("torchtitan==0.3.0rc1", "rowwise")]
)
def test_an_unnamed_recipe_is_of_the_version(version: str, recipe: str | None) -> None:
    text = f"# {version}\nParallelismConfig(data_parallel_shard_degree=2)\nFloat8LinearConverter.Config()"
    if recipe:
        assert configured_case(text, where="ours.py").float8.recipe == recipe
    else:
        with pytest.raises(HarnessError, match=r"tensorwise before 0.3 and rowwise since: which was run"):
            configured(text, where="ours.py")


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("zero_optimization:\n  stage: 3\nworld_size: 4\n", "fsdp4"),
        ("deepspeed: ds/zero3_bf16.json\nworld_size: 4\n", "fsdp4"),
        ("deepspeed: ds/zero2.json\nworld_size: 4\n", "ZeRO stage 1 or 2"),
        ("zero_optimization:\n  stage: 1\n", "ZeRO stage 1 or 2"),
        ("deepspeed: ours.json\nworld_size: 4\n", "which zero is it"),
    ],
)
def test_fsdp2_stands_for_stage_3_of_zero(stage: str, expected: str) -> None:
    if expected.startswith("fsdp"):
        job = configured(stage, where="job.yaml")
        assert job.case is not None and case_id(job.case).startswith(expected)
        assert "FSDP2 stands for stage 3" in job.assumed["ZeRO"]
    else:
        with pytest.raises(HarnessError, match=expected):
            configured(stage, where="job.yaml")


@pytest.mark.parametrize("vocabulary", [32001, 50257, 151937])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_odd_vocabulary_is_kept_whatever_the_file_has(vocabulary: int, ranks: int) -> None:
    flags = f"NGPU={ranks} CONFIG_FILE=llama3_8b.toml run_train.sh --vocab_size {vocabulary} --tp {ranks}"
    vocab_size = configured_case(flags, where="run.sh").model.vocab_size
    assert (vocab_size - vocabulary) % (16 * ranks) == 0


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--num-experts 64 --moe-router-topk 64 --expert-model-parallel-size 4", (64, 64, 4)),
        ("--num-experts 64 --moe-router-topk 2 --expert-model-parallel-size 64 --nnodes 8", (8, 2, 8)),
        ("--num-experts 256 --moe-router-topk 8 --expert-model-parallel-size 8", (16, 8, 8)),
    ],
)
def test_experts_that_a_token_meets_stay_among_more(flags: str, kept: tuple[int, int, int]) -> None:
    case = configured_case(f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}", where="run.sh")
    assert (case.model.experts, case.model.top_k, case.layout.ep) == kept


def test_what_cannot_be_kept_is_asked() -> None:
    with pytest.raises(HarnessError, match=r"8 experts on 8 ranks become 4 on 4, and a token meets 6"):
        flags = "--num-experts 8 --moe-router-topk 6 --expert-model-parallel-size 8"
        configured(f"torchrun --nproc_per_node 4 pretrain_gpt.py {flags}", where="run.sh")
    four = "--pp 2 --dp_replicate 2 --dp_shard 2 --tp 2"
    with pytest.raises(HarnessError, match=r"dp_shard: .*what must stay of it"):
        configured(four, where="flags")
