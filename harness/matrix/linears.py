"""The modules of the reference Llama: its linears, and which of them are converted.

Shape arithmetic that follows from a case alone: `rules.py` uses it for alignment, `expect/` for what must run.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TypeVar, get_args

import msgspec

from harness.matrix.case import Case, Model
from harness.matrix.recipes import MatmulRole

_ATTENTION = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
# In order of execution in the forward of a block, which is the order that `selective_op` counts in.
BLOCK_LINEARS = (*_ATTENTION, "feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
# Of a mixture of experts. Its router is a linear too, which no recipe converts.
_SHARED = ("moe.shared_experts.w1", "moe.shared_experts.w3", "moe.shared_experts.w2")
EXPERT_BLOCK_LINEARS = (*_ATTENTION, *_SHARED)
EMBEDDING, OUTPUT_FQN = "tok_embeddings", "output"
ROUTER, EXPERTS = "moe.router.gate", "moe.experts"  # of a block
# Sharded over in_features; the others over out_features.
ROWWISE = frozenset({"attention.wo", "feed_forward.w2", "moe.shared_experts.w2"})


# A multiplication and an addition for every weight, in forward and for both gradients.
FLOPS_PER_PARAMETER_AND_TOKEN = 6


class Gemm(msgspec.Struct, frozen=True, kw_only=True):
    """One matmul [m, k] x [k, n] of one linear, as one rank, or several with equal shards, execute it."""

    fqn: str
    role: MatmulRole
    m: int
    n: int
    k: int


_Gemm = TypeVar("_Gemm", bound=Gemm)


def linear_fqns(case: Case) -> tuple[str, ...]:
    """Return every linear of the model in order of execution, converted or not, without routers."""
    return _fqns(case.model)


@functools.lru_cache(maxsize=256)
def _fqns(model: Model) -> tuple[str, ...]:
    blocks = [f"layers.{layer}.{name}" for layer in range(model.shape.layers) for name in block_linears(model, layer)]
    return (*blocks, OUTPUT_FQN)


def block_linears(model: Model, layer: int) -> tuple[str, ...]:
    """Return the linears of a block that may be converted, in order of execution."""
    return EXPERT_BLOCK_LINEARS if model.has_experts(layer) else BLOCK_LINEARS


def expert_fqns(model: Model) -> tuple[str, ...]:
    """Return the modules of grouped experts."""
    return tuple(f"layers.{layer}.{EXPERTS}" for layer in model.expert_layers)


def converted_fqns(case: Case) -> tuple[str, ...]:
    """Return the linears expected to be Float8Linear after conversion, sorted; () for bf16."""
    return tuple(sorted(fqn for fqn in linear_fqns(case) if is_converted(case, fqn)))


def is_converted(case: Case, fqn: str) -> bool:
    if not case.float8.enabled or (fqn == OUTPUT_FQN and not case.float8.output_layer):
        return False
    return not any(entry in fqn for entry in case.float8.filter_fqns)


def is_checkpointed(case: Case, fqn: str) -> bool:
    """Return True if the linear is in a checkpointed block: its operands are cast again in backward."""
    return fqn != OUTPUT_FQN and case.checkpointing.wraps(int(fqn.split(".")[1]))


def is_recomputed(case: Case, layer: int, name: str) -> bool:
    """Return True if checkpointing recomputes the matmul of this linear of a block.

    `selective_op` counts `aten.mm`. A linear in high precision with a bias is `aten.addmm`, which it never saves, and
    nor does it save the matmuls of a kernel that calls `_scaled_mm` itself.
    """
    if case.checkpointing.mode != "selective_op":
        return case.checkpointing.wraps(layer)
    is_counted = (not case.model.bias, case.float8.traits.is_mm)  # in high precision, and converted
    counted = [linear for linear in BLOCK_LINEARS if is_counted[is_converted(case, f"layers.{layer}.{linear}")]]
    return name not in counted or counted.index(name) % 2 == 1


@functools.lru_cache(maxsize=4096)
def gemms(case: Case) -> tuple[Gemm, ...]:
    """Return the scaled matmuls of a microbatch in order of execution.

    Without recomputed forwards and those of an evaluation, which repeat listed shapes, and without matmuls in high
    precision. Where TP ranks hold shards of different sizes, each size is listed once, largest first.
    """
    of_linears = [
        [
            Gemm(fqn=fqn, role=role, m=m, n=n, k=k)
            for role, (m, n, k) in matmul_sizes(case.tokens_per_rank, features).items()
        ]
        for fqn in linear_fqns(case)
        if is_converted(case, fqn)
        for features in _held(case.model, case.layout.tp)[linear_name(fqn)]
    ]
    multiplied = {role: case.float8.traits.multiplies(role) for role in get_args(MatmulRole)}
    return tuple(gemm for gemm in in_order(of_linears) if multiplied[gemm.role])


def matmul_sizes(tokens: int, features: tuple[int, int]) -> Mapping[MatmulRole, tuple[int, int, int]]:
    """(m, n, k) of the matmuls of so many tokens and a linear with these local (in_features, out_features)."""
    inputs, outputs = features
    return {
        "forward": (tokens, outputs, inputs),
        "dgrad": (tokens, inputs, outputs),
        "wgrad": (outputs, inputs, tokens),
    }


def in_order(of_linears: Sequence[Sequence[_Gemm]]) -> tuple[_Gemm, ...]:
    """Return the matmuls of linears as they are executed: all forwards, then dgrad and wgrad from the last linear."""
    forwards = [forward for forward, *_ in of_linears]
    return (*forwards, *(gemm for _, *backward in reversed(of_linears) for gemm in backward))


def is_misaligned(case: Case, gemm: Gemm) -> bool:
    """Return True if `torch._scaled_mm` refuses this matmul: k or n is not a multiple of 16 (m may be anything).

    MXFP8 refuses it before, in the casts: each dim of an operand that is contracted anywhere must be one of 32.

    `pad_inner_dim` pads k of both operands, never n. So it fixes an unaligned number of tokens (k of wgrad), but not an
    unaligned weight dimension, which is n of the forward or of dgrad.
    """
    multiple = case.float8.traits.multiple
    k_fits = gemm.k % multiple == 0 or case.float8.pad_inner_dim
    return not (k_fits and gemm.n % multiple == 0)


def shard_sizes(total: int, ranks: int) -> tuple[int, ...]:
    """Shard sizes as `torch.chunk` gives them: chunks of the rounded-up size, then a smaller one, then empty ones."""
    return tuple(shard_size(total, ranks, rank) for rank in range(ranks))


def shard_size(total: int, ranks: int, rank: int) -> int:
    """Return one of `shard_sizes`."""
    size = -(-total // ranks)
    return max(0, min(size, total - rank * size))


def linear_name(fqn: str) -> str:
    """Return the name of a linear in its block, which all blocks share, or of the output layer."""
    return fqn.split(".", 2)[-1]


def linear_features(case: Case, name: str) -> tuple[int, int]:
    return _features(case.model)[name]


@functools.lru_cache(maxsize=1024)
def _features(model: Model) -> Mapping[str, tuple[int, int]]:
    shape = model.shape
    kv_dim = shape.kv_heads * shape.head_dim
    return {
        "attention.wq": (shape.dim, shape.dim),
        "attention.wk": (shape.dim, kv_dim),
        "attention.wv": (shape.dim, kv_dim),
        "attention.wo": (shape.dim, shape.dim),
        "feed_forward.w1": (shape.dim, shape.ffn_dim),
        "feed_forward.w3": (shape.dim, shape.ffn_dim),
        "feed_forward.w2": (shape.ffn_dim, shape.dim),
        **({} if not model.experts else dict.fromkeys(_SHARED[:2], (shape.dim, model.expert_dim))),
        **({} if not model.experts else {_SHARED[2]: (model.expert_dim, shape.dim)}),
        OUTPUT_FQN: (shape.dim, model.padded_vocab_size),
    }


def parameter_count(case: Case) -> int:
    """Return the parameters of the whole model: embedding, linears with their biases, norms, routers and experts."""
    features = [linear_features(case, linear_name(fqn)) for fqn in linear_fqns(case)]
    shape = case.model.shape
    norms = (2 * shape.layers + 1) * shape.dim
    biases = sum(outputs for _, outputs in features[:-1]) if case.model.bias else 0
    weights = sum(inputs * outputs for inputs, outputs in features)
    experts, routers = expert_parameters(case.model)
    embedding = 0 if case.model.tied else shape.dim * case.model.padded_vocab_size
    return embedding + weights + biases + norms + experts + routers


def expert_parameters(model: Model) -> tuple[int, int]:
    """Return the parameters of the experts that tokens are sent to, and of the routers."""
    blocks, dim = len(model.expert_layers), model.shape.dim
    return blocks * model.experts * 3 * dim * model.expert_dim, blocks * model.experts * dim


def copies_of_weights(case: Case) -> frozenset[str]:
    """Return the parameters that a pipeline has besides those of the embedding, though they are the same weights."""
    return frozenset({f"{OUTPUT_FQN}.weight"} if case.model.tied else ())


def local_features(case: Case, name: str, rank: int = 0) -> tuple[int, int]:
    """Return the (in_features, out_features) of a linear on this rank; chunks of a vocabulary may be uneven."""
    return _local(name, linear_features(case, name), case.layout.tp, rank % case.layout.tp)


def width_of_logits(case: Case, rank: int) -> int:
    """Return how many logits of a token a rank has of the output layer."""
    shares = case.layout.shares_of_logits
    return shard_size(case.model.padded_vocab_size, shares, rank % shares)


def _local(name: str, features: tuple[int, int], tp: int, rank: int) -> tuple[int, int]:
    inputs, outputs = features
    return (shard_size(inputs, tp, rank), outputs) if name in ROWWISE else (inputs, shard_size(outputs, tp, rank))


@functools.lru_cache(maxsize=1024)
def _held(model: Model, tp: int) -> Mapping[str, Sequence[tuple[int, int]]]:
    """Return the sizes in which TP ranks hold each linear, largest first."""
    return {
        name: sorted({_local(name, features, tp, rank) for rank in range(tp)}, reverse=True)
        for name, features in _features(model).items()
    }
