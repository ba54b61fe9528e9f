"""`fp8-harness handoff` as its users run it: exit codes, JSON, help, the library, and three public reports replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.plugins.handoff.formats import FORMATS
from tests.acceptance.conftest import REPOSITORY, Command, with_targets
from tests.acceptance.documents import steps
from tests.fork_servers import ForkServers
from tests.plugins.handoff.files import by_row, source, stored, weights, write

PAGE = (REPOSITORY / "docs" / "plugins" / "handoff.md").read_text()
NAMES = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    values = weights(*NAMES, shape=(64, 96))
    write(tmp_path / "trainer.safetensors", source(values))
    write(tmp_path / "exported" / "model.safetensors", by_row(values))
    return tmp_path


def test_a_hand_off_without_a_finding_says_what_was_compared(shared: Command, folder: Path) -> None:
    done = shared.call("handoff", f"{folder}/trainer.safetensors", f"{folder}/exported", "--format", "fp8_row")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "handoff: 3 weights compared, 3 of them fp8_row, 18432 values",
        "handoff: nothing is wrong",
    ]


def test_a_finding_is_three_lines_and_json_has_it_whole(shared: Command, folder: Path) -> None:
    values = weights(*NAMES, shape=(64, 96))
    write(folder / "exported" / "model.safetensors", by_row({**values, NAMES[1]: values[NAMES[0]]}))
    words = ("handoff", f"{folder}/trainer.safetensors", f"{folder}/exported", "--format", "fp8_row")
    done = shared.call(*words, "--json", f"{folder}/answer.json")
    assert done.returncode == 1
    assert done.stdout.splitlines()[1:] == [
        f"handoff: handoff/order in {NAMES[1]}: it holds the weights of {NAMES[0]}",
        f"handoff: expected {NAMES[1]}, found the weights of {NAMES[0]}",
        "handoff: 1 finding; `fp8-harness explain handoff/order` says what it means",
    ]
    answer = json.loads((folder / "answer.json").read_text())
    assert answer["exit_code"] == 1 and answer["judged"][0]["findings"][0]["module"] == NAMES[1]
    assert "Local numbers of experts" in shared.call("explain", "handoff/order").stdout
    piped = shared.call(*words, "--json", "-")
    assert json.loads(piped.stdout) == answer and "handoff/order" in piped.stderr


def test_a_second_hand_off_and_that_of_one_rank_are_compared(shared: Command, folder: Path) -> None:
    values = weights(*NAMES, shape=(64, 96))
    write(folder / "trainer2.safetensors", source({**values, NAMES[1]: -values[NAMES[1]]}))
    words = ("handoff", f"{folder}/trainer.safetensors", f"{folder}/exported", "--format", "fp8_row")
    stale = shared.call(*words, "--after", f"{folder}/trainer2.safetensors", f"{folder}/exported")
    assert stale.returncode == 1 and f"handoff/stale in {NAMES[1]}: it is still the one of the first" in stale.stdout
    write(folder / "second.safetensors", by_row({**values, NAMES[1]: -values[NAMES[1]]}))
    second = ("--after", f"{folder}/trainer2.safetensors", f"{folder}/second.safetensors")
    assert shared.call(*words, *second, "--one-rank", f"{folder}/exported").returncode == 0
    other = shared.call(*words, "--one-rank", f"{folder}/second.safetensors")
    assert other.returncode == 1 and f"handoff/gather in {NAMES[1]}: it is not what one rank exports" in other.stdout


def test_bad_input_is_2_and_names_that_match_nothing_are_6(shared: Command, folder: Path) -> None:
    trainer, exported = f"{folder}/trainer.safetensors", f"{folder}/exported"
    for words, code, said in (
        ((trainer, exported), 2, "it has no quantization_config, so its format is not known. Fix: give --format"),
        ((trainer, exported, "--format", "fp4"), 2, "unknown format 'fp4'. Fix: give --format fp8_tensor,"),
        ((trainer, f"{folder}/none", "--format", "fp8_row"), 2, "there is no such file or folder."),
        ((trainer,), 2, "there is nothing to compare it with. Fix: give EXPORTED, or --agrees-with FILE."),
        ((trainer, exported, "--rename", "gate"), 2, "it has no '='."),
        ((trainer, exported, "--format", "fp8_row", "--rename", r"^model\.layers=other"), 0, ""),
        ((trainer, exported, "--format", "fp8_row", "--rename", "(=x"), 2, "no regular expression"),
    ):
        done = shared.call("handoff", *words)
        assert done.returncode == code and said in done.stderr, (words, done)
    write(folder / "exported" / "model.safetensors", by_row(weights("other.weight")))
    done = shared.call("handoff", trainer, exported, "--format", "fp8_row")
    assert done.returncode == 6 and "no name matches one of" in done.stderr


def test_a_truncated_file_is_one_line(shared: Command, folder: Path) -> None:
    path = folder / "exported" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    done = shared.call("handoff", f"{folder}/trainer.safetensors", str(path), "--format", "fp8_row")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"{path}: it is truncated: tensor {NAMES[2]}_scale ends at byte " in done.stderr


def test_what_is_converted_is_compared_with_a_second_list_alone(shared: Command, folder: Path) -> None:
    (folder / "ignored.json").write_text(json.dumps({"ignored_layers": ["model.layers.0.mlp.gate"]}))
    words = ("handoff", f"{folder}/exported", "--agrees-with", f"{folder}/ignored.json")
    assert shared.call(*words).returncode == 0
    done = shared.call(*words, "--matched-by", "substring")
    what, why, fix, *_ = done.stdout.splitlines()
    entry, name = "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"
    assert done.returncode == 1
    assert what == f"handoff: handoff/converted in {name}: it is float8_e4m3fn here, and high precision by {words[3]}"
    assert why == f"handoff: expected high precision, taken by '{entry}', found float8_e4m3fn"
    assert fix == f"handoff: fix: write whole names: '{entry}' takes it by substring, regex, and not by exact, prefix."


def test_the_help_has_every_format(shared: Command) -> None:
    shown = " ".join(shared.call("handoff", "--help").stdout.split())
    assert all(name in shown for name in FORMATS) and "6 nothing compared" in shown


EXPORTER = """
def to_hf(state):
    made = {}
    for name, tensor in state.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        made[name] = whole.clone()
        if name.endswith(("w1.weight", "w2.weight", "w3.weight")):
            made[f"{name}_scale"] = whole.abs().amax(dim=1, keepdim=True) / 448
            made[name] = (whole / made[f"{name}_scale"]).to(__import__("torch").float8_e4m3fn)
    return made
"""


def test_the_commands_of_the_page_run(project: Command, folder: Path) -> None:
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    values = weights(*NAMES, shape=(64, 96))
    for name in ("trainer.safetensors", "checkpoint/model.safetensors"):
        write(project.folder / name, source(values))
    write(project.folder / "exported" / "model.safetensors", by_row(values))
    for name, entry in {"config.json": {"quantization_config": config}, "ignored.json": ["lm_head"]}.items():
        (project.folder / name).write_text(json.dumps(entry))
    texts = [text for kind, text in steps(PAGE) if kind == "sh" and "-b16" not in text]
    done = {text: project.printed(text) for text in texts}
    assert len(PAGE.split()) <= 800 and len(texts) == 4
    assert not [each for each in done.values() if each.returncode]


# Three reports, as their users would have seen them


def blocks(values: Any, scales: Any) -> Any:
    return np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[: values.shape[0], : values.shape[1]]


def test_transformers_46763_scales_rounded_after_the_cast(shared: Command, tmp_path: Path) -> None:
    """ue8m0 scales were rounded after the weight was quantized with the others: up to 2x, with valid shapes."""
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}}
    values = weights(*NAMES, shape=(256, 256))
    write(tmp_path / "trainer.safetensors", source(values))
    for order in ("before", "after"):
        tensors = {}
        for name, weight in values.items():
            amax = np.abs(weight).reshape(2, 128, 2, 128).max(axis=(1, 3))
            plain, power = amax / 448, 2.0 ** np.ceil(np.log2(amax / 448))
            used = power if order == "before" else plain
            tensors[name] = stored(weight / blocks(weight, used), "F8_E4M3")
            tensors[f"{name}_scale_inv"] = stored(power, "F8_E8M0")
        write(tmp_path / order / "model.safetensors", tensors)
        (tmp_path / order / "config.json").write_text(json.dumps(config))
    assert shared.call("handoff", f"{tmp_path}/trainer.safetensors", f"{tmp_path}/before").returncode == 0
    done = shared.call("handoff", f"{tmp_path}/trainer.safetensors", f"{tmp_path}/after")
    assert done.returncode == 1
    shown = (
        PAGE[PAGE.index("handoff: handoff/scale") :]
        .partition("```")[0]
        .split("(model.layers.*.mlp.gate_proj.weight, …)")
    )
    assert all(" ".join(part.split()) in " ".join(done.stdout.split()) for part in shown), done.stdout


def test_megatron_6666_mxfp8_is_not_idempotent(shared: Command, tmp_path: Path) -> None:
    """MXFP8 to BF16 and back: 52 of 1024 scales were others, where scales are rounded up and data down."""
    values = weights("a.weight", shape=(256, 256))
    write(tmp_path / "trainer.safetensors", source(values))

    def exported(weight: Any) -> tuple[Any, Any]:
        amax = np.abs(weight).reshape(256, 8, 32).max(axis=2)
        scale = 2.0 ** np.ceil(np.log2(amax / 448))
        return stored(weight / np.repeat(scale, 32, axis=1), "F8_E4M3"), stored(scale, "F8_E8M0")

    from harness.plugins.handoff.numbers import decoded

    data, scale = exported(values["a.weight"])
    loaded = decoded(data[1], data[0]) * np.repeat(decoded(scale[1], scale[0]), 32, axis=1)
    again = exported(loaded)
    changed = int((again[1][1] != scale[1]).sum())
    for name, (one, other) in {"first": (data, scale), "again": again}.items():
        write(tmp_path / f"{name}.safetensors", {"a.weight": one, "a.weight_scale": other})
    words = ("handoff", f"{tmp_path}/trainer.safetensors", f"{tmp_path}/first.safetensors", "--format", "mxfp8")
    assert shared.call(*words).returncode == 0
    done = shared.call(*words, "--again", f"{tmp_path}/again.safetensors")
    assert done.returncode == 1 and changed > 50
    assert "handoff/not-idempotent in a.weight: exported again after it was loaded, " in done.stdout
    declared = shared.call(*words, "--again", f"{tmp_path}/again.safetensors", "--not-idempotent")
    assert declared.returncode == 0 and "other bits after loading and exporting: 1 weight" in declared.stdout


def test_prime_rl_2442_a_pattern_swallows_gate_proj(shared: Command, tmp_path: Path) -> None:
    """`mlp.gate.` was meant for routers, and its last dot took the `_` of `mlp.gate_proj` as well."""
    gate = weights("model.layers.0.mlp.gate.weight")
    tensors = {**by_row(weights(*NAMES)), **source(gate)}
    write(tmp_path / "exported" / "model.safetensors", tensors)
    for name, pattern in {
        "wrong": r"model\.layers\.\d+\.mlp\.gate.?",
        "right": r"model\.layers\.\d+\.mlp\.gate$",
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"ignored_layers": [pattern]}))
    words = ("handoff", f"{tmp_path}/exported", "--matched-by", "regex", "--agrees-with")
    assert shared.call(*words, f"{tmp_path}/right.json").returncode == 0
    done = shared.call(*words, f"{tmp_path}/wrong.json")
    assert (
        done.returncode == 1
        and "handoff/converted in model.layers.0.mlp.gate_proj: it is float8_e4m3fn here" in done.stdout
    )
    assert "takes it by regex, and not by exact, prefix, substring." in done.stdout


# A case, trained by ranks, and a function that exports it

CASE = "tp2-rowwise-v2048-s2-b16"


def test_what_is_wrong_with_a_case_is_said_before_ranks_start(project: Command) -> None:
    for words, said in (
        ((CASE, "my_export", "--format", "fp8_row"), "my_export is no function of a module. Fix: give EXPORTED as"),
        ((CASE, "my_export:to_hf"), "my_export:to_hf: it has no quantization_config, so its format is not known."),
        ((CASE, "--again", "other"), "--again is for files: a case makes its own second and one-rank exports."),
        ((CASE.replace("-v2048", "-inductor-v2048"),), "it is compiled, which changes no weight."),
        ((CASE.replace("tp2", "fsdp64").replace("s2", "gb64-s2"),), "it needs 64 ranks"),
        (("checkpoint-b16", "exported"), "there is no such file or folder."),
    ):
        done = project.printed(f"fp8-harness handoff {' '.join(words)}")
        assert done.returncode == 2 and said in done.stderr, (words, done)


def test_a_case_is_exported_by_a_function_of_the_user(tmp_path: Path, warm: ForkServers) -> None:
    trained = with_targets(tmp_path, warm)
    (trained.folder / "my_export.py").write_text(EXPORTER)
    words = next(text for kind, text in steps(PAGE) if kind == "sh" and "my_export" in text)
    done = trained.printed(words)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "handoff: nothing is wrong", done
    (trained.folder / "my_typo.py").write_text("def to_hf(state):\n    return {name: state.none for name in state}\n")
    done = trained.printed(f"fp8-harness handoff {CASE} my_typo:to_hf --format fp8_row")
    assert done.returncode == 2 and 'my_typo.py", line 2, in <dictcomp>.' in done.stderr, done
