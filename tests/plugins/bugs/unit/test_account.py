"""Every line of a configuration is used, has no effect, or is not understood: of small ones, and as tools have them.

The table of what configurations of other tools write is sound, without two meanings of a key, and used.
"""

from __future__ import annotations

import contextlib
import datetime
import random
import re
import time
from pathlib import Path
from typing import NamedTuple

import pytest

import harness.plugins.bugs
from harness.errors import HarnessError
from harness.matrix.axes import AXES, SCOPE, checked_value
from harness.matrix.caseid import case_id
from harness.plugins.bugs.draft import SIZES
from harness.plugins.bugs.importing import ImportOptions, Job, read_job
from harness.plugins.bugs.report import read_report
from harness.plugins.bugs.sections import imported_document, imported_sections
from harness.plugins.bugs.spellings import (
    asked_by_call,
    asked_by_option,
    has_no_effect,
    is_toml_of_torchtitan,
    known,
    plain_key,
    subject,
    table,
)
from harness.report.sections import text_of
from tests.plugins.bugs.unit.readers import TODAY, fenced, head, imported

FOLDER = Path(__file__).parent


class Read(NamedTuple):
    """The case, what is asked, and how many lines are used, without effect, and not understood."""

    case: str
    asked: str
    lines: tuple[int, int, int]


PROSE = "recipe dp_shard tp cp run"
INPUTS = {
    "m1.md": Read("fsdp2-bf16-dim.256-v2048-sl64-accum4-b16", "", (8, 0, 0)),
    "m2.md": Read("single-bf16-v2048-gb2-b16", PROSE, (0, 0, 0)),
    "m3.md": Read("fsdp4-tp2-mxfp8_floor-ac.op-graph-kvheads.4-v2048-gb4-b16", "", (6, 0, 0)),
    "m4.md": Read("fsdp4-rowwise-ac.op-kvheads.4-v2048-gb32-accum4-b16", "", (6, 0, 0)),
    "m5.py": Read(
        "fsdp4-tp2-cp2-rowwise-ac.op-dim.256-heads.16-kvheads.16-ffn.768-v2048-gb4-s10-b16",
        "dp_shard compile",
        (13, 3, 0),
    ),
    "p1.yaml": Read("fsdp2-tp2-rowwise-head.fp8-ac.full-graph-v2048-gb4-b16", "dp_shard", (7, 0, 0)),
    "p2.yaml": Read("fsdp2-tp2-rowwise-head.fp8-ac.full-graph-v2048-gb4-b16", "dp_shard", (7, 0, 0)),
    "p3.py": Read("fsdp4-tp2-tensorwise-ac.op-kvheads.4-v2048-s10-b16", "recipe", (11, 4, 0)),
    "p4.py": Read("fsdp4-tp2-tensorwise-ac.op-kvheads.4-v2048-s10-b16", "recipe", (11, 4, 0)),
    "p5.py": Read("fsdp2-rowwise-v2048-gb4-b16", "dp_shard", (5, 1, 0)),
    "p6.md": Read("single-bf16-v2048-gb2-b16", PROSE, (0, 0, 0)),
    "q1.yaml": Read("fsdp2-tp2-nosp-rowwise-graph-kvheads.4-v2048-gb4-b16", "dp_shard", (6, 0, 0)),
    "q2.md": Read("single-bf16-v2048-gb2-b16", PROSE, (0, 0, 0)),
    "q3.yaml": Read(
        "fsdp8-ep8-tensorwise-ag.fp8-head.fp8-ac.layer2-moe8-v2048-gb16-b16", "dp_shard experts", (4, 0, 0)
    ),
}
PUBLIC = {
    "accelerate_fp8.py": Read(
        "fsdp2-tensorwise-ag.fp8-graph-kvheads.4-v2048-gb2-b16",
        "dp_shard fsdp2_plugin.set_mixed_precision()",
        (8, 9, 1),
    ),
    "accelerate_nd.yaml": Read("hsdp2x2-tp2-nosp-tensorwise-ag.fp8-pad-ac.full-graph-v2048-b16", "", (13, 14, 0)),
    "automodel_fp8.yaml": Read(
        "fsdp2-tensorwise-ag.fp8pre-graph-kvheads.4-v2048-gb2-param.b16-b16", "dp_shard accumulation", (18, 14, 0)
    ),
    "axolotl_experts.yaml": Read("fsdp2-ep2-bf16-ac.full-moe8-v2048-gb2-b16", "experts optimizer", (10, 6, 1)),
    "axolotl_fp8.yaml": Read("fsdp2-tensorwise-ag.fp8-ac.full-graph-v2048-gb4-b16", "dp_shard", (11, 20, 0)),
    "axolotl_hsdp_tp.yaml": Read("hsdp2x2-tp2-nosp-bf16-kvheads.4-v2048-gb4-b16", "", (10, 10, 0)),
    "megatron_8b.sh": Read("fsdp4-tp2-bf16-kvheads.4-v2049-gb16-accum4-reduce.b16-b16", "", (22, 8, 0)),
    "primus_fp8.yaml": Read(
        "fsdp2-tensorwise-ag.fp8pre-v2048-gb4-b16",
        "dp_shard modules.pre_trainer.model modules.pre_trainer.overrides.primus_turbo.enable_attention_float8",
        (8, 5, 4),
    ),
    "torchao_mesh.py": Read(
        "fsdp2-tp4-reshard.never-tensorwise-ag.fp8pre-pad-graph-v2049-gb4-b16",
        "convert_to_float8_training.module_filter_fn",
        (15, 3, 1),
    ),
    "torchtitan_405b.toml": Read(
        "fsdp2-atp4-tensorwise-ag.fp8pre-ac.full-graph-kvheads.4-v2048-gb4-b16", "dp_shard", (20, 12, 0)
    ),
    "torchtitan_registry.py": Read(
        "fsdp2-atp4-tensorwise-ac.full-graph-kvheads.4-v2048-gb4-b16", "dp_shard recipe", (11, 19, 0)
    ),
    "torchtune_70b.yaml": Read(
        "fsdp2-tp4-tensorwise-tpstyle.fp8-ac.full-graph-kvheads.4-v2048-gb4-param.b16-b16", "", (12, 13, 0)
    ),
}
ALL = {
    **{f"inputs/{name}": read for name, read in INPUTS.items()},
    **{f"public/{name}": read for name, read in PUBLIC.items()},
}


def text_of_file(file: str) -> str:
    """Of Python code, which is no code of this repository, the file has another name."""
    return (FOLDER / f"{file}.txt" if file.endswith(".py") else FOLDER / file).read_text()


def job_of(text: str, where: str, **asked: object) -> Job:
    return read_job(read_report(text.encode(), where=where), ImportOptions(today=TODAY, **asked))  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ALL)
def test_every_line_is_accounted_for(file: str) -> None:
    text = text_of_file(file)
    job = job_of(text, file)
    assert job.case is not None
    account = job.account
    counts = (len(account.used), len(account.without_effect), len(account.not_understood))
    assert Read(case_id(job.case), " ".join(job.missing), counts) == ALL[file]
    bug = imported(text, file).bug
    assert (bug.case, bug.missing) == (job.case, job.missing), "bug import and new --from are one reader"


@pytest.mark.parametrize("file", [file for file, read in ALL.items() if read.lines[0]])
def test_a_renamed_line_is_named_or_says_nothing_that_others_do_not(file: str) -> None:
    text = text_of_file(file)
    job = job_of(text, file)
    for line in job.account.used:
        name = re.split(r"\W+", line.name.removesuffix("()").removesuffix(".Config"))[-1]
        pattern = re.compile(rf"(?<!\w)(?:{name}|{name.replace('_', '-')})(?!\w)")
        changed = pattern.sub(lambda match: f"{match[0]}x", text)
        assert changed != text or line.name.startswith("mesh."), line.name
        mutated = job_of(changed, file)
        named = [*(other.words for other in mutated.account.not_understood), *mutated.missing.values()]
        if not any(re.search(rf"(?:{name}|{name.replace('_', '-')})x", words) for words in named):
            assert (mutated.case, [*mutated.stated], mutated.missing) == (job.case, [*job.stated], job.missing), line


def test_the_account_is_printed_and_in_the_document() -> None:
    bug = imported(
        "parallelism:\n  tensor_parallel_degree: 2\n  rings: 3\nmetrics:\n  log_freq: 1\nnotes: x\n", "job.yaml"
    )
    printed = text_of(imported_sections(bug, file=None))
    assert "4 lines of configurations: 1 used, 1 without effect, 2 not understood" in printed
    assert "not understood\n  parallelism.rings = 3\n  notes = x\n" in printed
    account = imported_document(bug, file=None)["lines"]
    assert account == bug.job.account
    assert list(bug.bug.missing) == ["dp_shard", "parallelism.rings"]
    assert bug.job.account.without_effect[0].why.startswith("saving, logging")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: 1\nb\n  tensor_parallel_degree: 2\n", "job.yaml"),
        ("[parallelism]\ntensor_parallel_degree = two\n", "job.toml"),
        ("tensor_parallel_degree = 2\nf(", "job.py"),
    ],
)
def test_lines_of_what_cannot_be_parsed_are_not_used(text: str, where: str) -> None:
    job = job_of(text, where)
    assert job.account.used == () and any("tensor_parallel_degree" in words for words in job.missing)


@pytest.mark.parametrize(
    "value", ["${TP:2}", "auto", "two", "null"], ids=["a variable", "another word", "a number in words", "nothing"]
)
def test_a_value_that_is_not_understood_is_a_question(value: str) -> None:
    job = job_of(f"tp_size: {value}\ndp_shard: 2\n", "job.yaml")
    assert ("tp_size" in job.missing) == (value != "null")
    assert "tp" not in job.stated


BIG = {
    "prose": "It diverges with TP=2 and rowwise scaling, at step 80, not with FSDP. " * 8_500,
    "log": fenced("[rank0]: step: 12 loss: 3.1 RuntimeError: at /home/ann/x.py --flag 7\n" * 9_000),
    "yaml": fenced("parallelism:\n" + "  tensor_parallel_degree: 2\n" * 22_000, "yaml"),
    "python": fenced("config.parallelism = ParallelismConfig(tensor_parallel_degree=2)\n" * 9_000, "python"),
    "flags": fenced("torchrun train.py --parallelism.tensor_parallel_degree 2 --compile.enable\n" * 8_000),
    "blocks": (fenced("torchrun train.py --tp_size 2") + "words\n") * 12_000,
}


BY_NIGHT = {"python", "flags", "blocks"}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.sweep] * (kind in BY_NIGHT)) for kind in BIG])
def test_the_time_of_a_report_grows_with_its_length(kind: str) -> None:
    def seconds(size: int) -> float:
        start = time.process_time()
        imported((head("pytorch/ao", 1, "a crash") + BIG[kind])[:size])
        return time.process_time() - start

    seconds(10_000)  # imports, and what is computed once
    assert seconds(620_000) < 25 * seconds(62_000), "ten times the text takes more than ten times the time, by far"


@pytest.mark.parametrize("seed", range(20))
def test_damaged_configurations_end_in_a_case_or_an_error_of_ours(seed: int) -> None:
    draw = random.Random(seed)
    file = draw.choice(list(ALL))
    text = list(text_of_file(file))
    for where in (file, "report.md", "x.yaml", "x.py", "x.sh", "stdin"):
        for _ in range(4):
            at, length = draw.randrange(len(text)), draw.choice((0, 1, 1, 40))
            text[at : at + length] = draw.choice(["", "\n", ":", "=", "[", '"', "'", "$", "#", *text[at : at + 30]])
        with contextlib.suppress(HarnessError):
            imported("".join(text), where)


DAY = datetime.date(2026, 11, 28)
PLUGIN_FOLDER = Path(next(iter(harness.plugins.bugs.__path__)))
ROWS = [(fact, row) for fact, rows in table()["fact"].items() for row in rows]
TOOLS = {
    "torchtitan", "torchao", "torch", "accelerate", "transformers", "axolotl", "automodel", "megatron", "torchtune"
}  # fmt: skip
FIELDS = {"kind", "values", "silent", "since", "until"}


def keys_of(row: dict[str, object]) -> list[str]:
    return [key for name, keys in row.items() if name not in FIELDS for key in str(keys).split()]


def test_a_row_has_tools_and_values_that_a_case_can_have() -> None:
    for fact, row in ROWS:
        assert row.keys() - FIELDS <= TOOLS | {"deepspeed", "other"}, fact
        assert (fact in AXES) != ("kind" in row), fact
        for value in row.get("values", {}).values():
            if fact in AXES and (fact, value) != ("checkpointing", "selective"):
                assert checked_value(fact, value) == value


def test_every_fact_is_read() -> None:
    source = "".join((PLUGIN_FOLDER / f"{name}.py").read_text() for name in ("draft", "fitting", "reading"))
    listed = {*SIZES, "pp", "dp_replicate", "dp_shard", "seq_len"}  # taken by their lists
    assert {fact for fact in table()["fact"] if f'"{fact}"' not in source} <= listed


def test_a_key_has_one_meaning() -> None:
    """Of a key, each fact is stated by one row at a time, and what has no effect states nothing."""
    windows: dict[tuple[str, str], list[tuple[object, object]]] = {}
    for fact, row in ROWS:
        window = (row.get("since", datetime.date.min), row.get("until", datetime.date.max))
        for key in keys_of(row):
            others = windows.setdefault((fact, key), [])
            assert not any(window[0] < until and since < window[1] for since, until in others), f"{key}: {fact}"
            others.append(window)
    stated = {key for _, key in windows}
    idle = [key for row in table()["without_effect"] for key in row.get("keys", "").split()]
    assert not stated & {*idle} and len(idle) == len(set(idle))


@pytest.mark.parametrize("kind", ["fact", "without_effect"])
def test_a_key_is_found_under_any_parents(kind: str) -> None:
    rows = [row for _, row in ROWS] if kind == "fact" else table()[kind]
    for row in rows:
        keys = keys_of(row) if kind == "fact" else row.get("keys", "").split()
        for key in keys:
            name, day = key.partition("=")[0] or key.removeprefix("="), row.get("since", DAY)
            parents = "" if key.startswith(("=", "$")) else "x.y."
            found = known(f"{parents}{plain_key(name)}", min(day, row.get("until", DAY) - datetime.timedelta(1)))
            assert found.length >= name.removesuffix("()").count(".") + 1 or "=" in key, key


def test_refusals_name_what_is_out_of_scope() -> None:
    names = {feature.name for feature in SCOPE}
    assert {row["feature"] for row in table()["refused"]} <= names
    assert asked_by_option(("fsdp_config.fsdp_version",), 1) is not None
    assert asked_by_option(("fsdp_config.fsdp_version",), 2) is None
    assert asked_by_call("torch.distributed.fsdp.FullyShardedDataParallel") is not None
    assert asked_by_call("fully_shard") is None


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("model.fp8_mode", "precision"),
        ("ring_parallel_size", "parallelism"),
        ("RingParallelConfig", "parallelism"),
        ("use_cuda_graph", "compilation"),
        ("dynamicBatching", "batch"),
        ("padded_vocab", "vocabulary"),
        ("selective_recompute_modules", "checkpointing"),
        ("ulysses.sp", "parallelism"),
        ("logging_steps", ""),
        ("checkpoint.interval", ""),
    ],
)
def test_what_a_name_is_about(name: str, about: str) -> None:
    assert subject(name) == about


def test_only_the_value_without_effect_has_none() -> None:
    offload, recipe = "fsdp_config.offload_params", "a.quantize.linear.float8.recipe_name"
    assert has_no_effect(offload, "false") and not has_no_effect(offload, "true")
    assert is_toml_of_torchtitan(recipe) and not is_toml_of_torchtitan("fp8.recipe_name")


def test_a_section_covers_nothing_that_matters_unless_it_is_apart() -> None:
    assert known("validation.dataloader.batch_size", DAY).why and known("metrics.fp8_stats", DAY).why
    assert known("data.prompt_key", DAY).why and not known("data.packed_batches_per_rank", DAY).why
    assert known("data.micro_batch_size", DAY).spellings
