"""What one rank computes for several TP ranks has the shape, the parts and the rounding of theirs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, float8_ops

from harness.worker.one_rank.tensor_ranks import FLOAT8_MATMUL, ScaledProducts, of_columns, of_rows, of_sequence, spread
from harness.worker.tensors.reduction import summed
from harness.worker.virtual import device as virtual_device

BF16 = torch.bfloat16


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(BF16)


def test_a_sum_is_rounded_once_and_in_rank_order() -> None:
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=BF16)
    assert summed(parts).item() == 258  # rounded after every addition it would be 256
    wide = torch.tensor([[1e8], [1.0], [-1e8]])
    assert summed(wide).item() == 0  # in float32 the second part is lost


def test_gradients_of_a_shared_tensor_are_summed_by_every_rank_first() -> None:
    given = torch.zeros(1, dtype=BF16, requires_grad=True)
    stack = spread(given, 2)
    readers = torch.tensor([[256.0, 1.0], [1.0, 1.0]], dtype=BF16)  # by reader and rank
    sum((stack[:, 0] * reader).sum() for reader in readers).backward()
    assert given.grad.item() == 258  # 256 + 1 is 256 on the first rank, 1 + 1 is 2 on the second


@pytest.mark.parametrize("ranks", [2, 4])
def test_linears_in_high_precision_multiply_in_the_shapes_of_ranks(ranks: int) -> None:
    linear = nn.Linear(64, 32, bias=False).to(BF16)
    given = random(3, 5, 64)
    columns = of_columns(linear, ranks)(spread(given, ranks))
    parts = of_rows(linear, ranks)(given)
    assert (columns.shape, parts.shape) == ((3, 5, 32), (ranks, 3, 5, 32))
    for result in (columns, summed(parts)):
        torch.testing.assert_close(result, linear(given), rtol=0.02, atol=0.02)
    first = 64 // ranks
    assert torch.equal(parts[0], F.linear(given[..., :first].contiguous(), linear.weight[:, :first].contiguous()))


def test_the_weight_of_a_norm_has_the_gradients_of_all_ranks() -> None:
    norm, given = nn.RMSNorm(8).to(BF16), random(2, 6, 8)
    places = [(slice(0, 2), slice(0, 3), slice(0, 8)), (slice(0, 2), slice(3, 6), slice(0, 8))]
    forward = of_sequence(norm, places, ())
    normed = forward(given)
    assert torch.equal(normed, norm(given))
    (of_all,) = torch.autograd.grad(normed.sum(), norm.weight)
    of_ranks = [torch.autograd.grad(norm(given[place]).sum(), norm.weight)[0] for place in places]
    assert torch.equal(of_all, summed(torch.stack(of_ranks)))
    for _ in range(2):  # microbatches: ranks add up theirs before they add up ranks
        forward(given).sum().backward()
    assert torch.equal(norm.weight.grad, summed(torch.stack([grad + grad for grad in of_ranks])))


def test_a_router_has_the_gradients_of_all_ranks_of_the_sequence() -> None:
    gate, given = nn.Linear(8, 4, bias=False).to(BF16), random(2, 6, 8)
    places = [(slice(0, 2), slice(0, 3), slice(0, 4)), (slice(0, 2), slice(3, 6), slice(0, 4))]  # of its output
    scores = of_sequence(gate, places, ())(given)
    torch.testing.assert_close(scores, gate(given))
    (of_all,) = torch.autograd.grad(scores.sum(), gate.weight)
    of_ranks = [torch.autograd.grad(gate(given[place[:-1]]).sum(), gate.weight)[0] for place in places]
    assert torch.equal(of_all, summed(torch.stack(of_ranks)))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scaled_matmuls_are_multiplied_again_in_parts(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual_device.install()
    linear = nn.Linear(96, 32, bias=False, dtype=BF16)
    module = convert_to_float8_training(nn.Sequential(linear), config=Float8LinearConfig.from_recipe_name(recipe))
    products = ScaledProducts()
    monkeypatch.setattr(float8_ops, "addmm_float8_unwrapped", float8_ops.addmm_float8_unwrapped)
    products.watch(FLOAT8_MATMUL)
    assert products.in_parts(96, 2) is None
    output = module(random(16, 96).requires_grad_())
    parts = products.in_parts(96, 4)  # of 24 columns: padded
    assert parts.shape == (4, 16, 32)
    torch.testing.assert_close(parts.double().sum(0), output.double(), rtol=0.02, atol=0.02)
    products.restart()
    output.sum().backward()
    assert products.in_parts(32, 2).shape == (2, 16, 96), "the gradient of the input comes first"
