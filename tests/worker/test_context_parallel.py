"""Pieces of sequences: which positions ranks have, and one rank that computes what all of them do."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from harness.checks.divergence import with_operands
from harness.matrix.caseid import parse_case_id
from harness.matrix.layout import Layout, positions_of_ranks
from harness.worker.targets.in_pieces import InPieces, take_grads, use_pieces, uses_of_weights
from harness.worker.targets.reference.context_parallel import OfAllRanks
from harness.worker.targets.reference.model import apply_rope, attend, rope_cache
from harness.worker.tensors.names import clean_fqn

BATCH, SEQ, HEADS, KEYS, DIM = 2, 32, 4, 2, 8


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_the_positions_that_torch_gives_them(ranks: int) -> None:
    layout = Layout(dp_shard=ranks, cp=ranks)
    balancer = _HeadTailLoadBalancer(SEQ, ranks, torch.device("cpu"))
    indices = balancer._generate_indices(restore=False)
    assert indices is not None
    assert [list(positions) for positions in positions_of_ranks(layout, SEQ)] == indices.view(ranks, -1).tolist()


@pytest.mark.parametrize("order", ["headtail", "contiguous"])
def test_attention_of_all_pieces_is_that_of_whole_sequences(order: str) -> None:
    pieces = positions_of_ranks(Layout(dp_shard=4, cp=4, sequence_order=order), SEQ)
    cos, sin = (table.double() for table in rope_cache(DIM, SEQ))
    whole = [random(BATCH, SEQ, heads, DIM).requires_grad_() for heads in (HEADS, KEYS, KEYS)]
    context = OfAllRanks(pieces, torch.device("cpu"))
    q, k, v = whole
    expected = attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
    found = context.attend(*(context.cut(tensor) for tensor in whole), cos, sin)
    weights = random(*expected.shape)
    for one, other in zip(
        (found, *torch.autograd.grad(found, whole, context.cut(weights))),
        (context.cut(expected), *torch.autograd.grad(expected, whole, weights)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dim", "rows"), [(-3, (2 * BATCH, SEQ)), (-2, (2 * SEQ,))])
def test_a_module_in_pieces_has_the_gradients_of_every_piece(dim: int, rows: tuple[int, ...]) -> None:
    linear = nn.Linear(DIM, 3).double()
    model = nn.Sequential(linear)
    use_pieces(model, 2, dim)
    assert isinstance(model[0], InPieces) and [clean_fqn(name) for name, _ in model.named_modules()][1:] == ["0", "0"]
    given, grad = random(*rows, DIM).requires_grad_(), random(*rows, 3)
    model(given).backward(grad)
    uses = uses_of_weights(model)[id(linear.weight)]
    of_ranks = []
    for piece, its_grad in zip(given.detach().chunk(2), grad.chunk(2), strict=True):
        linear.zero_grad()
        linear(piece).backward(its_grad)
        of_ranks.append(linear.weight.grad)
    assert all(map(torch.equal, take_grads(uses, torch.float64), of_ranks)) and "weight" not in model[0].grads
    linear.zero_grad()
    (alone,) = torch.autograd.grad(linear(plain := given.detach().requires_grad_()), plain, grad)
    torch.testing.assert_close(given.grad, alone)


def test_an_embedding_in_pieces_of_a_row_looks_up_all_of_it() -> None:
    tokens, model = torch.arange(2 * SEQ), nn.Sequential(nn.Embedding(2 * SEQ, DIM))
    expected = model(tokens)
    use_pieces(model, 2, -2)
    assert torch.equal(model(tokens), expected)


def test_modules_that_share_a_weight_have_one_gradient_of_every_piece() -> None:
    first, last = nn.Linear(DIM, DIM, bias=False).bfloat16(), nn.Linear(DIM, DIM, bias=False).bfloat16()
    last.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), last)
    plain = copy.deepcopy(model)
    use_pieces(model, 2)
    given, grad = (random(2 * BATCH, SEQ, DIM).bfloat16() for _ in range(2))
    model(given).backward(grad)
    weight_grads = take_grads(uses_of_weights(model)[id(first.weight)], torch.float32)
    assert plain[0].weight is plain[2].weight and len(weight_grads) == 2
    for mine, piece, its_grad in zip(weight_grads, given.chunk(2), grad.chunk(2), strict=True):
        plain.zero_grad()
        plain(piece).backward(its_grad)
        assert torch.equal(mine, plain[0].weight.grad.float())


def test_pieces_are_computed_first_rank_first_in_backward_too() -> None:
    seen: list[float] = []

    class Noted(nn.Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            out = super().forward(given)
            out.register_hook(lambda grad: seen.append(grad[0, 0, 0].item()))
            return out

    wrapped = InPieces(Noted(1, 1).double(), 3)
    wrapped(random(3, 1, 1)).backward(torch.arange(3.0).double().view(3, 1, 1))
    assert seen == [0, 1, 2]


def test_nothing_is_kept_where_nothing_is_trained() -> None:
    wrapped = InPieces(nn.Linear(2, 2), 2)
    with torch.no_grad():
        assert not wrapped(torch.zeros(2, 1, 2)).requires_grad
    assert not wrapped.grads


def test_one_rank_has_the_operands_of_all_signs_of_zeros_too(trained) -> None:
    """Tokens without a label have gradients of zero."""
    case = parse_case_id("fsdp2-cp2-tensorwise-v2048-gb4-s1-ignore.unequal-b16")
    run, solo = (trained(case, probes=("sketches", "operands"), solo=alone) for alone in (False, True))
    assert with_operands([], case, run, solo) == ()
