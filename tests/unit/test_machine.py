"""What the machine says of its GPU, without torch: the classes whose goldens serve it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.running.machine import all_hardware, architecture


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, capability: str) -> None:
    """Put an nvidia-smi into PATH that knows one H200 of this compute capability."""
    program = folder / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        "-L) echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)' ;;\n"
        f"--query-gpu=compute_cap) {capability} ;;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="there is a GPU, whose name comes first")
@pytest.mark.parametrize(
    ("capability", "classes"),
    [
        ("echo 9.0; echo 9.0", ("nvidia-h200", "sm90", "nvidia")),
        ("echo 12.0", ("nvidia-h200", "sm120", "nvidia")),
        ("echo '[N/A]'", ("nvidia-h200", "nvidia")),
        ("exit 1", ("nvidia-h200", "nvidia")),
    ],
)
def test_the_classes_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: str, classes: tuple[str, ...]
) -> None:
    pretend(monkeypatch, tmp_path, capability)
    assert all_hardware("cuda") == classes


def test_a_cpu_has_no_architecture_and_borrows_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, "echo 9.0")
    assert all_hardware("cpu") == ("cpu",) and architecture("cpu") == ""
