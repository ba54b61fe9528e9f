"""The matmuls that a case asks of the FP8 hardware: which linears are converted, their local shapes, how many calls.

Pure shape arithmetic of the reference Llama; `rules.py` judges it and `checks/` compare it with what really ran.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from harness.spec.case import Case

GemmRole = Literal["forward", "dgrad", "wgrad"]

# The order of execution in a block's forward: `selective_op` counts along it.
BLOCK_LINEARS = (
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w3",
    "feed_forward.w2",
)
OUTPUT_FQN = "output"
ROWWISE = frozenset({"attention.wo", "feed_forward.w2"})  # sharded along the input features; the rest along the output


class Gemm(msgspec.Struct, frozen=True, kw_only=True):
    """One matmul [m, k] x [k, n] of one linear, as one rank (or several with equal shards) executes it."""

    fqn: str
    role: GemmRole
    m: int
    n: int
    k: int


class _Linear(msgspec.Struct, frozen=True):
    fqn: str
    in_features: int
    out_features: int


def linear_fqns(case: Case) -> tuple[str, ...]:
    """Every linear of the model in order of execution, converted or not."""
    blocks = [f"layers.{layer}.{name}" for layer in range(case.model.shape.layers) for name in BLOCK_LINEARS]
    return (*blocks, OUTPUT_FQN)


def converted_fqns(case: Case) -> tuple[str, ...]:
    """Linears expected to be Float8Linear after conversion, sorted; () for bf16."""
    return tuple(sorted(fqn for fqn in linear_fqns(case) if is_converted(case, fqn)))


def is_converted(case: Case, fqn: str) -> bool:
    """True when this linear is expected to be converted."""
    if not case.float8.enabled or (fqn == OUTPUT_FQN and not case.float8.output_layer):
        return False
    return not any(entry in fqn for entry in case.float8.filter_fqns)


def gemms(case: Case) -> tuple[Gemm, ...]:
    """The scaled matmuls of one step in order of execution: every forward, then every backward from the last linear.

    Recomputed forwards repeat shapes already listed and are left out, and so is the wgrad of `rowwise_with_gw_hp`,
    which stays in high precision. Where TP ranks hold shards of different sizes, each size is listed once.
    """
    m = case.tokens_per_rank
    linears = [linear for fqn in linear_fqns(case) if is_converted(case, fqn) for linear in _local(case, fqn)]
    forward = [Gemm(fqn=li.fqn, role="forward", m=m, n=li.out_features, k=li.in_features) for li in linears]
    backward: list[Gemm] = []
    for li in reversed(linears):
        backward.append(Gemm(fqn=li.fqn, role="dgrad", m=m, n=li.in_features, k=li.out_features))
        if case.float8.recipe != "rowwise_with_gw_hp":
            backward.append(Gemm(fqn=li.fqn, role="wgrad", m=li.out_features, n=li.in_features, k=m))
    return (*forward, *backward)


def scaled_mm_calls(case: Case) -> int:
    """Scaled matmuls of one rank in one step: forward, dgrad, wgrad, and the forwards that checkpointing recomputes."""
    per_linear = 2 if case.float8.recipe == "rowwise_with_gw_hp" else 3
    return per_linear * len(converted_fqns(case)) + recomputed_calls(case)


def recomputed_calls(case: Case) -> int:
    """Forward scaled matmuls that checkpointing executes a second time, in one rank and one step.

    `selective_op` saves every second matmul of a block (torchtitan 0.2.2, `_apply_op_sac`), converted or not: the
    policy sees `aten.mm` of a Float8TrainingTensor or DTensor, so its list needs no `_scaled_mm` to include them.
    A compiled block leaves out what backward does not read.
    """
    return sum(
        is_converted(case, f"layers.{layer}.{name}")
        for layer in range(case.model.shape.layers)
        for position, name in enumerate(BLOCK_LINEARS, start=1)
        if is_recomputed(case, layer, position) and not (case.compile != "none" and _is_dead(case, name))
    )


def _is_dead(case: Case, name: str) -> bool:
    """True when backward does not read the output of this linear: it is the last, or what was scattered is saved."""
    if name == BLOCK_LINEARS[-1]:
        return True
    scattered = case.layout.tp > 1 and case.layout.sequence_parallel
    return name == "attention.wo" and scattered and case.checkpointing.mode == "selective_op"


def shard_sizes(total: int, ranks: int) -> tuple[int, ...]:
    """Sizes of an axis split over ranks as `torch.chunk` splits it: ceiling-sized, then a smaller one, then empty."""
    size = -(-total // ranks)
    return tuple(max(0, min(size, total - rank * size)) for rank in range(ranks))


def is_checkpointed(case: Case, layer: int) -> bool:
    """True when anything of this block (from 0) is recomputed in backward."""
    return any(is_recomputed(case, layer, position) for position in range(1, len(BLOCK_LINEARS) + 1))


def is_recomputed(case: Case, layer: int, position: int) -> bool:
    """True when checkpointing executes this matmul of a block twice; `position` counts them from 1."""
    match case.checkpointing.mode:
        case "none":
            return False
        case "full":
            return True
        case "selective_layer":  # torchtitan 0.2.2 counts layers from 1: with every = 2 it is layers.1, layers.3, ...
            return (layer + 1) % case.checkpointing.every == 0
        case "selective_op":
            return position % 2 == 0


def _local(case: Case, fqn: str) -> tuple[_Linear, ...]:
    """The linear as TP ranks hold it, one for every distinct shard size, largest first."""
    name = fqn.split(".", 2)[-1]
    inputs, outputs = linear_features(case, name)
    split = inputs if name in ROWWISE else outputs
    sizes = sorted(set(shard_sizes(split, case.layout.tp)), reverse=True)
    if name in ROWWISE:
        return tuple(_Linear(fqn, size, outputs) for size in sizes)
    return tuple(_Linear(fqn, inputs, size) for size in sizes)


def linear_features(case: Case, name: str) -> tuple[int, int]:
    """Input and output features of the whole linear."""
    shape = case.model.shape
    kv_dim = shape.kv_heads * shape.head_dim
    return {
        "attention.wq": (shape.dim, shape.dim),
        "attention.wk": (shape.dim, kv_dim),
        "attention.wv": (shape.dim, kv_dim),
        "attention.wo": (shape.dim, shape.dim),
        "feed_forward.w1": (shape.dim, shape.ffn_dim),
        "feed_forward.w3": (shape.dim, shape.ffn_dim),
        "feed_forward.w2": (shape.ffn_dim, shape.dim),
        OUTPUT_FQN: (shape.dim, case.model.padded_vocab_size),
    }[name]
