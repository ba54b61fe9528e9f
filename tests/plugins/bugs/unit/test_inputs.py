"""What a report may be written in, and what never leaves it: secrets, folders, control characters."""

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
from tests.plugins.bugs.unit.readers import case_of, fenced, imported

TOML = """
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
        (TOML, "8b.toml", "fsdp4-tp2-tensorwise-ag.fp8-ac.full-kvheads.4-v2048-b16"),
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
    dated = f"# a crash\nopened on Oct 3, 2026\n{fenced(TOML, 'toml')}"
    for text, where in ((TOML, "8b.toml"), (dated, "report.md")):
        assert imported(text, where).job.era.day == datetime.date(2026, 2, 22)
    assert imported(PYTHON, "a.py").job.era.day == datetime.date(2026, 11, 28)
    assert imported(TOML, "8b.toml", day=datetime.date(2025, 1, 1)).job.era.day == datetime.date(2025, 1, 1)


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
    printed = (
        text_of(imported_sections(imported_bug, file=None))
        + to_json(imported_document(imported_bug, file=None)).decode()
    )
    shown = write_bug_file(imported_bug.bug) + printed
    for secret in ("hf_", "ghp_", "0123456789abcdef", "/home", "ann@", "WANDB", "HF_TOKEN", "\x1b", "\x07"):
        assert secret not in shown, secret
    assert imported_bug.bug.stated["tp"] == "--tensor_parallel_degree 2"
    assert "model.bin" in imported_bug.bug.bug.message
    assert [line.words for line in imported_bug.job.account.not_understood] == ["MY_HOST=…"]


def test_words_of_a_mesh_are_no_assignment() -> None:
    assert clean_words("FSDP=16, TP=8 and MY_KEY=abc") == "FSDP=16, TP=8 and …"


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
