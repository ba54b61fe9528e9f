"""`bug export`: the script shows the fault where this project is not installed, and is content with the fix."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from harness.bugs.export.script import exported_case, script
from harness.matrix.caseid import parse_case_id
from harness.verdict import FailureSignature

REPOSITORY = Path(__file__).parents[2]
CASE = "fsdp2-tp2-tensorwise-ag.fp8-dim.32-layers.1-heads.2-kvheads.2-ffn.32-v64-gb2-s1"
ROWWISE = "tp2-rowwise-v2048-s1-b16"
ONE_ROW = """
import torch
import torch.distributed as dist

def one_row_scaled():
    stock = torch._scaled_mm

    def scaled_mm(a, b, scale_a, scale_b, *args, **kwargs):
        if dist.get_rank() == 1 and scale_b.numel() > 1:
            scale_b = scale_b.clone()
            scale_b[..., 0] *= 1.25
        return stock(a, b, scale_a, scale_b, *args, **kwargs)

    torch._scaled_mm = scaled_mm
"""
FIX = REPOSITORY / "cases" / "fixes" / "scale_of_whole_weight.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with every installed package but this one."""
    folder = tmp_path_factory.mktemp("without")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if package.suffix != ".pth" and not package.name.startswith(("harness", "fp8_harness", "__editable__")):
            (site / package.name).symlink_to(package)
    return folder / "bin" / "python"


def bug_export(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = ("bug", "export", *arguments, "--root", str(REPOSITORY), "--device", "cpu", "--quiet")
    return subprocess.run(
        [sys.executable, "-m", "harness", *words], cwd=folder, capture_output=True, text=True, timeout=400, check=False
    )


def run(python: Path, script: Path, *patches: str, ranks: int = 4) -> subprocess.CompletedProcess[str]:
    torchrun = [str(python), "-I", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [*torchrun, str(script), *patches]
    return subprocess.run(words, cwd=script.parent, capture_output=True, text=True, timeout=300, check=False)


def test_the_script_fails_without_this_project_and_passes_with_the_fix(python: Path, tmp_path: Path) -> None:
    alone = subprocess.run([str(python), "-I", "-c", "import harness"], capture_output=True, text=True, check=False)
    assert "No module named 'harness'" in alone.stderr
    done = bug_export(tmp_path, f"{CASE}-f64", "--no-run", "--output", "issue")
    assert done.returncode == 0, done.stderr
    script = tmp_path / "issue" / f"{CASE}-f32.py"
    assert str(script.relative_to(tmp_path)) in done.stdout
    faulty = run(python, script)
    assert faulty.returncode == 1
    assert faulty.stdout.count(": FAULT: wrong numbers") >= 1, faulty.stderr
    fixed = run(python, script, f"{FIX}:apply")
    assert (fixed.returncode, fixed.stdout.count(": fixed")) == (0, 4), fixed.stderr
    draft = script.with_suffix(".md").read_text()
    assert "- found: weight in all_gather: " in draft
    assert f"torchrun --nproc-per-node 4 {script.name}" in draft


def test_one_wrong_row_is_told_where_tp_ranks_add_bfloat16(python: Path, tmp_path: Path) -> None:
    """It moves whole gradients by as much as rounding does; of one linear it is eight times as much."""
    parity = FailureSignature(kind="parity", what="1 of 18 gradients differ", first_step=1)
    file, patch = tmp_path / "case.py", tmp_path / "patch.py"
    file.write_text(script(exported_case(parse_case_id(ROWWISE)), parity, title="one row").text)
    patch.write_text(ONE_ROW)
    clean = run(python, file, ranks=2)
    assert (clean.returncode, clean.stdout.count(": fixed")) == (0, 2), clean.stderr
    faulty = run(python, file, f"{patch}:one_row_scaled", ranks=2)
    assert (faulty.returncode, faulty.stdout.count(": FAULT: wrong numbers")) == (1, 2), faulty.stderr
    assert "expected  the output of layers.0.wq as of one rank, up to 0.012" in faulty.stdout


def test_a_case_that_does_not_fail_is_refused(tmp_path: Path) -> None:
    done = bug_export(tmp_path, "fsdp2-tensorwise-v2048-s1-f32")
    assert done.returncode == 2
    assert "it does not fail, so there is nothing to export" in done.stderr
