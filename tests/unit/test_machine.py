"""What the machine says of its GPU, without torch: the classes whose goldens serve it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.engine.hardware import Capacity, capacity_here, open_leases
from harness.errors import HarnessError
from harness.running.machine import resolve_device
from harness.running.plan import Plan
from tests.nvidia import put_nvidia_smi


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, **answers: str) -> None:
    """This machine has one H200, of the compute capability that is answered."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", put_nvidia_smi(folder, **answers))


@pytest.mark.parametrize(
    ("answers", "classes"),
    [
        ({"gpu": "0, 9.0\n1, 9.0\n"}, ("nvidia-h200", "sm90", "nvidia")),
        ({"gpu": "0, 12.0\n"}, ("nvidia-h200", "sm120", "nvidia")),
        ({"gpu": "0, [N/A]\n"}, ("nvidia-h200", "nvidia")),
        ({}, ("nvidia-h200", "nvidia")),
    ],
)
def test_the_classes_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: dict[str, str], classes: tuple[str, ...]
) -> None:
    pretend(monkeypatch, tmp_path, **answers)
    assert Plan(capacity=Capacity(nodes=(capacity_here("cuda"),))).hardware == classes


def test_a_cpu_has_no_architecture_and_borrows_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, gpu="0, 9.0\n")
    here = capacity_here("cpu")
    assert Plan(capacity=Capacity(nodes=(here,))).hardware == ("cpu",) and here.architecture == ""


def test_slots_are_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, gpu="0, 9.0\n")
    assert capacity_here("cuda", 4).slots == 1, "there are no four"
    with open_leases(tmp_path, "cuda", 4).acquire(1):
        assert (tmp_path / "cuda" / "slot-GPU-a0.lock").exists()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert resolve_device("auto") == "cpu"
    with pytest.raises(HarnessError, match="no CUDA device"):
        resolve_device("cuda")
