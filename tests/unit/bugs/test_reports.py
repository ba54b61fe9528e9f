"""Reports in the styles that users write become cases: what is stated, derived, assumed, missing and refused."""

from __future__ import annotations

import datetime
from typing import NamedTuple

import pytest

from harness.bugs.importing import ImportedBug, ImportOptions, import_report
from harness.bugs.report import read_report
from harness.matrix.caseid import case_id
from tests.unit.bugs.test_configurations import ACCELERATE as CONFIGURATION

TODAY = datetime.date(2026, 11, 22)


def imported(text: str, **asked: object) -> ImportedBug:
    return import_report(read_report(text.encode(), where="report.md"), ImportOptions(today=TODAY, **asked))  # type: ignore[arg-type]


class Expected(NamedTuple):
    """What is found: the id of the case, symptom, and the keys of the four lists that a reader looks for."""

    id: str
    case: str
    symptom: str
    stated: str
    derived: str = ""
    missing: str = ""


def head(repository: str, number: int, day: str, title: str) -> str:
    return f"{repository} · issue #{number} · open\n# {title}\n\nsomebody · description · {day}\n"


CASTS = (
    head("pytorch/ao", 99, "2025-11-02", "Float8 training with e4m3 gradients")
    + """
```python
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
```
"""
)
LOGGED_CASTS = (
    head("pytorch/ao", 98, "2025-11-02", "Float8 training with e4m3 gradients")
    + "\nIt prints `Float8Linear(cast_configs=i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e4m3)`.\n"
)


def casts_of(text: str) -> tuple[str, tuple[str, ...], bool]:
    bug = imported(text).bug
    assert bug.case is not None
    assert "cast_config" in bug.stated["casts"]
    return bug.case.float8.recipe, bug.case.float8.casts, "casts" in bug.missing


def test_configs_of_operands_are_the_nearest_recipe_and_what_differs_from_it() -> None:
    casts = ("go_gw:dis", "i_gw:dis", "w:ten", "w_gi:ten")
    assert casts_of(CASTS) == ("rowwise", casts, False)
    assert casts_of(CASTS.replace("    round_scales_to_power_of_2=True,\n", "")) == ("rowwise", casts, True)
    assert casts_of(LOGGED_CASTS) == ("tensorwise", ("go:e4m3",), False)


def test_configs_that_a_recipe_has_are_its_name() -> None:
    bug = imported(LOGGED_CASTS.replace("go:dyn_ten_e4m3", "go:dyn_ten_e5m2")).bug
    assert bug.case is not None
    assert (bug.case.float8.recipe, bug.case.float8.casts) == ("tensorwise", ())
    assert "casts" not in bug.stated


VOCABULARY = (
    head("pytorch/torchtitan", 461, "2024-07-16", "fp8 does not fit the vocabulary")
    + """
A converted output needs shapes divisible by 16. Run
`CONFIG_FILE="./debug_model.toml" NGPU=4 ./run_llama_train.sh --training.tensor_parallel_degree 2`, which prints
`ModelArgs(dim=256, n_layers=8, n_heads=16, n_kv_heads=None, vocab_size=2256`.
"""
)
LEADING_DIMS = (
    head("pytorch/torchtitan", 864, "2025-02-20", "asyncTP + Float8 row fails with 'full' AC")
    + """
No problem without it: it is not an issue using no checkpointing.
~~~
[rank5]: ValueError: leading dims differ (A shape: torch.Size([5, 8192, 4096]), A_scale shape: torch.Size([40960, 1]))
~~~
### Versions
Ran at 256 scale, TP=2 + FP8 rowwise
"""
)
NAN_STEPS = (
    head("pytorch/torchtitan", 865, "2025-02-20", "Float8 rowwise with vanilla TP: NaN after 80 iters")
    + """
We trained at 256 scale with full AC, TP=2. As a control, BF16 did not encounter it.

other · comment · 2025-02-21
I did not repro it with TP=4.
"""
)
ASYNC = (
    head("pytorch/torchtitan", 845, "2025-02-14", "float8 rowwise + async TP raises in backward")
    + """
```bash
NGPU=4 CONFIG_FILE="./train_configs/debug_model.toml" ./run_llama_train.sh --training.compile \\
  --float8.enable_float8_linear --experimental.enable_async_tensor_parallel --training.tensor_parallel_degree 2 \\
  --float8.recipe_name all_axiswise
```
```
  File "/home/me/ao/float8_linear.py", line 172, in backward
RuntimeError: got mixed torch.Tensor and DTensor
```
"""
)
LIST_OF_RUNS = (
    head("pytorch/torchtitan", 1185, "2025-05-13", "issues of compile + async TP + AC")
    + """
on 8 GPUs, DP2 TP4, debug model
1. compile + selective op AC + async TP: got a failure. **Note**: DP4 TP2 works.
2. compile + full AC + async TP: very slow
"""
)
NAN_LLAMA = (
    head("pytorch/torchtitan", 1191, "2025-05-14", "NaN loss with rowwise FP8")
    + """
Seen on 8x H100:
```
CONFIG_FILE="./models/llama3/train_configs/llama3_8b.toml" ./run_train.sh --training.batch_size=2 --training.compile \\
  --model.converters="float8" --float8.recipe_name rowwise
```
step: 12 loss: nan
"""
)
FILTERED = (
    head("pytorch/torchtitan", 1344, "2025-06-30", "loss is wrong with HSDP")
    + """
```toml
[model]
converters = ["float8"]
[float8]
filter_fqns = ["attention.wk", "output"]
enable_fsdp_float8_all_gather = true
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 2
[activation_checkpoint]
mode = "none"
```
"""
)
LISTED = (
    head("pytorch/torchtitan", 653, "2025-06-26", "a hang with float8")
    + """
`CONFIG_FILE="./llama3_8b.toml" ./run_train.sh --model.converters="float8"`, with these changes of the file:
- data_parallel_shard_degree = 4 (of a node with 8 GPUs)
* activation_checkpoint.mode = "full"
- metrics.log_freq: every 10 steps, for TP = 2 as well
"""
)
EMPTY_SHARDS = (
    head("pytorch/ao", 1938, "2025-03-24", "FSDP2 fails with fewer features than GPUs")
    + """
```python
model = nn.Sequential(nn.Linear(64, 16, bias=False)).cuda()
config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
convert_to_float8_training(model, config=config)
fully_shard(model)
```
"""
)
UNEVEN = (
    head("pytorch/ao", 3982, "2026-03-03", "float8 + FSDP2: crash on uneven shards")
    + """
```python
model = nn.Sequential(nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)).bfloat16()
convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
fully_shard(model)
```
Passes with world_size=4, crashes with world_size=3: `RuntimeError: setStorage: sizes [4096, 1024] out of bounds`
"""
)
RECIPE_CALL = (
    head("pytorch/ao", 1086, "2024-10-15", "loss of float8 differs under TP")
    + """
I use `Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")`, TP degree 2, on 2 GPUs. Wrong from step 3.
"""
)
UNNAMED = (
    head("pytorch/ao", 1411, "2024-12-12", "float8 training is slow with fsdp2")
    + """
8xH100, FSDP2, convert_to_float8_training(model), torch.compile.
"""
)
ACCELERATE = (
    head("huggingface/accelerate", 3830, "2025-11-03", "torchao fp8 fails with a config file")
    + """
```Shell
- Platform: Linux-5.15
- Python version: 3.10.14
- PyTorch version: 2.8.0+cu128
- System RAM: 2267.29 GB
```
where the file is
```"""
    + CONFIGURATION.replace("  enable_fsdp_float8_all_gather: true\n", "").replace("processes: 4", "processes: 8")
    + "```\n"
)
OLMO = (
    head("allenai/OLMo-core", 168, "2025-02-19", "float8 makes things crash: two mesh dims")
    + """
OLMo2-1B with `float8_config`, HSDP 2x4. `RuntimeError: Found the DeviceMesh have 2 dimensions`
"""
)
NOT_FUSED = (
    head("pytorch/pytorch", 149990, "2025-03-25", "[Async TP] not fusing with rowwise scales")
    + """
Llama3 70b on 128 H100s with full AC, using FSDP=16, TP=8
- float8 tensorwise (vanilla TP): 820 TPS
- float8 rowwise (vanilla TP): 540 TPS
"""
)

RUNNABLE = {
    VOCABULARY: Expected(
        "torchtitan-461",
        "fsdp2-tp2-tensorwise-tpstyle.fp8-head.fp8-ac.layer2-dim.256-heads.16-kvheads.16-ffn.768-v2256-gb4-b16",
        "crash",
        "tp vocab_size dim",
        "dp_shard layers seq_len",
    ),
    LEADING_DIMS: Expected(
        "torchtitan-864",
        "fsdp4-atp2-rowwise-ac.full-graph-v2048-b16",
        "crash",
        "tp async_tp recipe checkpointing",
        "dp_shard seq_len global_batch",
    ),
    NAN_STEPS: Expected("torchtitan-865", "fsdp4-tp2-rowwise-ac.full-v2048-b16", "nan", "tp recipe", "dp_shard"),
    ASYNC: Expected(
        "torchtitan-845",
        "fsdp2-atp2-rowwise-ac.layer2-graph-dim.256-heads.16-kvheads.16-ffn.768-v2256-gb4-b16",
        "crash",
        "tp async_tp recipe compile",
        "dp_shard",
    ),
    LIST_OF_RUNS: Expected(
        "torchtitan-1185",
        "fsdp2-atp4-bf16-ac.op-graph-dim.256-heads.16-kvheads.16-ffn.768-v2256-gb4-b16",
        "unknown",
        "tp async_tp compile",
        "dp_shard dim",
        "checkpointing",
    ),
    NAN_LLAMA: Expected(
        "torchtitan-1191",
        "fsdp8-rowwise-ac.op-graph-kvheads.4-v2048-gb16-s12-b16",
        "nan",
        "recipe compile global_batch",
        "dp_shard steps dim",
    ),
    FILTERED: Expected(
        "torchtitan-1344",
        "hsdp2x2-tensorwise-ag.fp8-filter.attention.wk-v2048-b16",
        "wrong_numbers",
        "dp_shard dp_replicate filter_fqns fp8_all_gather",
    ),
    LISTED: Expected(
        "torchtitan-653",
        "fsdp4-tp2-tensorwise-tpstyle.fp8-ac.full-kvheads.4-v2048-gb4-b16",
        "hang",
        "tp dp_shard checkpointing",
    ),
    EMPTY_SHARDS: Expected(
        "ao-1938", "fsdp2-tensorwise-ag.fp8-dim.64-ffn.16-v2048-gb4-b16", "crash", "fp8_all_gather", "dim", "dp_shard"
    ),
    UNEVEN: Expected(
        "ao-3982", "fsdp3-tensorwise-ag.fp8-v2048-gb6-b16", "crash", "fp8_all_gather", "dp_shard dim ffn_dim"
    ),
    RECIPE_CALL: Expected("ao-1086", "tp2-rowwise_with_gw_hp-v2048-gb2-b16", "wrong_numbers", "recipe tp"),
    UNNAMED: Expected("ao-1411", "fsdp8-tensorwise-graph-v2048-gb16-b16", "slow", "compile", "dp_shard"),
    ACCELERATE: Expected(
        "accelerate-3830", "fsdp8-tensorwise-ac.full-v2048-gb16-b16", "crash", "checkpointing", "dp_shard"
    ),
    OLMO: Expected("olmo-core-168", "hsdp2x4-tensorwise-v2048-gb16-b16", "crash", "dp_replicate dp_shard", "model"),
    NOT_FUSED: Expected(
        "pytorch-149990",
        "fsdp2-atp4-rowwise-ac.full-graph-kvheads.4-v2048-gb4-b16",
        "slow",
        "tp dp_shard async_tp recipe checkpointing",
        "tp dp_shard dim heads",
    ),
}


@pytest.mark.parametrize(("text", "expected"), RUNNABLE.items(), ids=[expected.id for expected in RUNNABLE.values()])
def test_a_report_becomes_a_case(text: str, expected: Expected) -> None:
    imported_bug = imported(text)
    assert imported_bug.bug.case is not None
    seen = Expected(
        imported_bug.bug.id,
        case_id(imported_bug.bug.case),
        imported_bug.bug.bug.symptom,
        " ".join(name for name in expected.stated.split() if name in imported_bug.bug.stated),
        " ".join(name for name in expected.derived.split() if name in imported_bug.bug.derived),
        " ".join(imported_bug.bug.missing),
    )
    assert seen == expected
    assert imported_bug.bug.bug.status == "open" and imported_bug.bug.refused == {}


def test_words_arithmetic_and_dates_are_kept() -> None:
    bug = imported(LEADING_DIMS).bug
    assert "shapes [5, 8192, 4096] and [40960, 1]: 5 x 8192 = 40960: sequence 8192" in bug.derived["seq_len"]
    assert bug.stated["tp"] == "Ran at 256 scale, TP=2 + FP8 rowwise"
    assert bug.bug.message.startswith("ValueError: leading dims differ") and bug.full_size["dp_shard"] == 128
    assert bug.bug.reported == datetime.date(2025, 2, 20)
    assert "until 2024-07-19" in imported(VOCABULARY).bug.assumed["output_layer"]
    assert imported(NAN_LLAMA).bug.bug.first_bad_step == 12
    assert imported(ACCELERATE).bug.bug.versions["torch"] == "2.8.0+cu128"


def test_what_works_is_no_statement() -> None:
    assert any("DP4 TP2 works" in words for words in imported(LIST_OF_RUNS).ignored)
    assert imported(NAN_STEPS).bug.missing == {}


REFUSED = {
    head("pytorch/torchtitan", 3817, "2026-07-06", "TP + MXFP4 crashes: mat2 must be col_major"): (
        "MX formats other than MXFP8"
    ),
    head("pytorch/torchtitan", 651, "2024-10-29", "loading a float8 checkpoint fails"): "checkpoint save and load",
    head("pytorch/ao", 643, "2024-08-09", "Float8Linear does not work")
    + "```python\nconvert_to_float8_training(m)\nwith torch.inference_mode():\n    m(x)\n```": "inference",
    head("pytorch/ao", 1605, "2025-01-23", "an attribute is missing")
    + "```python\nc = CastConfig(scaling_type=ScalingType.DELAYED)\nm = FSDP(m)\n```": "delayed scaling|FSDP1",
    head("huggingface/accelerate", 3710, "2025-08-05", "FSDP2 FP8 gives other results")
    + "```\nfp8_config:\n  backend: TE\nmixed_precision: fp8\n```": "TransformerEngine",
}


@pytest.mark.parametrize(("text", "names"), REFUSED.items(), ids=list(REFUSED.values()))
def test_what_no_case_has_is_refused_by_name(text: str, names: str) -> None:
    bug = imported(text).bug
    assert bug.bug.status == "refused" and bug.case is None
    assert sorted(bug.refused) == sorted(names.split("|"))
    assert all(words.endswith(")") for words in bug.refused.values())
    assert bug.bug.title and bug.bug.link.startswith("https://github.com/")


@pytest.mark.parametrize(
    "text",
    [
        "```\ntransformer_engine==1.2\ndeepspeed==0.14\ntorch==2.8.0\n```",
        "`--parallelism.pipeline_parallel_degree 1 --parallelism.context_parallel_degree 1`",
        "It fails without PP. The same may hold for other types like MXFP8.",
    ],
)
def test_a_word_alone_refuses_nothing(text: str) -> None:
    assert imported(head("pytorch/ao", 1, "2025-01-01", "float8 crash") + text).bug.refused == {}


def test_a_contradiction_is_a_question_with_both_words() -> None:
    text = head("pytorch/ao", 1, "2025-01-01", "float8 crash") + "I use TP=4: `train.py --tensor_parallel_degree 2`"
    assert imported(text).bug.missing == {"tp": "which is it: 2 (--tensor_parallel_degree 2) or 4 (I use TP=4:)?"}


@pytest.mark.parametrize(("day", "recipe"), [("2026-04-26", "tensorwise"), ("2026-04-27", "rowwise")])
def test_the_day_decides_what_an_unnamed_recipe_is(day: str, recipe: str) -> None:
    text = head("pytorch/torchtitan", 7, "2026-05-01", "float8 crash") + "FSDP=2"
    bug = imported(text, day=datetime.date.fromisoformat(day)).bug
    assert bug.case is not None and bug.case.float8.recipe == recipe


def test_what_a_rule_excludes_is_a_question() -> None:
    text = head("pytorch/ao", 1, "2025-01-01", "crash") + "rowwise, FSDP=2, enable_fsdp_float8_all_gather=True"
    bug = imported(text).bug
    assert "only supports tensorwise" in bug.missing["fp8_all_gather"] and bug.case is not None


def test_sizes_are_kept_on_request() -> None:
    bug = imported(NOT_FUSED, full_size=True).bug
    assert bug.case is not None and bug.case.world_size == 128 and bug.case.model.shape.dim == 8192
    assert bug.full_size == {}
