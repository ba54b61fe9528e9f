"""The virtual `_scaled_grouped_mm`: exact in every role and scaling, and refused as a GPU refuses it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import ScalingType, SwizzleType

from harness.worker.virtual import casts, device
from harness.worker.virtual.scaled_rules import GPU

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    casts.install()
    device.install()


def ends_of(sizes) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def slices(sizes):
    ends = [0, *ends_of(sizes).tolist()]
    return [slice(*bounds) for bounds in pairwise(ends)]


def float8(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 30).to(E4M3)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) + 0.5


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 3).map(lambda count: 16 * count), min_size=1, max_size=4), behind=st.booleans())
def test_rows_and_columns_are_scaled_in_every_group(sizes, behind):
    count, rows = len(sizes), sum(sizes) + 16 * behind
    x, w = float8(rows, 32), float8(count, 48, 32, seed=1).transpose(-2, -1)
    of_x, of_w = scales(rows), scales(count, 48)
    out = torch._scaled_grouped_mm(x, w, of_x, of_w, ends_of(sizes))
    grad_t, x_t = float8(48, rows, seed=2), float8(32, rows, seed=3).t()
    if rows > 1:
        of_grad, of_x_t = scales(count * 48), scales(count * 32)
        wgrad = torch._scaled_grouped_mm(grad_t, x_t, of_grad, of_x_t, ends_of(sizes))
    for group, part in enumerate(slices(sizes)):
        exact = (x[part].double() @ w[group].double()) * (of_x[part, None].double() * of_w[group].double())
        assert torch.equal(out[part], exact.bfloat16())
        if rows > 1:
            exact = grad_t[:, part].double() @ x_t[part].double()
            exact *= of_grad.view(count, -1)[group][:, None].double() * of_x_t.view(count, -1)[group].double()
            assert torch.equal(wgrad[group], exact.bfloat16())
    assert out[sum(sizes) :].isnan().all()


def test_products_of_3d_operands_are_scaled():
    a, b = float8(2, 16, 32), float8(2, 48, 32, seed=1).transpose(-2, -1)
    of_a, of_b = scales(2, 16), scales(2, 48)
    exact = (a.double() @ b.double()) * (of_a[..., None].double() * of_b[:, None].double())
    assert torch.equal(torch._scaled_grouped_mm(a, b, of_a, of_b), exact.bfloat16())
    flat, both = b.transpose(-2, -1).reshape(96, 32).t(), ends_of([48, 48])
    side_by_side = torch._scaled_grouped_mm(a, flat, of_a, of_b.flatten(), both)
    assert torch.equal(side_by_side, exact.bfloat16().permute(1, 0, 2).reshape(16, 96))


def in_blocks(rows: int, columns: int, seed: int):
    """Integers with scales of 32 values, and what they stand for."""
    draw = torch.Generator().manual_seed(seed)
    data = torch.randint(-4, 5, (rows, columns), generator=draw).to(E4M3)
    exponents = torch.randint(124, 131, (rows, columns // 32), generator=draw, dtype=torch.uint8)
    return data, exponents.view(E8M0), data.double() * exponents.view(E8M0).double().repeat_interleave(32, 1)


@settings(max_examples=20)
@given(sizes=st.lists(st.sampled_from((0, 32, 64, 160)), min_size=1, max_size=4), behind=st.booleans())
def test_blocks_are_scaled_in_every_group(sizes, behind):
    from torchao.prototype.moe_training.kernels.mxfp8 import quant

    rows, count = sum(sizes) + 32 * behind, len(sizes)
    x, of_x, x_exact = in_blocks(rows, 64, 0)
    w, of_w, w_exact = (
        torch.stack(parts) for parts in zip(*(in_blocks(48, 64, 1 + i) for i in range(count)), strict=True)
    )
    of_x, _ = quant.torch_to_blocked_2d_M_groups(
        torch.nn.functional.pad(of_x.view(torch.uint8), (0, 2)), ends_of(sizes)
    )
    of_w = quant.torch_to_blocked_per_group_3d(of_w)
    out = torch._scaled_grouped_mm(x, w.transpose(-2, -1), of_x.view(E8M0), of_w, ends_of(sizes))

    grad_t, of_grad, grad_exact = in_blocks(48, rows, 8)
    x_t, of_x_t, x_t_exact = in_blocks(64, rows, 9)
    if rows > 1:
        in_groups = (quant.torch_to_blocked_2d_K_groups(scale, ends_of(sizes) // 32)[0] for scale in (of_grad, of_x_t))
        wgrad = torch._scaled_grouped_mm(grad_t, x_t.t(), *in_groups, ends_of(sizes))
    for group, part in enumerate(slices(sizes)):
        assert torch.equal(out[part], (x_exact[part] @ w_exact[group].t()).bfloat16())
        if rows > 1 and sizes[group]:
            assert torch.equal(wgrad[group], (grad_exact[:, part] @ x_t_exact[:, part].t()).bfloat16())
        elif rows > 1:
            assert wgrad[group].isnan().all()
    assert out[sum(sizes) :].isnan().all()


def test_the_second_version_names_the_recipe():
    x, w, ends = float8(32, 32), float8(2, 48, 32).transpose(-2, -1), ends_of([16, 16])
    rows = ScalingType.RowWise
    grouped = torch.nn.functional.scaled_grouped_mm
    product = grouped(x, w, scales(32), rows, scales(2, 48), rows, offs=ends)
    assert torch.equal(product, torch._scaled_grouped_mm(x, w, scales(32), scales(2, 48), ends))
    with pytest.raises(ValueError, match="No gemm implementation was found"):
        grouped(x, w, scales(32), ScalingType.TensorWise, scales(2, 48), rows, offs=ends)
    blocks, one = ScalingType.BlockWise1x32, torch.ones(1, dtype=E8M0)
    with pytest.raises(ValueError, match="must be SWIZZLE_32_4_4"):
        grouped(x, w, one, blocks, one, blocks, SwizzleType.NO_SWIZZLE, SwizzleType.NO_SWIZZLE, offs=ends)


def refusal(*args, **others) -> str:
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as caught:
        torch._scaled_grouped_mm(*args, **others)
    return str(caught.value)


def test_what_a_gpu_refuses_is_refused_with_its_words():
    x, w, ends = float8(32, 32), float8(2, 48, 32).transpose(-2, -1), ends_of([16, 16])
    of_x, of_w = scales(32), scales(2, 48)
    assert "mat_a to be Float8_e4m3 matrix got Float8_e5m2" in refusal(x.to(torch.float8_e5m2), w, of_x, of_w, ends)
    assert "Expected mat1 to not be transposed" in refusal(x.t().contiguous().t(), w, of_x, of_w, ends)
    assert "Expected mat2 to be transposed" in refusal(x, w.contiguous(), of_x, of_w, ends)
    assert "scale must have the same length as mat for arg 0" in refusal(x, w, of_x[:16], of_w, ends)
    assert "same batch dimension as mat for arg 1" in refusal(x, w, of_x, of_w[:1], ends)
    assert "scales must both be float8_e8m0fnu tensors" in refusal(x, w, of_x.double(), of_w.double(), ends)
    assert "Offsets have to be int32" in refusal(x, w, of_x, of_w, ends.long())
    assert "Have to provide offsets if there is a 2d matrix" in refusal(x, w, of_x, of_w)
    assert "Only bf16 high precision output" in refusal(x, w, of_x, of_w, ends, out_dtype=torch.float32)
    assert "Bias not supported yet" in refusal(x, w, of_x, of_w, ends, bias=of_x)
    assert "matrix batch sizes have to match" in refusal(x, w, of_x, of_w, ends_of([16, 8, 8]))
    assert "Invalid strides/sizes, got [64, 2]" in refusal(float8(32, 64)[:, ::2], w, of_x, of_w, ends)
    assert "less than tensor size" in refusal(x, w, of_x, of_w, ends_of([16, 32]))
    narrow = float8(2, 40, 32).transpose(-2, -1)
    assert "mat_b shape to be divisible by 16" in refusal(x, narrow, of_x, scales(2, 40), ends)
    assert "mat_a to be divisible by 16" in refusal(
        *(float8(48, 32)[:, :24], float8(32, 32).t()[:24], scales(96), scales(64), ends_of([16, 8]))
    )
    rows, columns = float8(48, 32), float8(64, 32).t()
    assert "non-negative multiple of 16" in refusal(rows, columns, scales(96), scales(128), ends_of([8, 24]))


@pytest.mark.parametrize(
    ("gpu", "words"),
    [((8, 9), "only supported on CUDA devices with compute capability = [9.0, 10.0]"), ((9, 0), "is one of SM 10.0")],
)
def test_a_gpu_without_the_kernel_refuses_it(gpu, words, monkeypatch):
    x, w = float8(32, 64), float8(2, 48, 64).transpose(-2, -1)
    of_x, of_w = torch.ones(384, 4).to(E8M0), torch.ones(2, 512).to(E8M0)
    monkeypatch.setattr(GPU, "capability", (10, 0))
    torch._scaled_grouped_mm(x, w, of_x, of_w, ends_of([16, 16]))
    monkeypatch.setattr(GPU, "capability", gpu)
    assert words in refusal(x, w, of_x, of_w, ends_of([16, 16]))


def test_what_the_kernel_of_blocks_refuses_is_refused():
    x, w = float8(64, 64), float8(2, 32, 64).transpose(-2, -1)
    ones = torch.ones(2, 512, dtype=E8M0)
    assert "2d-2d and 2d-3d" in refusal(float8(2, 32, 64), w, ones, ones)
    few, many = torch.ones(64, 4, dtype=E8M0), torch.ones(128, 8, dtype=E8M0)
    assert "must have scale shape (2,4,128) for arg 1, got: 2, 256" in refusal(
        x, w, few, ones[:, :256].contiguous(), ends_of([32, 32])
    )
    assert "arg 0 tensor shape (64, 64) must have scale.shape[0] >= 64" in refusal(
        x, w, ones[:1], ones, ends_of([32, 32])
    )
    assert "scales end before" in refusal(x, w, few, ones, ends_of([32, 32]))
    assert "whole blocks of 32" in refusal(x, x.t(), many, many, ends_of([16, 48]))
