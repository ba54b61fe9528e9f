"""Blockwise float8 on the virtual device: operators cast as torchao's references do, and the probe measures them."""

from __future__ import annotations

import pytest
import torch

from harness.matrix.recipes import OPERATORS, SLICE, SQUARE
from harness.worker.probes.cast_numbers import Cast, measure_cast
from harness.worker.virtual import casts
from harness.worker.virtual.scaled_mm import scales_of_blocks

Tensor = torch.Tensor
REFERENCES = {
    "triton_fp8_blockwise_act_quant_lhs": "torch_blockwise_scale_act_quant_lhs",
    "triton_fp8_blockwise_act_quant_rhs": "torch_blockwise_scale_act_quant_rhs",
    "triton_fp8_blockwise_weight_quant_rhs": "torch_blockwise_scale_weight_quant",
}
BLOCKWISE = [name for name in OPERATORS if "blockwise" in name]


def cast_with(name: str, source: Tensor) -> tuple[Tensor, Tensor]:
    casts.install()
    from torchao.prototype.blockwise_fp8_training import kernels

    data, scale = getattr(kernels, name)(source)
    return data, scale


def source_of(rows: int = 256, columns: int = 384, *, zeros: bool = True) -> Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    values[:128, 128:256] *= not zeros
    return (values * torch.logspace(-30, 10, rows).unsqueeze(1)).bfloat16()


@pytest.mark.parametrize("name", REFERENCES)
def test_casts_have_the_bits_of_the_reference(name):
    source = source_of(zeros=False)  # of which references and kernels have other smallest amaxes
    data, scale = cast_with(name, source)
    from torchao.prototype.blockwise_fp8_training import kernels  # which needs the virtual device, or Triton

    expected, expected_scale = getattr(kernels, REFERENCES[name])(source)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scale, expected_scale)


@pytest.mark.parametrize("name", BLOCKWISE)
def test_every_cast_is_measured_as_right_and_one_wrong_scale_is_seen(name):
    operand, dim, *turned, _ = OPERATORS[name]
    data, scale = (
        part.t() if turns else part for part, turns in zip(cast_with(name, source_of()), turned, strict=True)
    )
    block = SQUARE if operand == "w" else SLICE
    right = measure_cast(Cast(source_of(), data, scale, dim, block))
    assert (right.mismatched, right.saturated, right.nonfinite) == (0, 0, 0)
    assert right.scaled_amax_minimum == pytest.approx(448, rel=2**-23) == right.scaled_amax_maximum
    scale[-1, -1] *= 2
    wrong = measure_cast(Cast(source_of(), data, scale, dim, block))
    assert wrong.scaled_amax_minimum == pytest.approx(224) and wrong.mismatched > 0
    assert wrong.extreme_blocks[0] == scale.numel() - 1


def test_scales_of_a_matmul_are_those_of_its_casts():
    a, of_a = cast_with("triton_fp8_blockwise_act_quant_lhs", source_of())
    b, of_b = cast_with("triton_fp8_blockwise_weight_quant_transposed_rhs", source_of(512))
    padded = torch.cat([of_b, of_b.new_ones(1, 4)])
    found = scales_of_blocks(a, b, of_a, padded)
    assert torch.equal(found[0], of_a) and torch.equal(found[1], of_b.t())
