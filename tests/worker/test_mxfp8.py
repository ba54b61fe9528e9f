"""MXFP8 on the virtual device: bits of casts, order of scales, the exact matmul, and what is measured of them."""

from __future__ import annotations

import math
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.matrix.recipes import MX
from harness.worker.probes.cast_numbers import SMALLEST_BLOCK, Cast, CastNumbers, measure_cast
from harness.worker.virtual import casts, device
from harness.worker.virtual.casts import pretended_gpu
from harness.worker.virtual.scaled_mm import block_product, unswizzled

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
MODES = ("rceil", "floor")
EXTREMES = (0.0, -0.0, 2.0**-133, -(2.0**-127), 2.0**-119, 1.75 * 2.0**-119, 2.0**-118, 3.3e38, math.inf, math.nan)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    casts.install()
    device.install()


def test_what_torch_first_imports_meanwhile_does_not_pretend_later(monkeypatch: pytest.MonkeyPatch):
    late = ModuleType("torch.late")
    with pretended_gpu({}):
        monkeypatch.setitem(sys.modules, late.__name__, late)
        late.has_triton = torch.utils._triton.has_triton
        assert late.has_triton()
    assert not late.has_triton()


def test_torch_finds_no_triton_where_it_first_looks_meanwhile():
    script = """
from harness.worker.virtual.casts import pretended_gpu
with pretended_gpu({}):
    import torch._dynamo.utils, torch._inductor.compile_fx
from torch.utils._triton import has_triton_package
print(torch._dynamo.utils.has_triton(), has_triton_package())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines()[-1:] == ["False False"], ran.stderr


@st.composite
def sources(draw: st.DrawFn) -> torch.Tensor:
    """bfloat16 of any magnitude, in which some blocks are of one extreme and others have one."""
    rows, columns = (MX[1] * draw(st.integers(1, 3)) for _ in range(2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    source = torch.randn(rows, columns, generator=generator) * 2.0 ** draw(st.integers(-130, 120))
    for value in draw(st.lists(st.sampled_from(EXTREMES), max_size=3)):
        row, column = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        size = draw(st.sampled_from((1, MX[1])))
        source[row : row + size, column : column + size] = value
    return source.bfloat16()


def cast(source: torch.Tensor, mode: str, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data [rows, columns] and scales, with the blocks along `dim`, by the operators that torchao calls."""
    from torchao.prototype.mx_formats import kernels

    if dim == -1:
        data, scale = kernels.triton_to_mxfp8_dim0(source, MX[1], mode)
    else:
        _, data, _, scale = kernels.mxfp8_quantize_cuda(source, rowwise=False, colwise=True, scaling_mode=mode)
    return data, scale


def as_bytes(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return values


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [-1, 0])
@given(source=sources())
def test_a_cast_has_the_bits_of_the_reference(mode, dim, source):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    along = source if dim == -1 else source.t().contiguous()
    expected_scale, expected = to_mx(along, E4M3, MX[1], ScaleCalculationMode(mode))
    data, scale = cast(source, mode, dim)
    assert data.stride() == ((source.shape[1], 1) if dim == -1 else (1, source.shape[0]))
    assert as_bytes(data if dim == -1 else data.t()) == as_bytes(expected)
    assert as_bytes(scale) == as_bytes(expected_scale)


@pytest.mark.parametrize("mode", MODES)
@given(source=sources())
def test_a_scale_is_the_power_of_two_of_its_block(mode, source):
    _, scale = cast(source, mode, -1)
    amaxes = source.double().reshape(-1, MX[1]).abs().amax(1).tolist()
    for amax, block_scale in zip(amaxes, scale.double().flatten().tolist(), strict=True):
        if SMALLEST_BLOCK <= amax < math.inf:
            product = amax / block_scale
            assert 256 <= product < 512 if mode == "floor" else 224 < product <= 448


@given(
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_the_matmul_is_the_exact_sum_of_integers(m, blocks, n, seed):
    """Operands are multiples of 2**-9, and scales of 1/4: all sums are integers below 2**53 after a shift."""
    generator = torch.Generator().manual_seed(seed)

    def operand(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        bits = torch.randint(0, 127, (rows, MX[1] * blocks), generator=generator, dtype=torch.uint8)
        bits |= torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.uint8) << 7
        scale = torch.randint(125, 130, (rows, blocks), generator=generator, dtype=torch.uint8)
        return bits.view(E4M3), scale.view(E8M0)

    def integers(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (data.double() * 2**9).long() * (scale.double() * 4).long().repeat_interleave(MX[1], -1)

    (a, a_scale), (b, b_scale) = operand(m), operand(n)
    expected = integers(a, a_scale) @ integers(b, b_scale).t()
    found = block_product(a, b.t(), blocked(a_scale), blocked(b_scale))
    assert torch.equal((found * 2**22).long(), expected) and torch.equal(found * 2**22, expected.double())


def blocked(scale: torch.Tensor) -> torch.Tensor:
    from torchao.prototype.mx_formats.utils import to_blocked

    swizzled: torch.Tensor = to_blocked(scale)
    return swizzled


@given(st.integers(1, 300), st.integers(1, 9))
def test_scales_are_found_where_torchao_puts_them(rows, blocks):
    scale = torch.randint(0, 255, (rows, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    assert torch.equal(unswizzled(blocked(scale), rows, blocks), scale)


def measured(source: torch.Tensor, mode: str, dim: int, *, scale_by: float = 1.0) -> CastNumbers:
    data, scale = cast(source, mode, dim)
    scale = (scale.float() * scale_by).to(E8M0)
    return measure_cast(Cast(source, data, scale, dim, MX, mode == "floor"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [-1, 0])
@settings(max_examples=50)
@given(source=sources())
def test_no_right_cast_is_wrong(mode, dim, source):
    numbers = measured(source, mode, dim)
    assert numbers.mismatched == 0
    assert numbers.nonfinite >= source.isnan().sum()
    if not source.isfinite().all():
        return
    assert numbers.saturated == 0 or mode == "floor"
    if numbers.scaled_amax_maximum:
        lowest, highest = numbers.scaled_amax_minimum, numbers.scaled_amax_maximum
        assert 256 <= lowest <= highest < 512 if mode == "floor" else 224 < lowest <= highest <= 448


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize("exponent", [-110, -60, 0, 40])
def test_a_wrong_scale_of_one_small_block_shows(mode, factor, exponent):
    """Values below 1e-12 have scales too: that is where float8 with one scale clamps its amax."""
    source = (torch.randn(MX[1], MX[1], generator=torch.Generator().manual_seed(1)) * 2.0**exponent).bfloat16()
    right, wrong = measured(source, mode, -1), measured(source, mode, -1, scale_by=factor)
    assert wrong.mismatched > 0
    assert wrong.scaled_amax_maximum == right.scaled_amax_maximum / factor
