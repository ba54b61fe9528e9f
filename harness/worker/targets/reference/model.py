"""The reference model: a Llama (RMSNorm, RoPE, grouped-query attention, SwiGLU) with torchtitan's module names.

It contains no FP8 and no parallelism: `float8.py` replaces the linears, `parallel.py` distributes them. For tensor
parallelism attention infers its number of heads from the width of its input.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from harness.matrix.case import Model, ModelShape
from harness.worker.targets.reference.experts import MoE

ROPE_THETA = 500_000.0  # Llama 3


def rope_cache(head_dim: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of the rotary embedding, each [seq_len, head_dim / 2], float32."""
    inverse = ROPE_THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), inverse)
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of adjacent features of x [batch, seq, heads, head_dim], at least in float32; keeps the dtype."""
    even, odd = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of q, k and v [batch, seq, heads, head_dim]: causal, or where `mask` [queries, keys] is true."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.size(1) != k.size(1)
    )
    return out.transpose(1, 2)


def attend_apart(
    documents: Sequence[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Return the attention of documents of these lengths, each to itself alone, at positions from 0 on.

    They lie one behind the other in q, k and v [batch, seq, heads, head_dim], as in attention kernels of many lengths.
    """
    pieces = zip(*(tensor.flatten(0, 1)[None].split(documents, 1) for tensor in (q, k, v)), strict=True)
    tables = ((cos[:length], sin[:length]) for length in documents)
    attended = [
        attend(apply_rope(q, *table), apply_rope(k, *table), v) for (q, k, v), table in zip(pieces, tables, strict=True)
    ]
    return torch.cat(attended, 1).view(q.shape)


class Context(Protocol):
    """Attention where the sequences of x are cut into pieces."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Return the same as `attend` of rotated q and k, of what a rank has of every sequence."""


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, shape: ModelShape, *, bias: bool) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.context: Context | None = None
        self.wq = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=bias)
        self.wk = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=bias)
        self.wv = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=bias)
        self.wo = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=bias)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, documents: Sequence[int] | None = None
    ) -> torch.Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.wq, self.wk, self.wv))
        if self.context is not None:
            return self.wo(self.context.attend(q, k, v, cos, sin).flatten(-2))
        if documents is not None:
            return self.wo(attend_apart(documents, q, k, v, cos, sin).flatten(-2))
        return self.wo(attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=bias)
        self.w2 = nn.Linear(hidden, dim, bias=bias)
        self.w3 = nn.Linear(dim, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, or a mixture of experts, each behind a norm and added to the residual stream."""

    def __init__(self, model: Model, *, experts: bool) -> None:
        super().__init__()
        shape, bias = model.shape, model.bias
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(shape, bias=bias)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        if experts:
            self.moe = MoE(shape.dim, model, FeedForward(shape.dim, model.expert_dim, bias=bias))
        else:
            self.feed_forward = FeedForward(shape.dim, shape.ffn_dim, bias=bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **packed: Sequence[int]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, **packed)
        hidden = self.ffn_norm(x)
        return x + (self.moe(hidden) if hasattr(self, "moe") else self.feed_forward(hidden))


class Llama(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, padded vocab_size]."""

    def __init__(self, model: Model, *, seq_len: int) -> None:
        super().__init__()
        shape, vocab_size = model.shape, model.padded_vocab_size
        self.tok_embeddings = nn.Embedding(vocab_size, shape.dim)
        blocks = [TransformerBlock(model, experts=model.has_experts(layer)) for layer in range(shape.layers)]
        self.layers = nn.ModuleDict({str(layer): block for layer, block in enumerate(blocks)})
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.output = nn.Linear(shape.dim, vocab_size, bias=False)
        cos, sin = rope_cache(shape.head_dim, seq_len)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor, **packed: Sequence[int]) -> torch.Tensor:
        """Return the logits in the dtype of the output layer. A stage of a pipeline has a part of the modules.

        `packed`: as `documents` the lengths of those in the sequences, one sequence behind the other.
        """
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, self.rope_cos, self.rope_sin, **packed)
        if self.training:
            for moe in self.mixtures():
                moe.count()
        return x if self.output is None else self.output(self.norm(x))

    def part(self, names: Collection[str]) -> "Llama":
        """Return a model of these modules alone, which are those of this one."""
        part = object.__new__(Llama)
        nn.Module.__init__(part)
        layers = nn.ModuleDict({name: layer for name, layer in self.layers.items() if f"layers.{name}" in names})
        for name in ("tok_embeddings", "layers", "norm", "output"):  # the order of parameters
            own = getattr(self, name) if name in names else None
            setattr(part, name, layers if name == "layers" else own)
        for name, buffer in self.named_buffers(recurse=False):
            part.register_buffer(name, buffer, persistent=False)
        return part

    def mixtures(self) -> Iterator[MoE]:
        return (module for module in self.modules() if isinstance(module, MoE))
