"""Kernels that no CPU has: imports that are changed, histograms, and Triton's interpreter where it is installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.plugins.exec.worker import kernels
from harness.plugins.exec.worker.imports import after_import, has_interpreter

E8M0 = torch.float8_e8m0fnu
CAST = """
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import triton_to_mxfp8_dim0, triton_to_mxfp8_dim1
from torchao.prototype.mx_formats.mx_tensor import to_mx

x = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda") * torch.logspace(-38, 38, 128, device="cuda")
x[:, 3], x[5] = 0, float("nan")
scale, data = to_mx(x.bfloat16(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
for cast, source in ((triton_to_mxfp8_dim0, x), (torch.compile(triton_to_mxfp8_dim0, fullgraph=True), x)):
    found, of_found = cast(source.bfloat16())
    assert torch.equal(found.view(torch.uint8), data.view(torch.uint8)), "data"
    assert torch.equal(of_found.view(torch.uint8), scale.view(torch.uint8)), "scales"
print("equal", torch.histc(torch.tensor([0, 1, 1], device="cuda"), bins=2, min=0, max=1).tolist())
"""


def executed(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "harness", "exec", "--no-watch", "--gpu", "b200", "--", "python", script]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_a_module_is_changed_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    after_import("late_module", lambda module: setattr(module, "value", module.value + 1))
    assert "late_module" not in sys.modules
    assert importlib.import_module("late_module").value == 2
    after_import("late_module", lambda module: setattr(module, "value", 5))
    assert sys.modules.pop("late_module").value == 5


def test_scales_are_rounded_up_as_the_instruction_does() -> None:
    values = torch.tensor(
        [0.0, 2.0**-133, 2.0**-127, 2.0**-126, 1.0, 1.0000001, 3.0, 1.6e38, float("inf"), float("nan")]
    )
    exponents = kernels._ue8m0_rounded_up(values.numpy()).astype(np.uint8)
    rounded = torch.from_numpy(exponents).view(E8M0).to(torch.float64)
    finite = values[:-2].double()
    least = torch.from_numpy(exponents[:-2] == 0)
    assert (rounded[:-2] >= finite).all() and ((rounded[:-2] / 2 < finite) | least).all()
    assert exponents[-2:].tolist() == [254, 255]


def test_an_mxfp8_kernel_has_the_bits_of_the_reference(tmp_path: Path) -> None:
    (tmp_path / "cast.py").write_text(CAST)
    done = executed(tmp_path, "cast.py")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "equal [1, 2]", done.stderr


@pytest.mark.skipif(not has_interpreter(), reason="needs triton and ml_dtypes")
def test_ptx_without_a_body_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "ptx.py").write_text(
        """
import torch, triton, triton.language as tl

@triton.jit
def kernel(x, n: tl.constexpr):
    at = tl.arange(0, n)
    out = tl.inline_asm_elementwise("nonsense.f32 $0, $1;", "=r,r", [tl.load(x + at)], tl.float32, True, 1)
    tl.store(x + at, out)

kernel[(1,)](torch.ones(8, device="cuda"), 8)
"""
    )
    done = executed(tmp_path, "ptx.py")
    assert done.returncode == 1 and "no CPU runs this PTX: nonsense.f32" in done.stderr
