"""The virtual `_grouped_mm`: exact in every role, the same for a row whatever is around it, the refusals of a GPU."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.worker.probes.experts import ALL, of_tokens
from harness.worker.targets.reference.experts import padded_groups
from harness.worker.virtual import device
from harness.worker.virtual.grouped_mm import exact_product

BF16 = torch.bfloat16
SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=5)


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    device.install()


def ends_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def operands(rows: int, groups: int, seed: int, dtype: torch.dtype = BF16):
    """Rows, weights as `GroupedExperts` hands them over, and a gradient, of magnitudes from 2**-60 to 2**60."""
    draw = torch.Generator().manual_seed(seed)

    def wide(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * 2.0 ** torch.randint(-60, 61, shape, generator=draw)

    x, w, grad = (tensor.to(dtype) for tensor in (wide(rows, 16), wide(groups, 24, 16), wide(rows, 24)))
    return x.requires_grad_(), w.requires_grad_(), grad


def trained(x, w, grad, offs):
    out = torch._grouped_mm(x, w.transpose(-2, -1), offs=offs)
    return out, *torch.autograd.grad(out, (x, w), grad)


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In fractions, rounded to float64."""
    columns = [[Fraction(value) for value in column] for column in b.t().tolist()]
    rows = ([Fraction(value) for value in row] for row in a.tolist())
    sums = [[float(sum(map(Fraction.__mul__, row, column), Fraction())) for column in columns] for row in rows]
    return torch.tensor(sums, dtype=torch.float64).reshape(len(a), b.shape[1])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@settings(max_examples=8, deadline=None)
@given(sizes=SIZES, behind=st.integers(0, 3), seed=st.integers(0, 10**6))
def test_forward_dgrad_and_wgrad_are_exact_in_every_group(dtype, sizes, behind, seed):
    x, w, grad = operands(sum(sizes) + behind, len(sizes), seed, dtype)
    out, of_x, of_w = trained(x, w, grad, ends_of(sizes))
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start := start + size)
        assert torch.equal(out[rows], exact(x[rows], w[group].t()).to(dtype))
        assert torch.equal(of_x[rows], exact(grad[rows], w[group]).to(dtype))
        assert torch.equal(of_w[group], exact(grad[rows].t(), x[rows]).to(dtype))
    assert out[start:].isnan().all() and of_x[start:].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@settings(max_examples=15, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10**6))
def test_a_row_has_the_same_bits_alone_and_a_weight_whatever_the_order_of_its_rows(dtype, sizes, seed):
    x, w, grad = operands(sum(sizes), len(sizes), seed, dtype)
    out, of_x, of_w = trained(x, w, grad, ends_of(sizes))
    start = 0
    for group, size in enumerate(sizes):
        rows, weight = torch.arange(start, start := start + size), w[group : group + 1]
        for row in rows[:, None]:
            alone, of_row, _ = trained(x[row], weight, grad[row], ends_of([1]))
            assert torch.equal(alone, out[row]) and torch.equal(of_row, of_x[row])
        shuffled = rows[torch.randperm(size, generator=torch.Generator().manual_seed(seed))]
        _, _, again = trained(x[shuffled], weight, grad[shuffled], ends_of([size]))
        assert torch.equal(again[0], of_w[group])


@given(
    values=st.lists(st.sampled_from((0.0, -0.0, 2.0**-133, 1.5, 3.3e38, math.inf, -math.inf, math.nan)), min_size=4),
    others=st.lists(st.sampled_from((0.0, 2.0**-133, -1.5, 3.3e38, math.inf, math.nan)), min_size=4),
)
def test_what_is_not_finite_ends_up_where_ieee_arithmetic_puts_it(values, others):
    count = min(len(values), len(others))
    a, b = torch.tensor(values[:count]).double(), torch.tensor(others[:count]).double()
    expected = sum((a * b).tolist(), 0.0)
    found = exact_product(torch.stack([a, torch.ones_like(a)]), b[:, None])[:, 0].tolist()
    assert found[0] == pytest.approx(expected, nan_ok=True)
    assert found[1] == pytest.approx(sum(others[:count], 0.0), nan_ok=True)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_products_of_3d_and_2d_operands_are_the_same(dtype):
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 16, 16, generator=draw).to(dtype) for _ in range(2))
    whole = torch._grouped_mm(a, b)
    side_by_side = torch._grouped_mm(a, b.permute(1, 0, 2).reshape(16, 48), offs=ends_of([16, 16, 16]))
    for group in range(3):
        expected = exact(a[group], b[group]).to(dtype)
        assert torch.equal(whole[group], expected)
        assert torch.equal(side_by_side[:, 16 * group : 16 * (group + 1)], expected)


def refusal(a, b, offs=None, **others) -> str:
    with pytest.raises(RuntimeError) as caught:
        torch._grouped_mm(a, b, offs=offs, **others)
    return str(caught.value)


def test_what_a_gpu_refuses_is_refused_with_its_words():
    x, w, grad = (tensor.detach() for tensor in operands(32, 2, 0))
    w_t, offs = w.transpose(-2, -1), ends_of([16, 16])
    assert "Expected mat_a to be Float32, BFloat16" in refusal(x.double(), w_t, offs)
    assert "contraction dimension" in refusal(x, w, offs)
    assert "Offsets have to be int32" in refusal(x, w_t, offs.long())
    assert "Have to provide offsets" in refusal(x, w_t)
    assert "matrix batch sizes have to match" in refusal(x, w_t, ends_of([32]))
    assert "strides should be multiple of 16 bytes" in refusal(x[:, :12].contiguous(), w_t[:, :12], offs)
    assert "Invalid strides/sizes" in refusal(torch.ones((), dtype=BF16).expand(32, 16), w_t, offs)
    assert "Bias not supported" in refusal(x, w_t, offs, bias=x)
    assert "output dtype must match" in refusal(x, w_t, offs, out_dtype=torch.float32)
    assert "greater or equal 0" in refusal(x, w_t, torch.tensor([16, 8], dtype=torch.int32))
    assert "less than tensor size" in refusal(x, w_t, ends_of([16, 17]))
    rows = grad.t().contiguous()
    assert "non-negative multiple of 16" in refusal(rows, x, ends_of([12, 20]))
    assert torch._grouped_mm(rows, x, offs=ends_of([16, 12])).isfinite().all()  # of the last group any size will do
    assert torch._grouped_mm(rows.float(), x.float(), offs=ends_of([12, 20])).isfinite().all()


@given(SIZES, st.sampled_from([0, 4, 16]), st.integers(0, 5))
def test_rows_that_pad_groups_are_of_no_token(sizes: list[int], multiple: int, behind: int) -> None:
    rows, counts = torch.arange(1.0, sum(sizes) + 1)[:, None], torch.tensor(sizes)
    given, padded, behind = rows, counts, behind if multiple else 0
    if multiple:
        places, ends = padded_groups(counts, multiple)
        padded = ends.diff(prepend=ends.new_zeros(1))
        given = torch.zeros(int(ends[-1]) + behind, 1).index_copy(0, places, rows)
    which, own = of_tokens(given, padded)
    assert torch.equal(given[which], rows) and own == tuple(sizes)


def test_a_row_of_zeros_is_of_a_token_where_groups_are_not_padded() -> None:
    which, own = of_tokens(torch.tensor([[1.0], [0.0], [2.0], [0.0], [0.0]]), torch.tensor([2, 3]))
    assert which == ALL and own == (2, 3)
