"""Matmuls of bfloat16 on the virtual device: rounded once, in any layout; everything else is torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.worker.virtual import device

Matmul = Callable[..., torch.Tensor]
BF16 = torch.bfloat16
MATMULS: dict[str, Matmul] = {
    "mm": torch.mm,
    "bmm": lambda a, b, **out: torch.bmm(a[None], b[None], **out),
    "addmm": lambda a, b, **out: torch.addmm(b[0], a, b, beta=0.5, alpha=2, **out),
}


def operands(rows: int = 40, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    a, b = torch.randn(rows, 96, generator=random), torch.randn(96, 72, generator=random)
    return a.to(dtype), b.to(dtype)


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    device.install(compiled=False)


@pytest.mark.parametrize("name", MATMULS)
def test_a_product_is_the_exact_one_rounded(name: str) -> None:
    a, b = operands()
    exact = MATMULS[name](a.double(), b.double())
    assert torch.equal(MATMULS[name](a, b), exact.to(BF16))
    assert torch.equal(MATMULS[name](a, b, out=a.new_empty(0)), exact.to(BF16))


def test_an_element_depends_neither_on_the_layout_nor_on_the_other_rows() -> None:
    a, b = operands()
    whole = a @ b
    assert torch.equal(a.t().contiguous().t() @ b.t().contiguous().t(), whole)
    assert torch.equal(a[7:9] @ b[:, 5:], whole[7:9, 5:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_torchs(dtype: torch.dtype) -> None:
    a, b = operands(dtype=dtype)
    expected = torch.einsum("ik,kj->ij", a, b)
    torch.testing.assert_close(a @ b, expected)
    assert torch.mm(a, b, out=a.new_empty(40, 72)).dtype == dtype


def test_gradients_are_products_too() -> None:
    a, b = operands()
    weight = b.clone().requires_grad_()
    (a @ weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, (a.double().t() @ torch.ones(40, 72).double()).to(BF16))


@pytest.mark.parametrize("wrong", [lambda a, b: a @ b.float(), lambda a, b: a @ a, lambda a, b: torch.addmm(b, a, b)])
def test_what_torch_refuses_is_refused(wrong: Matmul) -> None:
    with pytest.raises(RuntimeError, match=r"dtype|shapes|match"):
        wrong(*operands())
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(*operands(), out=torch.empty(40, 72))
