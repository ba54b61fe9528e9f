"""Reports: fences are read, prose is not; title, link and what tools print are kept, secrets and folders are not."""

from __future__ import annotations

import datetime
import time

import pytest

from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.matrix.caseid import case_id
from harness.plugins.bugs.bugfile import read_bug_file, write_bug_file
from harness.plugins.bugs.report import MAX_BYTES, clean_words
from harness.plugins.bugs.sections import imported_document, imported_sections
from harness.report.sections import text_of
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
        (COMMAND, "bash", "fsdp2-atp2-rowwise-ac.layer2-graph-dim.256-heads.16-kvheads.16-ffn.768-v2048-gb4-b16", ""),
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
    bug = imported(report).bug
    assert bug.bug.message == "RuntimeError: got mixed torch.Tensor and DTensor"
    assert (bug.bug.symptom, bug.bug.first_bad_step) == ("nan", 12)
    assert bug.bug.versions == {"torchao": "0.12.0", "torch": "2.8.0+cu128"}
    assert bug.bug.reported is None and bug.bug.hardware == "2 x H100 80GB HBM3"
    assert case_of(imported(report)).checkpointing.mode == "full" and case_of(imported(report)).train.steps == 12
    text = head("pytorch/ao", 7, "It hangs, then NaN")  # the symptom is what a log shows
    assert imported(text).bug.bug.symptom == "unknown"
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
    "torchrun t.py --recipe_name groupwise": "group-wise scaling",
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


JOB_TOML = """
[model]
flavor = "8B"
converters = ["quantize.linear.float8"]
[parallelism]
tensor_parallel_degree = 2
data_parallel_shard_degree = 4
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]
[activation_checkpoint]
mode = "full"
"""
PYTHON = """
def ours() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        model_converters=ModelConverters.Config(converters=[Float8LinearConverter.Config(recipe_name="rowwise")]),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=2),
        activation_checkpoint=FullAC.Config(),
        compile=CompileConfig(enable=True),
    )
"""
YAML = """
base_model: meta-llama/Llama-3.1-8B
fp8: true
fp8_enable_fsdp_float8_all_gather: true
gradient_checkpointing: true
micro_batch_size: 2
sequence_len: 4096
fsdp_version: 2
num_processes: 2
"""
JSON = '{"distributed": {"tp_size": 2, "strategy": "fsdp2"}, "fp8": {"enabled": true}, "step_scheduler": null}'
FLAGS = "torchrun --nproc_per_node=8 -m torchtitan.train --parallelism.tensor-parallel-degree=4 --compile.no-enable"


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        (JOB_TOML, "8b.toml", "fsdp4-tp2-tensorwise-ag.fp8-ac.full-kvheads.4-v2048-b16"),
        (PYTHON, "config.py", "fsdp2-tp2-rowwise-head.fp8-ac.full-graph-kvheads.4-v2048-gb4-b16"),
        (YAML, "axolotl.yaml", "fsdp2-tensorwise-ag.fp8-ac.full-kvheads.4-v2048-gb4-b16"),
        (FLAGS, "command.txt", "fsdp2-tp4-bf16-ac.op-v2048-gb4-b16"),
        (JSON, "job.json", "fsdp2-tp2-nosp-tensorwise-v2048-gb4-b16"),
    ],
)
def test_configurations_are_read(text: str, where: str, expected: str) -> None:
    assert case_id(case_of(imported(text, where))) == expected
    assert imported(text, where).bug.bug.title == f"the job of {where}"


def test_the_reduce_dtype_is_an_axis_and_clipping_is_told() -> None:
    flags = "--parallelism.data_parallel_shard_degree 2 --training.mixed_precision_reduce bfloat16"
    imported_bug = imported(f"{flags} --training.max_norm 0.5", "flags")
    assert imported_bug.bug.case is not None and imported_bug.bug.case.train.reduce_dtype == "bfloat16"
    assert imported_bug.bug.missing == {} and any("clipping" in words for words in imported_bug.job.ignored)


def test_microbatches_are_an_axis_and_have_the_batch_of_the_job() -> None:
    flags = "--parallelism.data_parallel_shard_degree 2 --gradient_accumulation_steps 4 --micro_batch_size 3"
    train = case_of(imported(flags, "flags")).train
    assert (train.accumulation, train.global_batch) == (4, 24)
    compiled = imported(f"{flags} --compile.enable", "flags")
    assert case_of(compiled).train.accumulation == 1
    assert "compiled blocks train whole batches" in compiled.bug.missing["accumulation"]


def test_toml_is_of_a_torchtitan_that_had_it_whatever_the_day_of_the_report() -> None:
    dated = f"# a crash\nopened on Oct 3, 2026\n{fenced(JOB_TOML, 'toml')}"
    for text, where in ((JOB_TOML, "8b.toml"), (dated, "report.md")):
        assert imported(text, where).job.era.day == datetime.date(2026, 2, 22)
    assert imported(PYTHON, "a.py").job.era.day == datetime.date(2026, 11, 28)
    assert imported(JOB_TOML, "8b.toml", day=datetime.date(2025, 1, 1)).job.era.day == datetime.date(2025, 1, 1)


SECRETS = """# float8 crash on TP=2 by ann@example.com HF_TOKEN=hf_abcdefghijklmnop
```
MY_HOST=0123456789abcdef0123456789abcdef01234567
export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567
HF_TOKEN="hf_qrstuvwxyz0" torchrun /home/ann/private/t.py --tensor_parallel_degree 2 --float8.recipe_name rowwise
ValueError: cannot read /home/ann/private/model.bin with token: ghp_0123456789abcdefghijkl \x1b[31mred\x1b[0m\x07 %s {0}
```
"""


def test_secrets_folders_and_escapes_never_leave_a_report() -> None:
    imported_bug = imported(SECRETS)
    printed = text_of(imported_sections(imported_bug, file=None))
    shown = write_bug_file(imported_bug.bug) + printed + to_json(imported_document(imported_bug, file=None)).decode()
    for secret in ("hf_", "ghp_", "0123456789abcdef", "/home", "ann@", "WANDB", "HF_TOKEN", "\x1b", "\x07"):
        assert secret not in shown, secret
    assert imported_bug.bug.stated["tp"] == "--tensor_parallel_degree 2"
    assert clean_words("FSDP=16, TP=8 and MY_KEY=abc") == "FSDP=16, TP=8 and …", "words of a mesh are no assignment"
    assert "model.bin" in imported_bug.bug.bug.message
    assert [line.words for line in imported_bug.job.account.not_understood] == ["MY_HOST=…"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x" * (MAX_BYTES + 1), "is no report"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a\x00b", "zero bytes"),
        (b" \n", "there is no text"),
    ],
)
def test_what_is_no_report_is_told(content: bytes, message: str) -> None:
    with pytest.raises(HarnessError, match=message) as raised:
        imported(content)
    assert raised.value.fix


def test_a_report_without_name_asks_for_one() -> None:
    with pytest.raises(HarnessError, match="which report it is") as raised:
        imported("float8 crash", id="")
    assert "--link" in str(raised.value.fix)
    for name in ("../../x", "A b", "x" * 200):
        with pytest.raises(HarnessError, match="not an id"):
            imported("float8 crash", id=name)
    assert imported("crash", id="", link="https://github.com/pytorch/ao/issues/12").bug.id == "ao-12"


HOSTILE = {
    "brackets": "```toml\na = " + "[" * 50_000,
    "python": "```python\n" + "(" * 50_000 + "\n```",
    "chain": "```python\nx" + ".f()" * 3_000 + "\n```",
    "product": "```python\nf(" + "9 * " * 3_000 + "9)\n```",
    "numbers": "```python\nx = " + "9" * 50_000 + "\n```",
    "bomb": "```yaml\na0: &a0 [x, {k: v}]\n"
    + "".join(f"a{at}: &a{at} [*a{at - 1}, *a{at - 1}, {{k: *a{at - 1}}}]\n" for at in range(1, 200))
    + "```",
    "flags": "--a.b " * 50_000,
    "degrees": "TP=2 FSDP=3 " * 30_000,
    "newlines": "\n" * 300_000 + "x",
    "spaces": "x" + " " * 300_000,
    "indents": "".join(" " * (depth % 900) + "k:\n" for depth in range(1000)),
    "fences": "```\n" * 7_000,
    "escapes": "\x1b]" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_takes_bounded_time(name: str) -> None:
    start = time.monotonic()
    imported_bug = imported("# crash\n" + HOSTILE[name])
    assert time.monotonic() - start < 10
    assert len(write_bug_file(imported_bug.bug)) < 20_000


def test_a_bug_file_reads_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    flags = "NGPU=256 run_train.sh --float8.recipe_name rowwise --tp 2 --activation_checkpoint.mode full"
    imported_bug = imported(f'# float8 crash\nIt said: "no".\n{fenced(flags)}Twice.\n')
    path = tmp_path / "bugs" / "x.toml"
    path.parent.mkdir()
    path.write_text(write_bug_file(imported_bug.bug))
    assert read_bug_file(path).case == imported_bug.bug.case
    assert read_bug_file(path).full_size == imported_bug.bug.full_size
    assert read_bug_file(path).bug == imported_bug.bug.bug and imported_bug.bug.bug.report == 'It said: "no".\nTwice.'
