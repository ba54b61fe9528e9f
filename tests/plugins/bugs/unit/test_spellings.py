"""The table of what configurations of other tools write: sound, without two meanings of a key, and used."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

import harness.plugins.bugs
from harness.matrix.axes import AXES, SCOPE, checked_value
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

DAY = datetime.date(2026, 11, 28)
FOLDER = Path(next(iter(harness.plugins.bugs.__path__)))
ROWS = [(fact, row) for fact, rows in table()["fact"].items() for row in rows]
TOOLS = {
    "torchtitan",
    "torchao",
    "torch",
    "accelerate",
    "transformers",
    "axolotl",
    "automodel",
    "megatron",
    "torchtune",
}
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
    source = "".join((FOLDER / f"{name}.py").read_text() for name in ("draft", "fitting", "reading"))
    sizes = {
        "layers",
        "heads",
        "kv_heads",
        "ffn_dim",
        "dim",
        "vocab_size",
        "pp",
        "dp_replicate",
    }  # taken by their lists
    assert {fact for fact in table()["fact"] if f'"{fact}"' not in source} <= sizes | {"dp_shard", "seq_len"}


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
    assert has_no_effect("fsdp_config.offload_params", "false") and not has_no_effect(
        "fsdp_config.offload_params", "true"
    )
    assert is_toml_of_torchtitan("a.quantize.linear.float8.recipe_name") and not is_toml_of_torchtitan(
        "fp8.recipe_name"
    )


def test_a_section_covers_nothing_that_matters_unless_it_is_apart() -> None:
    assert known("validation.dataloader.batch_size", DAY).why and known("metrics.fp8_stats", DAY).why
    assert known("data.prompt_key", DAY).why and not known("data.packed_batches_per_rank", DAY).why
    assert known("data.micro_batch_size", DAY).spellings
