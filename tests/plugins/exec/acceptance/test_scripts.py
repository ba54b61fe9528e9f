"""`examples/scripts` under `exec`, unchanged and with faults: what people write for GPUs, beside itself on one rank."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[4] / "examples" / "scripts"
PLAIN, ACCELERATE, TRAINER, LIGHTNING = "plain_fsdp2.py", "accelerate_fsdp2.py", "hf_trainer.py", "lightning_fsdp2.py"
TORCHRUN = ("torchrun", "--nproc_per_node", "2")
HF = ("accelerate", "transformers")
LAUNCH = ("accelerate", "launch", "--num_processes", "2")
FSDP = (
    *("--use_fsdp", "--fsdp_version", "2", "--fsdp_cpu_ram_efficient_loading", "false", "--mixed_precision", "fp8"),
    *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "LlamaDecoderLayer"),
)
# By name: the launcher, what follows the script, and the packages that it needs.
COMMANDS = {
    PLAIN: (TORCHRUN, (), ()),
    ACCELERATE: (LAUNCH, (), HF),
    TRAINER: ((*LAUNCH, *FSDP), ("--output_dir", "out", "--max_steps", "4"), HF),
    LIGHTNING: (TORCHRUN, (), ("lightning",)),
}
TABLE = tomllib.loads((Path(__file__).parent / "faults.toml").read_text())["fault"]
FAULTS = [
    pytest.param(fault, marks=pytest.mark.sweep if "sweep" in fault else (), id=f"{fault['script']}-{fault['name']}")
    for fault in TABLE
]

Run = subprocess.CompletedProcess[str]


def exec_(folder: Path, name: str, *options: str) -> Run:
    launcher, words, packages = COMMANDS[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is no part of the extra `dev`: `make transformers` runs this where it is")
    command = [sys.executable, "-m", "harness", "exec", "-n", "2", *options, "--", *launcher, name, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Run, Path]]:
    """Return how a script ends unchanged, beside one rank, and the file of what it is meant to do."""
    made: dict[str, tuple[Run, Path]] = {}

    def run(name: str) -> tuple[Run, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("clean")
            (folder / name).write_text((SCRIPTS / name).read_text())
            done = exec_(folder, name, "--against-one-rank", "--record", "meant.toml")
            made[name] = done, folder / "meant.toml"
        return made[name]

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_trains_on_two_ranks_what_it_trains_on_one(
    clean: Callable[[str], tuple[Run, Path]], name: str
) -> None:
    done, _ = clean(name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "beside one rank: equal" in done.stderr and "not lined up" not in done.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_people_make_has_a_headline(
    tmp_path: Path, clean: Callable[[str], tuple[Run, Path]], fault: dict[str, Any]
) -> None:
    name, options = fault["script"], fault.get("options", ())
    text = (SCRIPTS / name).read_text()
    for right, wrong in fault["lines"]:
        assert text.count(right) == 1, f"the script has other lines now than {right}"
        text = text.replace(right, wrong)
    (tmp_path / name).write_text(text)
    if "--expect" in options:
        (tmp_path / "meant.toml").write_text(clean(name)[1].read_text())
    done = exec_(tmp_path, name, *options)
    said = "\n".join(line for line in done.stderr.splitlines() if line.startswith("exec: "))
    assert done.returncode == 1, done.stdout + done.stderr
    assert all(words in said for words in fault["told"]), said


def test_each_script_has_five_faults() -> None:
    counts = Counter(fault["script"] for fault in TABLE)
    assert counts.keys() == COMMANDS.keys() and min(counts.values()) >= 5


def test_the_same_batch_may_be_meant(tmp_path: Path) -> None:
    text = (SCRIPTS / PLAIN).read_text().replace("manual_seed(rank)", "manual_seed(0)")
    (tmp_path / PLAIN).write_text('# fp8-harness: allowed = ["watch/same-batch"]\n' + text)
    done = exec_(tmp_path, PLAIN)
    assert done.returncode == 0, done.stderr
