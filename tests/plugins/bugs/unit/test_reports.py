"""Reports: fences are read, prose is not; title, link and what tools print are kept; what no case has is refused."""

from __future__ import annotations

import pytest

from harness.errors import HarnessError
from harness.matrix.caseid import case_id
from tests.plugins.bugs.unit.readers import case_of, configured, fenced, head, imported
from tests.plugins.bugs.unit.test_configurations import ACCELERATE, TORCHAO

TOML = """[parallelism]
data_parallel_shard_degree = 2
data_parallel_replicate_degree = 2
[activation_checkpoint]
mode = "none"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["attention.wk", "output"]
"""
COMMAND = """NGPU=4 CONFIG_FILE="./debug_model.toml" ./run_train.sh --training.compile \\
  --float8.enable_float8_linear --experimental.enable_async_tensor_parallel --training.tensor_parallel_degree 2 \\
  --float8.recipe_name all_axiswise
"""
STACK = """model = nn.Sequential(nn.Linear(64, 16, bias=False)).cuda()
config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
convert_to_float8_training(model, config=config)
fully_shard(model)
"""


@pytest.mark.parametrize(
    ("text", "language", "case", "missing"),
    [
        (TOML, "toml", "hsdp2x2-tensorwise-ag.fp8-filter.attention.wk-v2048-b16", ""),
        (
            COMMAND,
            "bash",
            "fsdp2-atp2-rowwise-ac.layer2-graph-dim.256-heads.16-kvheads.16-ffn.768-v2048-gb4-b16",
            "",
        ),
        (STACK, "python", "fsdp2-tensorwise-ag.fp8-dim.64-ffn.16-v2048-gb4-b16", "dp_shard"),
        (TORCHAO, "", "fsdp2-rowwise-graph-v2048-gb4-b16", "dp_shard"),
        (ACCELERATE, "yaml", "fsdp4-tensorwise-ag.fp8-pad-ac.full-v2048-b16", ""),
        (ACCELERATE, "", "fsdp4-tensorwise-ag.fp8-pad-ac.full-v2048-b16", ""),
    ],
)
def test_configurations_in_fences_become_a_case(text: str, language: str, case: str, missing: str) -> None:
    report = head("pytorch/ao", 7, "It fails") + "We run TP=8 with rowwise.\n" + fenced(text, language)
    bug = imported(report, id="").bug
    assert (bug.id, bug.bug.title) == ("ao-7", "It fails")
    assert case_id(case_of(imported(report))) == case
    assert " ".join(bug.missing) == missing and bug.bug.status == "open"
    wrapped = f"````markdown\n{report}````\n"
    assert imported(wrapped, id="").bug.case == bug.case


@pytest.mark.parametrize(
    "prose",
    [
        "rowwise, TP=2, FSDP=4, 128 H100s, full AC, torch.compile",
        "`--parallelism.tensor_parallel_degree 2` works, `zero_stage >= 2` does not",
        "- tensor_parallel_degree = 2\n- TP: 4",
        "> tensor_parallel_degree: 2",
    ],
)
def test_prose_states_nothing(prose: str) -> None:
    job = imported(head("pytorch/ao", 7, "rowwise TP=2: NaN") + prose).job
    assert job.account.used == job.account.not_understood == ()
    assert job.stated == job.derived == {} and "Prose is not read" in job.missing["recipe"]
    bug = imported(head("pytorch/ao", 7, "rowwise TP=2: NaN") + prose).bug.bug
    assert bug.title == "rowwise TP=2: NaN" and bug.report.splitlines()[1:] == prose.splitlines()


PRINTED = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/ao/float8_linear.py", line 172, in backward
[rank0]: RuntimeError: got mixed torch.Tensor and DTensor
step: 12  loss:  nan
PyTorch version: 2.8.0+cu128
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
[rank0]:2025-01-31 - root - INFO - Applied full activation checkpointing to the model
"""


def test_what_tools_print_is_kept() -> None:
    report = head("pytorch/ao", 7, "It fails") + "opened on Jun 3, 2025, with torchao==0.12.0\n" + fenced(PRINTED)
    bug = imported(report, symptom=None).bug
    assert bug.bug.message == "RuntimeError: got mixed torch.Tensor and DTensor"
    assert (bug.bug.symptom, bug.bug.first_bad_step) == ("nan", 12)
    assert bug.bug.versions == {"torchao": "0.12.0", "torch": "2.8.0+cu128"}
    assert bug.bug.reported is None and bug.bug.hardware == "2 x H100 80GB HBM3"
    assert case_of(imported(report)).checkpointing.mode == "full" and case_of(imported(report)).train.steps == 12


def test_the_symptom_is_what_the_user_says_or_a_log_shows() -> None:
    text = head("pytorch/ao", 7, "It hangs, then NaN")
    assert imported(text).bug.bug.symptom == "unknown"
    assert imported(text, symptom="hang").bug.bug.symptom == "hang"
    assert imported(text, message="ValueError: x").bug.bug.symptom == "crash"
    assert imported(text + fenced("ValueError: x")).bug.bug.symptom == "crash"


REFUSED = {
    "fp8_config:\n  backend: TE\nmixed_precision: fp8\n": "TransformerEngine",
    "torchrun t.py --fp8-recipe delayed --fp8-format hybrid": "TransformerEngine|delayed scaling",
    "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n": "FSDP1",
    "fsdp_config:\n  fsdp_version: 1\ndistributed_type: FSDP\n": "FSDP1",
    "from torch.distributed.fsdp import FullyShardedDataParallel as F\nm = F(m)\n": "FSDP1",
    'torchrun t.py --fsdp "full_shard auto_wrap"': "FSDP1",
    "fsdp:\n- full_shard\n- auto_wrap\nbase_model: x\n": "FSDP1",
    "distributed_type: MULTI_GPU\nnum_processes: 8\n": "DDP",
    "zero_optimization:\n  stage: 2\n": "ZeRO stage 1 or 2",
    "adapter: qlora\nbase_model: x\n": "LoRA",
    "fp16: true\nbase_model: x\n": "float16",
    "convert_to_float8_training(m)\nwith torch.inference_mode():\n    m(x)\n": "inference",
    "quantize_(model, Float8WeightOnlyConfig())\n": "inference",
    "jitted = thunder.jit(convert_to_float8_training(m))\n": "another compiler",
    "c = CastConfig(scaling_type=ScalingType.DELAYED)\n": "delayed scaling",
    "m = Float8BlockwiseLinear(4, 4)\nf(m)\n": "block-wise scaling",
}


@pytest.mark.parametrize(("text", "names"), REFUSED.items(), ids=list(REFUSED.values()))
def test_what_no_case_has_is_refused_by_name(text: str, names: str) -> None:
    bug = imported(head("pytorch/ao", 7, "It fails") + fenced(text)).bug
    assert bug.bug.status == "refused" and bug.case is None
    assert sorted(bug.refused) == sorted(names.split("|"))
    assert all(words.endswith(")") for words in bug.refused.values())


@pytest.mark.parametrize(
    "text",
    [
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_sharding_strategy: FULL_SHARD\ndistributed_type: FSDP\n",
        "from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard\nfully_shard(m)\n",
        'TrainingArguments(fsdp="full_shard", fsdp_config={"version": 2})\n',
    ],
)
def test_fsdp_of_version_2_is_fsdp2(text: str) -> None:
    bug = imported(head("pytorch/ao", 7, "It fails") + fenced(text)).bug
    assert bug.refused == {} and "how many FSDP2 ranks?" in bug.missing["dp_shard"]


def test_two_values_are_a_question_and_a_flag_wins() -> None:
    yaml, python = fenced("tp_size: 2\ndp_shard: 2", "yaml"), fenced("f(tp_size=4)", "python")
    bug = imported(head("pytorch/ao", 7, "It fails") + yaml + python).bug
    assert bug.missing["tp"] == "which is it: 2 (tp_size = 2) or 4 (tp_size=4)?"
    flag = imported(head("pytorch/ao", 7, "It fails") + yaml + fenced("train.py --tp_size 4"))
    assert flag.bug.missing == {} and case_of(flag).layout.tp == 4
    assert flag.job.ignored == ("tp = 2: tp_size = 2: a flag overrides the configuration",)


def test_what_only_some_commands_say_is_a_question() -> None:
    first = "NGPU=4 ./run_train.sh --compile.enable"
    text = fenced(f"{first}\n{first} --model.converters float8 --float8.enable_fsdp_float8_all_gather")
    bug = imported(text).bug
    assert "fp8_all_gather" in bug.missing["command"] and "fp8_all_gather" not in bug.stated
    with pytest.raises(HarnessError, match=r"which command fails\? .*give one of them alone"):
        configured(text, where="a.md")


def test_one_of_several_configurations_is_asked_for() -> None:
    one = "def {}() -> Trainer.Config:\n    return Trainer.Config(parallelism=ParallelismConfig({}={}))\n"
    text = one.format("small", "tensor_parallel_degree", 2) + one.format("large", "tensor_parallel_degree", 8)
    assert imported(text, "registry.py").bug.missing == {"configuration": "which one was run? Keep it: small, large"}


CASTS = """
config = Float8LinearConfig(
    cast_config_input=CastConfig(scaling_granularity=ScalingGranularity.AXISWISE),
    cast_config_weight=CastConfig(scaling_granularity=ScalingGranularity.TENSORWISE),
    cast_config_grad_output=CastConfig(
        scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e4m3fn
    ),
    cast_config_input_for_grad_weight=CastConfig(scaling_type=ScalingType.DISABLED),
    cast_config_grad_output_for_grad_weight=CastConfig(scaling_type=ScalingType.DISABLED),
    round_scales_to_power_of_2=True,
)
convert_to_float8_training(model, config=config)
"""


def test_configs_of_operands_are_the_nearest_recipe_and_what_differs_from_it() -> None:
    bug = imported(CASTS, "train.py").bug
    assert bug.case is not None and bug.case.float8.recipe == "rowwise" and "cast_config" in bug.stated["casts"]
    assert bug.case.float8.casts == ("go_gw:dis", "i_gw:dis", "w:ten", "w_gi:ten") and "casts" not in bug.missing
    unrounded = imported(CASTS.replace("    round_scales_to_power_of_2=True,\n", ""), "train.py").bug
    assert "round_scales_to_power_of_2 set?" in unrounded.missing["casts"]


@pytest.mark.parametrize("ranks", [10, 11, 12, 18, 24])
def test_fewer_ranks_divide_those_that_were_run(ranks: int) -> None:
    bug = imported(f"fsdp_version: 2\nnum_processes: {ranks}\n", "job.yaml").bug
    assert bug.case is not None and bug.case.world_size <= 8
    assert ranks == 11 or ranks % bug.case.layout.dp_shard == 0
    assert ("no divisor of 11 fits" if ranks == 11 else "which divides it") in bug.derived["dp_shard"]


def test_sizes_are_kept_on_request() -> None:
    command = "NGPU=128 CONFIG_FILE=llama3_70b.toml ./run_train.sh --training.global_batch_size 2048"
    bug = imported(fenced(command), full_size=True).bug
    assert bug.case is not None and bug.case.world_size == 128 and bug.case.model.shape.dim == 8192
    assert bug.full_size == {} and bug.case.train.accumulation == 2048 // 8 // 16


def test_what_a_rule_excludes_is_a_question() -> None:
    bug = imported("recipe_name: rowwise\ndp_shard: 2\nenable_fsdp_float8_all_gather: true\n", "job.yaml").bug
    assert "only supports tensorwise" in bug.missing["fp8_all_gather"] and bug.case is not None
