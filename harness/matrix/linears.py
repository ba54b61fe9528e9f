"""The modules of the reference Llama: its linears, which of them are converted, and the stages of a pipeline.

Shape arithmetic that follows from a case alone: `rules.py` uses it for alignment, `expect/` for what must run.

Stages are cut as torchtitan cuts a model: blocks in order, as evenly as they divide, the embedding in the first stage,
the last norm and the output layer in the last. Stages go round over the ranks: with two a rank, rank 0 of two has the
first and the third.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, get_args

import msgspec

from harness.matrix.case import Case, Model
from harness.matrix.layout import Layout, coordinates
from harness.matrix.recipes import MatmulRole

_ATTENTION = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
# In order of execution in the forward of a block, which is the order that `selective_op` counts in.
BLOCK_LINEARS = (*_ATTENTION, "feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
# Of a mixture of experts. Its router is a linear too, which no recipe converts.
_SHARED = ("moe.shared_experts.w1", "moe.shared_experts.w3", "moe.shared_experts.w2")
EXPERT_BLOCK_LINEARS = (*_ATTENTION, *_SHARED)
OUTPUT_FQN = "output"
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


def active_parameter_count(case: Case) -> int:
    """Parameters that one token is multiplied by, with those of the embedding and norms: `top_k` experts of a block."""
    model, experts = case.model, expert_parameters(case.model)[0]
    return parameter_count(case) - (experts - experts * model.top_k // model.experts if model.experts else 0)


def local_features(case: Case, name: str, rank: int = 0) -> tuple[int, int]:
    """Return the (in_features, out_features) of a linear on this rank; chunks of a vocabulary may be uneven."""
    return _local(name, linear_features(case, name), case.layout.tp, rank % case.layout.tp)


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


_PER_RANK = {"interleaved": 2}
EMBEDDING = "tok_embeddings"
_LAST = ("norm", OUTPUT_FQN)


def ends_are_one(case: Case) -> bool:
    """True if embedding and output layer have one parameter: tied ends of a pipeline are copies of one another."""
    return case.model.tied and case.layout.pp == 1


def copies_of_weights(case: Case) -> frozenset[str]:
    """Return the parameters that a pipeline has besides those of the embedding, though they are the same weights."""
    return frozenset({f"{OUTPUT_FQN}.weight"} if case.model.tied else ())


def stage_count(layout: Layout) -> int:
    return layout.pp * _PER_RANK.get(layout.schedule, 1)


def stages_of(case: Case, rank: int) -> tuple[int, ...]:
    """Return the stages that a rank computes, in order."""
    return _stages(case.layout, _coordinate(case, rank))


def _stages(layout: Layout, coordinate: int) -> tuple[int, ...]:
    return tuple(range(coordinate, stage_count(layout), layout.pp))


def _coordinate(case: Case, rank: int) -> int:
    return coordinates(case.layout, rank)["pp"]


def blocks_of_stage(case: Case, stage: int) -> range:
    """Return the numbers of the blocks that a stage holds."""
    per_stage, more = divmod(case.model.shape.layers, stage_count(case.layout))
    first = stage * per_stage + min(stage, more)
    return range(first, first + per_stage + (stage < more))


@functools.lru_cache(maxsize=1024)
def modules_of_stage(case: Case, stage: int) -> tuple[str, ...]:
    """Return the FQNs of the modules directly in the model that a stage holds, in order of execution."""
    blocks = (f"layers.{layer}" for layer in blocks_of_stage(case, stage))
    is_last = stage == stage_count(case.layout) - 1
    return (*((EMBEDDING,) if stage == 0 else ()), *blocks, *(_LAST if is_last else ()))


def stage_of(case: Case, fqn: str) -> int:
    """Return the stage that holds a module; the first for one that is in none of the Llama's."""
    stages = range(stage_count(case.layout))
    return next((stage for stage in stages if _module_of(fqn) in modules_of_stage(case, stage)), 0)


@functools.lru_cache(maxsize=1024)
def _modules(case: Case, coordinate: int) -> frozenset[str]:
    return frozenset(name for stage in _stages(case.layout, coordinate) for name in modules_of_stage(case, stage))


def holds(case: Case, rank: int, fqn: str) -> bool:
    """Return True if a module, or a parameter of one, is in a stage of this rank."""
    return case.layout.pp == 1 or _module_of(fqn) in _modules(case, _coordinate(case, rank))


def _module_of(fqn: str) -> str:
    parts = fqn.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def held(case: Case, rank: int, fqns: Iterable[str]) -> tuple[str, ...]:
    return tuple(fqn for fqn in fqns if holds(case, rank, fqn))


def neighbors(case: Case, rank: int) -> tuple[int, int]:
    """Return how many stages of a rank have one behind them, and how many one before them."""
    stages = stages_of(case, rank)
    return sum(stage < stage_count(case.layout) - 1 for stage in stages), sum(stage > 0 for stage in stages)


def connections(case: Case, rank: int) -> tuple[int, int]:
    """To how many ranks behind it a rank is next, and in how many rounds of disjoint pairs such ranks connect."""
    pp, mine = case.layout.pp, _coordinate(case, rank)
    pairs = {tuple(sorted((stage % pp, (stage + 1) % pp))) for stage in range(stage_count(case.layout) - 1)}
    odd_ring = pp % 2 == 1 and len(pairs) == pp
    return sum(lower == mine for lower, _ in pairs), min(len(pairs), 2) + odd_ring


def forwards_in_flight(case: Case, rank: int) -> dict[int, int]:
    """By stage of a rank, how many microbatches are computed forward when its first backward begins.

    GPipe computes all of them. The others begin to go back when the first microbatch has come back to the rank, or has
    gone through its last stage; interleaved stages take turns of as many microbatches as the pipeline has ranks.
    """
    layout, stages = case.layout, stages_of(case, rank)
    if layout.schedule == "gpipe" or layout.pp == 1:
        return dict.fromkeys(stages, case.train.accumulation if layout.pp > 1 else 1)
    behind = layout.pp - 1 - _coordinate(case, rank)
    forwards = (len(stages) - 1) * layout.pp + behind * len(stages) + 1
    turns = Counter(
        stages[step // layout.pp % len(stages)] for step in range(min(forwards, len(stages) * case.train.accumulation))
    )
    return {stage: turns[stage] for stage in stages}


def expert_layers_of(case: Case, rank: int) -> tuple[int, ...]:
    """Return the numbers of the blocks with experts that a rank holds."""
    return tuple(layer for layer in blocks_of(case, rank) if case.model.has_experts(layer))


def blocks_of(case: Case, rank: int) -> tuple[int, ...]:
    """Return the numbers of the blocks that a rank holds."""
    return tuple(sorted(layer for stage in stages_of(case, rank) for layer in blocks_of_stage(case, stage)))
