"""What is known of the machine: GPUs and drivers that are found, CPUs, slots."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.hardware import (
    Capacity,
    Gpu,
    architecture_of,
    capacity_here,
    in_use,
    installed_gpus,
    kind_of,
    open_leases,
    visible_gpus,
)
from harness.engine.leases import Leases
from harness.engine.linux import cpu_quota
from harness.errors import HarnessError
from harness.run_options import PlanOptions
from harness.running.machine import check_ranks
from harness.running.plan import Plan, plan_without_ranks
from tests.nvidia import put_nvidia_smi

H100 = "NVIDIA H100 80GB HBM3"
GPUS = tuple(Gpu(uuid=f"GPU-{letter}{index}", index=index, name=H100) for index, letter in enumerate("aabc"))
SPLIT = Gpu(
    uuid="GPU-d4",
    index=4,
    name=H100,
    parts=(
        Gpu(uuid="MIG-1", index=4, name=f"{H100} MIG 3g.40gb"),
        Gpu(uuid="MIG-2", index=4, name=f"{H100} MIG 1g.10gb"),
    ),
)
LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa)
  MIG 3g.40gb     Device  0: (UUID: MIG-1)
  MIG 1g.10gb     Device  1: (UUID: MIG-2)
GPU 1: NVIDIA L40S (UUID: GPU-bb)
"""


def with_smi(folder: Path, **answers: str) -> Mapping[str, str]:
    return {"PATH": put_nvidia_smi(folder, LISTING, **answers)}


def names(visible: str | None, gpus: tuple[Gpu, ...] = GPUS) -> list[str]:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [gpu.uuid for gpu in visible_gpus(environ, gpus)]


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        (None, ["GPU-a0", "GPU-a1", "GPU-b2", "GPU-c3"]),
        ("", []),
        ("2,0", ["GPU-b2", "GPU-a0"]),
        ("GPU-b2,1", ["GPU-b2", "GPU-a1"]),
        ("GPU-b", ["GPU-b2"]),
        ("GPU-a", []),  # the start of two
        ("1,7,0", ["GPU-a1"]),  # there is no 7
        ("1,-1,0", ["GPU-a1"]),
        ("NoDevFiles", []),
        ("2,GPU-b2", []),  # the same one twice
    ],
)
def test_what_cuda_shows(visible: str | None, shown: list[str]) -> None:
    assert names(visible) == shown


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        (None, ["MIG-1"]),
        ("4", ["MIG-1"]),
        ("GPU-d4", ["MIG-1"]),
        ("MIG-2", ["MIG-2"]),
        ("MIG-2,MIG-1", ["MIG-2"]),
        ("0", ["GPU-a0"]),
    ],
)
def test_of_a_divided_gpu_cuda_shows_one_part(visible: str | None, shown: list[str]) -> None:
    assert names(visible, (*GPUS, SPLIT)) == shown


def test_without_a_listing_entries_are_kept() -> None:
    assert names("3, GPU-8932f937", ()) == ["3", "GPU-8932f937"]
    assert names("3,3", ()) == []


def test_jobs_that_call_a_gpu_differently_agree_on_who_holds_it(tmp_path: Path) -> None:
    """One has CUDA_VISIBLE_DEVICES=2,3, the other the UUIDs of 3 and 1."""
    mine, other = names("2,3"), names("GPU-c3,GPU-a1")
    with Leases(tmp_path, 2, names=mine).acquire(2), Leases(tmp_path, 2, names=other).acquire(1) as slots:
        assert [other[slot] for slot in slots] == ["GPU-a1"], "its CUDA index is 1"


CALLED = st.lists(st.sampled_from(range(4)), unique=True, min_size=1).flatmap(
    lambda chosen: st.tuples(*(st.sampled_from([str(index), GPUS[index].uuid]) for index in chosen))
)


@given(CALLED, CALLED)
def test_the_same_gpu_has_the_same_lease(mine: tuple[str, ...], other: tuple[str, ...]) -> None:
    def numbers(entries: tuple[str, ...]) -> set[int]:
        return {int(entry[-1]) for entry in entries}

    assert len(set(names(",".join(mine))) & set(names(",".join(other)))) == len(numbers(mine) & numbers(other))


@given(st.text(alphabet="0123-, GPUMIabc", max_size=20))
def test_any_text_shows_different_gpus(visible: str) -> None:
    shown = names(visible, (*GPUS, SPLIT))
    assert len(set(shown)) == len(shown)


def test_nvidia_smi_lists_gpus_with_their_parts(tmp_path: Path) -> None:
    environ = {**with_smi(tmp_path), "CUDA_VISIBLE_DEVICES": "1"}
    divided, whole = installed_gpus(environ)
    assert [part.name for part in divided.parts] == [f"{H100} MIG 3g.40gb", f"{H100} MIG 1g.10gb"]
    assert whole == Gpu(uuid="GPU-bb", index=1, name="NVIDIA L40S")
    assert visible_gpus(environ, (divided, whole)) == (whole,)


def test_the_files_of_the_driver_serve_without_nvidia_smi(tmp_path: Path) -> None:
    for bus, uuid in (("0000:0a:00.0", "GPU-????????-????"), ("0000:01:00.0", "GPU-12")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {H100}\nGPU UUID: \t {uuid}\nBus Location: {bus}\n")
    gpus = installed_gpus({"PATH": ""}, proc=tmp_path)
    assert [(gpu.uuid, gpu.index, gpu.name) for gpu in gpus] == [("GPU-12", 0, H100), ("1", 1, H100)]
    assert installed_gpus({"PATH": ""}, proc=tmp_path / "missing") == ()


def test_a_run_uses_one_kind_of_gpu(tmp_path: Path) -> None:
    assert kind_of(GPUS) == H100
    mixed = (*GPUS[:2], Gpu(uuid="GPU-l", index=2, name="NVIDIA L40S"))
    with pytest.raises(
        HarnessError, match=r"NVIDIA H100 80GB HBM3 \(0, 1\); NVIDIA L40S \(2\).*CUDA_VISIBLE_DEVICES=0,1"
    ):
        kind_of(mixed)
    for unknown in ((), (Gpu(uuid="0"),)):
        with pytest.raises(HarnessError, match="cannot find the name"):
            kind_of(unknown)


def test_the_architecture_is_that_of_the_gpu_that_is_used(tmp_path: Path) -> None:
    environ = with_smi(tmp_path, gpu="0, 9.0\n1, 8.9\n")
    assert [architecture_of((gpu,), environ) for gpu in installed_gpus(environ)] == ["sm90", "sm89"]
    assert architecture_of((), environ) == architecture_of(GPUS, with_smi(tmp_path, gpu="[N/A]\n")) == ""


def test_who_computes_on_a_gpu_is_told(tmp_path: Path) -> None:
    environ = with_smi(tmp_path, compute_apps="GPU-bb, 71, /usr/bin/python3, 5120\nGPU-bb, 72, train, [N/A]\n")
    (sentence,) = in_use(installed_gpus(environ), environ)
    assert sentence.startswith("GPU 1 (NVIDIA L40S) is in use by 2 processes: python3 (pid 71, 5 GiB), train (pid 72).")
    assert in_use(GPUS, environ) == () and in_use(GPUS, {"PATH": ""}) == ()


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


def test_a_cpu_borrows_nothing_and_slots_are_the_gpus_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, tmp_path, gpu="0, 9.0\n")
    here = capacity_here("cpu")
    assert Plan(capacity=Capacity(nodes=(here,))).hardware == ("cpu",) and here.architecture == ""
    pretend(monkeypatch, tmp_path, gpu="0, 9.0\n")
    assert capacity_here("cuda", 4).slots == 1, "there are no four"
    with open_leases(tmp_path, "cuda", 4).acquire(1):
        assert (tmp_path / "cuda" / "slot-GPU-a0.lock").exists()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert plan_without_ranks(PlanOptions()).device == "cpu"
    with pytest.raises(HarnessError, match="no CUDA device"):
        plan_without_ranks(PlanOptions(device="cuda"))


V1 = {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),  # in a container
        ("0::/pod/box\n", {"pod/cpu.max": "50000 100000", "pod/box/cpu.max": "max 100000"}, 0.5),  # of its parent
        ("0::/pod/box\n", {"pod/cpu.max": "300000 100000", "pod/box/cpu.max": "200000 100000"}, 2),
        ("0::/docker/4f\n", {"cpu.max": "400000 100000"}, 4),  # the mount begins at its own group
        ("0::/box\n", {"cpu.max": "max 100000", "other/cpu.max": "100000 100000"}, math.inf),
        ("4:memory:/\n3:cpu,cpuacct:/\n0::/\n", {f"cpu/{name}": text for name, text in V1.items()}, 1.5),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("4:memory:/box\n", {f"cpu/box/{name}": text for name, text in V1.items()}, math.inf),  # not of this process
        ("", {"cpu.max": "100000 100000"}, math.inf),
    ],
)
def test_the_quota_of_a_container_counts(groups: str, files: Mapping[str, str], cpus: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "groups").write_text(groups)
    assert cpu_quota(tmp_path, tmp_path / "groups") == cpus


def test_a_folder_without_space_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that finds no space in a file that it shares would be killed by SIGBUS."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 << 20))
    with pytest.raises(HarnessError, match=r"only 3 MiB are free.*TMPDIR") as error:
        check_ranks(packages=False)
    assert error.value.where == tempfile.gettempdir()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    check_ranks(packages=False)
