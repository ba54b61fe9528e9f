"""Grouped matmuls of torchao on the virtual device: bits of casts, sizes that a GPU refuses, and the whole autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.worker.dispatch_hooks import matmuls, products
from harness.worker.dispatch_hooks.matmuls import GroupedMM
from harness.worker.virtual import casts, device

E4M3 = torch.float8_e4m3fn
EXTREMES = (0.0, -0.0, 2.0**-133, -(2.0**-127), 1e-13, 448.0, 3.3e38, math.inf, math.nan)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    casts.install()
    device.install()


@st.composite
def sources(draw: st.DrawFn, *shape: int) -> torch.Tensor:
    """bfloat16 or float32 of any magnitude, in which some rows, columns or values are of one extreme."""
    dtype = draw(st.sampled_from((torch.bfloat16, torch.float32)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    source = torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-130, 120))
    for value in draw(st.lists(st.sampled_from(EXTREMES), max_size=3)):
        row, column = draw(st.integers(0, shape[-2] - 1)), draw(st.integers(0, shape[-1] - 1))
        part = draw(st.sampled_from(((row, column), (row, slice(None)), (slice(None), column))))
        source[(..., *part)] = value
    return source.to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """The same shape, dtype and bits; the sign and payload of a NaN depend on how torch vectorises a layout."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    nan = found.float().isnan()
    numbers = [tensor.contiguous()[~nan].view(torch.uint8) for tensor in (found, expected)]
    return torch.equal(nan, expected.float().isnan()) and torch.equal(*numbers)


def cast(name: str, *args, **named):
    """The results of torchao's operator, which also has the shapes, strides and dtypes of its fake kernel."""
    operator = getattr(torch.ops.torchao, name).default
    torch.library.opcheck(operator, args, named, test_utils=("test_schema", "test_faketensor"))
    return operator(*args, **named)


def float8(source: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    rows = ScalingGranularity.AXISWISE
    scale = tensor_to_scale(source, E4M3, scaling_granularity=rows, axiswise_dim=dim, round_scales_to_power_of_2=True)
    return to_fp8_saturated(source.to(torch.float32) * scale, E4M3), scale


@given(source=sources(48, 32))
def test_rows_have_the_bits_of_the_reference(source):
    data, scale = cast("triton_fp8_rowwise_2d_scale_and_cast", source, E4M3, True)
    expected, expected_scale = float8(source, -1)
    assert same(data, expected) and same(scale, expected_scale)


@given(source=sources(3, 48, 32))
def test_weights_have_the_bits_of_the_reference_in_forward_and_dgrad(source):
    from torchao.prototype.moe_training.utils import torch_to_3d_rowwise_float8_transpose_rhs

    by_column = source.transpose(-2, -1).contiguous().transpose(-2, -1)
    data, scale = cast("triton_fp8_colwise_3d_scale_and_cast", by_column, E4M3, True)
    expected, expected_scale = float8(source, -2)
    assert same(data, expected) and same(scale, expected_scale)
    data, scale = cast("triton_fp8_rowwise_transpose_rhs", by_column, E4M3, True)
    expected, expected_scale = torch_to_3d_rowwise_float8_transpose_rhs(
        by_column, E4M3, round_scales_to_power_of_2=True
    )
    assert same(data, expected) and same(scale, expected_scale.squeeze(1))


@given(grad=sources(64, 32), x=sources(64, 48), sizes=st.permutations((16, 0, 32)))
def test_groups_have_the_bits_of_the_reference_and_empty_ones_the_scale_of_zeros(grad, x, sizes):
    from torchao.prototype.moe_training.utils import torch_to_float8_per_group_colwise

    ends = torch.tensor(sizes).cumsum(0).int()
    outputs = cast("triton_fp8_per_group_colwise_scales_dual", grad, x, ends, E4M3, True)
    for source, data, scale in ((grad, *outputs[:2]), (x, *outputs[2:])):
        kept = torch.tensor([size > 0 for size in sizes])
        expected, expected_scale = torch_to_float8_per_group_colwise(
            source[:48], ends[kept], E4M3, round_scales_to_power_of_2=True
        )
        assert same(data[:48], expected) and data[48:].float().isnan().all()
        assert same(scale.view(3, -1)[kept].flatten(), expected_scale)
        assert same(scale.view(3, -1)[~kept], float8(torch.zeros(1, source.shape[1]), 0)[1])


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@given(source=sources(384, 128))
def test_blocks_of_rows_and_weights_have_the_bits_of_the_reference(mode, source):
    from torchao.prototype.moe_training.kernels.mxfp8 import quant
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    ends = torch.tensor([128, 128, 384], dtype=torch.int32)
    data, scale = cast("mxfp8_quantize_2d_1x32_cutedsl", source, 32, mode, 2, ends)
    expected_scale, expected = to_mx(source, E4M3, 32, ScaleCalculationMode(mode))
    blocked, _ = quant.torch_to_blocked_2d_M_groups(expected_scale.view(torch.uint8), ends)
    assert same(data, expected) and same(scale.view(torch.uint8), blocked[:384])
    assert same(cast("mx_block_rearrange_2d_M_groups", expected_scale.view(torch.uint8), ends, 4), blocked)

    experts = source.view(3, 128, 128)
    data, scale = cast("mxfp8_quantize_3d_cutedsl", experts, 32, 32, 1, mode)
    expected, expected_scale = quant._mxfp8_quantize_reference_3d(
        experts, block_size=32, scale_block_dim1=32, scale_block_dim2=1, scaling_mode=mode, blocked_scale_output=True
    )
    assert same(data, expected) and same(scale, expected_scale)


@given(rows=st.integers(1, 300), sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_scales_are_put_where_torchao_puts_them(rows, sizes, seed):
    from torchao.prototype.moe_training.kernels.mxfp8 import quant

    draw = torch.Generator().manual_seed(seed)
    scale = torch.randint(0, 255, (rows, sum(sizes) + 1), generator=draw, dtype=torch.uint8)
    ends = torch.tensor(sizes).cumsum(0).int()
    expected, _ = quant.torch_to_blocked_2d_K_groups(scale, ends)
    assert same(cast("triton_mx_block_rearrange_2d_K_groups", scale, ends), expected)
    experts = torch.stack([scale, scale.flip(0)])
    expected = quant.torch_to_blocked_per_group_3d(experts)
    assert same(cast("triton_mx_block_rearrange_per_group_3d", experts), expected)


def trained(config, sizes, dim: int = 128):
    """Output, and gradients of rows and weights, of a matmul of experts, converted where there is a configuration."""
    from torchao.prototype.moe_training.utils import _quantize_then_scaled_grouped_mm

    draw = torch.Generator().manual_seed(0)
    rows = sum(sizes)
    x, w, grad = (
        torch.randn(shape, generator=draw).bfloat16() for shape in ((rows, dim), (len(sizes), 256, dim), (rows, 256))
    )
    leaves = x.requires_grad_(), w.requires_grad_()
    ends = torch.tensor(sizes).cumsum(0).int()
    if config is None:
        out = torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)
    else:
        out = _quantize_then_scaled_grouped_mm(x, w.transpose(-2, -1), config, ends)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("wgrad_with_hp", [False, True])
def test_mxfp8_has_the_bits_of_the_emulation_and_no_gradient_of_an_empty_group(wgrad_with_hp):
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.quantization.quantize_.common import KernelPreference

    sizes = (128, 0, 256)
    automatic, emulated = (
        trained(MXFP8TrainingOpConfig(kernel_preference=preference, wgrad_with_hp=wgrad_with_hp), sizes)
        for preference in (KernelPreference.AUTO, KernelPreference.EMULATED)
    )
    for auto, reference in zip(automatic[:2], emulated[:2], strict=True):
        assert torch.equal(auto, reference)
    full = torch.tensor([0, 2])
    assert torch.equal(automatic[2][full], emulated[2][full])
    assert automatic[2][1].isnan().all() == (not wgrad_with_hp)


def test_float8_multiplies_what_its_reference_casts():
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig

    sizes, start = (48, 0, 80), 0
    out, of_x, of_w = trained(Float8TrainingOpConfig(), sizes)
    draw = torch.Generator().manual_seed(0)
    x, w, grad = (torch.randn(shape, generator=draw).bfloat16() for shape in ((128, 128), (3, 256, 128), (128, 256)))

    def dequantized(source: torch.Tensor, dim: int) -> torch.Tensor:
        data, scale = float8(source, dim)
        return data.double() / scale.double()

    for group, size in enumerate(sizes):
        rows = slice(start, start := start + size)
        assert torch.equal(out[rows], (dequantized(x[rows], 1) @ dequantized(w[group], 1).t()).bfloat16())
        assert torch.equal(of_x[rows], (dequantized(grad[rows], 1) @ dequantized(w[group], 0)).bfloat16())
        if size:
            assert torch.equal(of_w[group], (dequantized(grad[rows], 0).t() @ dequantized(x[rows], 0)).bfloat16())
    assert not of_w[1].any()


def test_sizes_that_a_gpu_refuses_are_refused():
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig

    with pytest.raises(AssertionError, match="M must be divisible by 128"):
        trained(MXFP8TrainingOpConfig(), (128, 32))
    with pytest.raises(AssertionError, match="K must be divisible by 128"):
        trained(MXFP8TrainingOpConfig(), (128, 128), dim=64)
    with pytest.raises(RuntimeError, match="Group sizes must be multiples of 128"):
        trained(MXFP8TrainingOpConfig(), (96, 160))
    with pytest.raises(RuntimeError, match="non-negative multiple of 16"):
        trained(Float8TrainingOpConfig(), (24, 40))
    with pytest.raises(AssertionError, match="M must be divisible by 128"):  # torchao pads groups to 32 alone
        trained(MXFP8TrainingOpConfig(pad_token_groups_for_grouped_mm=True), (100, 28))


def test_columns_in_blocks_have_the_bits_of_the_reference():
    from torchao.prototype.mx_formats.utils import to_blocked

    source = torch.randn(128, 256).bfloat16()
    data, scale = cast("mxfp8_quantize_2d_32x1_cutedsl", source)
    data_of_t, scale_of_t = casts.reference_cast(source.t(), "rceil")
    assert same(data, data_of_t.t()) and data.is_contiguous() and same(scale, to_blocked(scale_of_t))


@pytest.mark.parametrize("columns", [1, 32])
def test_experts_are_cast_in_blocks_of_both_shapes(columns):
    source = torch.randn(2, 64, 32).bfloat16()
    data, scale = cast("mxfp8_quantize_3d_cutedsl", source, 32, 32, columns, "floor", 2, False)
    shared = scale.float().repeat_interleave(32, 1).repeat_interleave(columns, 2)
    amax = source.float().abs().unflatten(1, (2, 32)).amax(2)
    wanted = amax if columns == 1 else amax.amax(-1, keepdim=True)
    assert torch.equal(scale.float(), torch.exp2(torch.floor(torch.log2(wanted)) - 8))
    # FLOOR saturates what is above 448/512 of the next power of two: off by up to an eighth of it, and rounding by less
    assert (data.float() * shared - source.float()).abs().max() <= source.float().abs().max() / 8


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), behind=st.integers(0, 40))
def test_padded_groups_start_aligned_and_come_back(sizes, behind):
    ends = torch.tensor(sizes).cumsum(0).int()
    tokens = torch.randn(sum(sizes) + behind, 8)
    padded, starts, padded_ends = cast("fused_pad_token_groups", tokens, ends, 32)
    assert not (starts % 32).any() and not (padded_ends % 32).any()
    back = cast("fused_unpad_token_groups", padded, ends, starts, len(tokens), 32)
    assert torch.equal(back[: ends[-1]], tokens[: ends[-1]]) and back[ends[-1] :].isnan().all()


@pytest.mark.parametrize("name", ["bf16", "float8", "mxfp8", "mxfp8_emulated"])
def test_grouped_matmuls_are_observed_with_their_groups_and_nothing_beside(name):
    from torchao.prototype.moe_training import config as ao
    from torchao.quantization.quantize_.common import KernelPreference

    configs = {
        "float8": ao.Float8TrainingOpConfig(),
        "mxfp8": ao.MXFP8TrainingOpConfig(),
        "mxfp8_emulated": ao.MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED),
    }
    calls: list[GroupedMM] = []
    others: list[products.Product] = []
    matmuls.grouped_observers.append(calls.append)
    products.observers.append(others.append)
    try:
        trained(configs.get(name), (128, 0, 256))
    finally:
        matmuls.grouped_observers.remove(calls.append)
        products.observers.remove(others.append)
    assert sorted(call.is_wgrad for call in calls) == [False, False, True]
    assert {call.sizes for call in calls} == {(128, 0, 256)} and not others
    assert [call.flops for call in calls] == [2 * 384 * 128 * 256] * 3
    in_float8 = name in {"float8", "mxfp8"}  # emulated operands are dequantized before: not what a GPU multiplies
    assert {call.a.dtype for call in calls} == {E4M3 if in_float8 else torch.bfloat16}
    assert all((call.scale_a is not None) == (call.scale_b is not None) == in_float8 for call in calls)


def test_every_layout_of_a_grouped_matmul_has_its_flops():
    a, b, ends = torch.empty(3, 16, 32), torch.empty(3, 32, 48), torch.tensor([8, 8, 40], dtype=torch.int32)
    assert GroupedMM(a, b, None).flops == 2 * 3 * 16 * 32 * 48
    assert GroupedMM(a[0].new_empty(50, 32), b, ends).flops == 2 * 40 * 32 * 48
    assert GroupedMM(a, b.new_empty(32, 50), ends).flops == 2 * 16 * 32 * 40
    assert GroupedMM(a.new_empty(16, 50), b.new_empty(50, 48), ends).flops == 2 * 16 * 40 * 48
