"""`dev evidence` rehearsed on a CPU, stores what it found and says what is left; `dev conformance` of operators."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness.evidence.verified import LEVELS
from tests.acceptance.conftest import REPOSITORY, Command, empty_project
from tests.acceptance.documents import steps
from tests.commands import understood
from tests.nvidia import put_nvidia_smi

PAGE = REPOSITORY / "docs" / "plugins" / "gpu.md"

BF16 = """
[[case]]
axes = {recipe = "tensorwise", steps = 4, dtype = "bfloat16", loss_tolerance = 0.05}

[[case]]
axes = {recipe = "rowwise", tp = 2, output_layer = true, vocab_size = 2256, dtype = "bfloat16"}
"""


def bare(folder: Path) -> Command:
    """A project without cases and goldens, whose ranks run torch."""
    return Command(empty_project(folder), {"FP8_HARNESS_PROGRAM": ""})


@pytest.mark.sweep  # 47 CPU seconds: torch's kernel of a CPU takes 1.5 for a sum of 4096. `test_kernels.py` has others
def test_the_kernel_of_this_machine(tmp_path: Path) -> None:
    project = bare(tmp_path)
    done = project.call("dev", "evidence", "kernel", "--device", "cpu", "--json", "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    stored = json.loads((tmp_path / "golden" / "cpu" / "evidence-kernel.json").read_text())
    (level,) = json.loads((tmp_path / "found.json").read_text())["levels"]
    assert len(stored["items"]) == len(level["items"]) > 250 and stored["environment"]["device"] == "cpu"
    summary = (tmp_path / "golden" / "cpu" / "evidence-kernel.md").read_text()
    assert "nothing about a GPU" in summary and summary in done.stdout and "none is compared" in summary
    assert project.call("baseline", "show").stdout == "", "evidence is no golden"
    shown = project.call("dev", "evidence", "--list")
    assert shown.returncode == 0 and "rehearsal of kernel on cpu: good; 305 passed" in shown.stdout


@pytest.mark.sweep
def test_a_planted_fault_is_found_over_gloo_with_the_exact_matmul(tmp_path: Path) -> None:
    project = bare(tmp_path)
    asked = ("single-bf16-v2048-s2-f64", "--fault", "amax_not_reduced_over_tp")
    options = (*asked, "--device", "cpu", "-o", "backend=gloo", "--json", "-")
    done = project.run("dev", "evidence", "proof", *options, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (level,) = json.loads(done.stdout)["levels"]
    assert level["environment"]["backend"] == "gloo" and level["environment"].get("arithmetic", "") == ""
    assert {item["verdict"] for item in level["items"]} == {"passed", "detected"}
    assert "# The exact matmul" in done.stderr


def test_goldens_of_a_class_are_made_before_anything_is_judged(project: Command) -> None:
    project.tier("own", BF16)
    ran = ("dev", "evidence", "native", "own", "--device", "cpu", "--seeds", "1")
    done = project.call(*ran)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = project.folder / "golden" / "cpu"
    stored = json.loads((folder / "evidence-native.json").read_text())
    names = [item["name"] for item in stored["items"]]
    assert sum(name.startswith("golden ") for name in names) == 1 and len(list(folder.glob("tiny-*-s4-*"))) == 1
    assert {item["verdict"] for item in stored["items"]} == {"made", "passed", "no bit differs"}
    assert not (project.folder / "golden" / "evidence").exists(), "no tolerance rests on what one class measured"
    assert stored["environment"]["arithmetic"] == "kernel"
    assert stored["notes"] == [
        "1 case left out that must be refused, which torch's kernel of a CPU does not do",
        "noise: not measured, without seeds or without a case to measure",
    ]
    again = project.call(*ran)
    assert "no longer tried: golden " in again.stdout, "the golden is stored, so it is not made again"


def test_every_command_of_the_page_is_understood() -> None:
    commands = [text for kind, text in steps(PAGE.read_text()) if kind == "sh"]
    ours = [text[text.index("fp8-harness ") :] for text in commands if "fp8-harness " in text]
    assert len(ours) > 6 and {text.partition(" evidence ")[2].split()[0] for text in ours if " evidence " in text} == {
        *LEVELS,
        "all",
    }
    for text in ours:
        understood(text)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("kernel", "--device", "cuda"), 2, "there is no CUDA device here"),
        (("proof", "--device", "cpu", "-o", "arithmetic=kernel"), 2, "each level has its own"),
        (("native", "smoke", "--device", "cpu", "--select", "dtype=float32"), 3, "no selected case is in bfloat16"),
        (("proof", "--device", "cpu", "--fault", "no_such_fault"), 2, "no_such_fault"),
    ],
)
def test_what_cannot_be_made_is_told_in_words(project: Command, words: tuple[str, ...], code: int, said: str) -> None:
    done = project.call("dev", "evidence", *words)
    assert done.returncode == code and said in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_torch_without_cuda_proves_nothing_on_gpus(tmp_path: Path) -> None:
    project = bare(tmp_path)
    two = "".join(f"GPU {index}: NVIDIA H200 (UUID: GPU-a{index})\n" for index in range(2))
    project.environment["PATH"] = put_nvidia_smi(tmp_path, two)
    done = project.call("dev", "evidence", "all", "--device", "cuda")
    assert done.returncode == 2 and list((tmp_path / "golden").iterdir()) == [], done.stdout + done.stderr
    assert re.search(r"evidence kernel: torch \S+ (was built without CUDA|for CUDA \S+ shows no device)", done.stderr)


@pytest.mark.sweep  # `test_conformance.py` runs such checks
def test_the_document_goes_to_stdout_and_the_table_to_stderr(shared: Command) -> None:
    done = shared.call("dev", "conformance", "amax-8x16-f32-m4-R", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert "1 check in " in done.stderr and "1 passed" in done.stderr
    document = json.loads(done.stdout)
    assert document["counts"] == {"passed": 1}
    assert [(check["id"], check["status"]) for check in document["checks"]] == [("amax-8x16-f32-m4-R", "passed")]
