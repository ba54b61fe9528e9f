"""`examples/scripts` under `exec`, unchanged and with faults: what people write for GPUs, beside itself on one rank."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[4] / "examples" / "scripts"
TORCHRUN = ("torchrun", "--nproc_per_node", "2")
HF = ("accelerate", "transformers")
ACCELERATE = ("accelerate", "launch", "--num_processes", "2")
FSDP = (
    *("--use_fsdp", "--fsdp_version", "2", "--fsdp_cpu_ram_efficient_loading", "false", "--mixed_precision", "fp8"),
    *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "LlamaDecoderLayer"),
)
# By name: the launcher, what follows the script, and the packages that it needs.
COMMANDS = {
    "plain_fsdp2.py": (TORCHRUN, (), ()),
    "accelerate_fsdp2.py": (ACCELERATE, (), HF),
    "hf_trainer.py": (
        (*ACCELERATE, *FSDP),
        ("--output_dir", "out", "--max_steps", "4"),
        HF,
    ),
    "lightning_fsdp2.py": (TORCHRUN, (), ("lightning",)),
}
# What is wrong on several ranks and right on one: the line, what stands there instead, and what must be told of it.
FAULTS = {
    "summed": (
        "model.to_empty(",
        "model.set_gradient_divide_factor(1.0)\n    model.to_empty(",
        "gradients are 2 times the",
    ),
    "divided": ("loss.backward()", "(loss / world).backward()", "1/2 of the one rank's"),
    "faster": ("lr=1e-3", "lr=1e-3 * world", "updates of parameters are 2 times the"),
    "unequal": (".flatten())", ".masked_fill(tokens[:, 1:] < 64 * rank, -100).flatten())", "gradients differ"),
    "of_one_rank": ("loss.backward()", "(loss / (1 + rank)).backward()", "gradients differ"),
}


def exec_(folder: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    launcher, words, packages = COMMANDS[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is no part of the extra `dev`: `make transformers` runs this where it is")
    command = [sys.executable, "-m", "harness", "exec", "-n", "2", *options, "--", *launcher, name, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_trains_on_two_ranks_what_it_trains_on_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text((SCRIPTS / name).read_text())
    done = exec_(tmp_path, name, "--against-one-rank")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "beside one rank: equal" in done.stderr and "not lined up" not in done.stderr


@pytest.mark.parametrize("fault", ["summed", *(pytest.param(name, marks=pytest.mark.sweep) for name in [*FAULTS][1:])])
def test_a_fault_of_several_ranks_is_found_beside_one(tmp_path: Path, fault: str) -> None:
    right, wrong, told = FAULTS[fault]
    text = (SCRIPTS / "plain_fsdp2.py").read_text()
    assert text.count(right) == 1, "the script has other lines now"
    (tmp_path / "plain_fsdp2.py").write_text(text.replace(right, wrong))
    done = exec_(tmp_path, "plain_fsdp2.py", "--no-watch", "--against-one-rank")
    assert done.returncode == 1 and "beside one rank: wrong" in done.stderr and told in done.stderr, done.stderr
