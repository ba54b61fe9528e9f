"""The model: learned positions, attention and MLP with biases, and an output layer with the weight of the embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tiny_gpt.config import Config


class Norm(nn.Module):
    """Layer normalization, computed in float32 at least."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dim of `x`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centered = wide - wide.mean(-1, keepdim=True)
        normal = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5)
        return normal.to(x.dtype) * self.weight + self.bias


class Attention(nn.Module):
    """Causal self-attention. With tensor parallelism, a rank computes its own heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend over `x`: [batch, seq, dim]."""
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two linears with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] in and out."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = Norm(config.dim)
        self.attention = Attention(config.dim, config.heads)
        self.mlp_norm = Norm(config.dim)
        self.mlp = MLP(config.dim, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] in and out."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The whole model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Parameter(torch.empty(config.seq_len, config.dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.lm_head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, seq, vocab] of `tokens` [batch, seq]."""
        x = self.tokens(tokens) + self.positions[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))
