"""A mixture of experts with torchtitan's module names: router, grouped experts, a shared expert.

It contains no FP8 and no parallelism: `float8.py` converts weights, `parallel.py` sends tokens to the ranks that
hold their experts. Every sum has an order that depends on a token alone, so layouts compute the same bits.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from harness.matrix.case import Model
from harness.matrix.model import BALANCE_COEFFICIENT
from harness.matrix.recipes import GROUP_MULTIPLE

Tensor = torch.Tensor


class Router(nn.Module):
    """Chooses experts by the scores of a linear, which are computed at least in float32."""

    def __init__(self, dim: int, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, model.experts, bias=False)
        self.top_k = model.top_k
        self.score = model.router

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and experts [tokens, top_k] for the tokens of x [batch, seq, dim], highest first.

        `bias` [experts] is added to the scores that are compared, not to the weights. Of equal scores the first wins.
        """
        logits = self.gate(x).flatten(0, -2)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(dim=-1)
        ranked = (scores.detach() + bias).sort(dim=-1, descending=True, stable=True).indices
        chosen = ranked[:, : self.top_k]
        weights = scores.gather(-1, chosen)
        return (weights / weights.sum(dim=-1, keepdim=True) if self.score == "sigmoid" else weights), chosen


class GroupedExperts(nn.Module):
    """SwiGLU experts, whose weights are stacked: [experts, out_features, in_features].

    A group of tokens is padded to a multiple of `multiple`, which the kernel of the recipe asks for.
    """

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.multiple = GROUP_MULTIPLE

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [rows, dim], those of the first expert first, and how many each local expert has, to rows of results."""
        w1, w2, w3 = (
            weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.w1, self.w2, self.w3)
        )
        places, ends = padded_groups(counts, self.multiple)
        size = self.multiple * (-(-len(rows) // self.multiple) + len(counts))  # at most this many, however they spread
        padded = rows.new_zeros(size, rows.size(-1)).index_copy(0, places, rows)
        hidden = F.silu(grouped(padded, w1, ends)) * grouped(padded, w3, ends)
        return grouped(hidden, w2, ends)[places]


def padded_groups(counts: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Return where each row goes if groups are padded, and where the padded groups end (int32).

    A group without tokens is padded too, as in torchtitan: a kernel that skips it leaves a gradient uninitialized.
    """
    padded = (-(-counts // multiple)).clamp(min=1) * multiple
    ends = padded.cumsum(0)
    shifts = ends - padded - (counts.cumsum(0) - counts)
    rows = torch.arange(int(counts.sum()), device=counts.device)
    return rows + shifts.repeat_interleave(counts), ends.to(torch.int32)


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


class MoE(nn.Module):
    """Tokens to their experts and back: the weighted sum of what these return, and of the shared expert."""

    expert_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(self, dim: int, model: Model, shared_experts: nn.Module) -> None:
        super().__init__()
        self.router = Router(dim, model)
        self.experts = GroupedExperts(dim, model.expert_dim, model.experts)
        self.shared_experts = shared_experts
        self.top_k = model.top_k
        self.register_buffer("expert_bias", torch.zeros(model.experts))
        self.register_buffer("tokens_per_expert", torch.zeros(model.experts), persistent=False)
        self.counts = torch.zeros(0, dtype=torch.int64)  # of the last forward

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(x, self.expert_bias)
        flat = chosen.flatten()
        self.counts = flat.bincount(minlength=len(self.expert_bias))
        order = flat.argsort(stable=True)  # by expert, then by token
        rows = tokens[:, None].expand(-1, self.top_k, -1).flatten(0, 1)[order]
        results = self.experts(rows, self.counts)
        of_tokens = results[order.argsort()].unflatten(0, (-1, self.top_k))
        routed = (of_tokens * weights[..., None]).sum(dim=1).to(x.dtype)
        return self.shared_experts(x) + routed.view_as(x)

    def count(self) -> None:
        """Add the tokens of the last forward to those of the step. A recomputed forward is not counted."""
        self.tokens_per_expert += self.counts

    @torch.no_grad()
    def move_bias(self, tokens: Tensor) -> None:
        """Towards experts that had fewer of the `tokens` of a step than the mean (arXiv:2408.15664), and forget them.

        torchtitan's coefficient and its centering, which keeps the sum of biases at zero.
        """
        step = BALANCE_COEFFICIENT * (tokens.mean() - tokens).sign()
        self.expert_bias += step - step.mean()
