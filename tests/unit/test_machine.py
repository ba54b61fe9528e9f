"""What the machine says of its GPU, without torch: the classes whose goldens serve it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.engine.capacity import capacity_here
from harness.engine.devices import open_leases
from harness.errors import HarnessError
from harness.running.machine import all_hardware, resolve_device


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, capability: str) -> None:
    """Put an nvidia-smi into PATH that knows one H200 of this compute capability."""
    program = folder / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        "-L) echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)' ;;\n"
        f"--query-gpu=index,compute_cap) {capability} ;;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("capability", "classes"),
    [
        ("echo 0, 9.0; echo 1, 9.0", ("nvidia-h200", "sm90", "nvidia")),
        ("echo 0, 12.0", ("nvidia-h200", "sm120", "nvidia")),
        ("echo '0, [N/A]'", ("nvidia-h200", "nvidia")),
        ("exit 1", ("nvidia-h200", "nvidia")),
    ],
)
def test_the_classes_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: str, classes: tuple[str, ...]
) -> None:
    pretend(monkeypatch, tmp_path, capability)
    assert all_hardware("cuda") == classes


def test_a_cpu_has_no_architecture_and_borrows_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, "echo 0, 9.0")
    assert all_hardware("cpu") == ("cpu",) and capacity_here("cpu").architecture == ""


def test_slots_are_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, "echo 0, 9.0")
    assert capacity_here("cuda", 4).slots == 1, "there are no four"
    with open_leases(tmp_path, "cuda", 4).acquire(1):
        assert (tmp_path / "cuda" / "slot-GPU-1.lock").exists()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert resolve_device("auto") == "cpu"
    with pytest.raises(HarnessError, match="no CUDA device"):
        resolve_device("cuda")
