"""Casts to float8 as memory traffic: bytes that one rank reads and writes in one step to cast all linear operands.

In a compiled block a cast along the contiguous axis is one kernel or two; one along the other axis writes transposed,
which is slow. In an eager one every operator reads and writes all elements. With plain TP styles each rank casts
gathered activations whole: tensor parallelism divides matmuls, and not these casts.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.matrix.case import Case
from harness.matrix.linears import (
    OUTPUT_FQN,
    ROWWISE,
    is_checkpointed,
    is_converted,
    linear_fqns,
    linear_name,
    local_features,
)
from harness.matrix.recipes import Operand, Recipe

_READ, _WRITE = 2, 1  # bytes of an element: bfloat16, float8
# The operators of an eager cast in torchao 0.18: abs, max, to float32, mul, clamp, to float8.
_EAGER_BYTES = (2 + 2) + 2 + (2 + 4) + (4 + 4) + (4 + 4) + (4 + 1)
# What a converted linear launches more than one in BF16, forward and backward, counted with torch 2.13, torchao 0.18.
EAGER_KERNELS: dict[Recipe, int] = {"tensorwise": 72, "rowwise": 98, "rowwise_with_gw_hp": 65}
_OTHER_AXIS: frozenset[Operand] = frozenset(("i_gw", "go_gw", "w_gi"))
_SAME_INPUT = (("attention.wq", "attention.wk", "attention.wv"), ("feed_forward.w1", "feed_forward.w3"))


class Cast(msgspec.Struct, frozen=True, kw_only=True):
    """What the casts of one operand of a linear move in one rank and step, in bytes.

    `straight_bytes` in order; `transposed_bytes` by kernels that write transposed; `column_bytes` by those that also
    find a scale for each column.
    """

    fqn: str
    operand: Operand
    straight_bytes: int = 0
    transposed_bytes: int = 0
    column_bytes: int = 0


def casts(case: Case) -> tuple[Cast, ...]:
    """The casts of every converted linear; () without float8."""
    fqns = [fqn for fqn in linear_fqns(case) if is_converted(case, fqn)]
    return tuple(cast for fqn in fqns for cast in _of_linear(case, fqn))


def _of_linear(case: Case, fqn: str) -> Iterator[Cast]:
    """Operands of forward are cast again where the block is recomputed."""
    backwards = case.train.accumulation
    forwards = backwards * (1 + case.train.evaluate + is_checkpointed(case, fqn))
    inputs, outputs = local_features(case, linear_name(fqn))
    tokens = case.tokens_per_rank
    sites: tuple[tuple[Operand, int], ...] = (
        ("i", tokens * inputs * forwards),
        ("i_gw", tokens * inputs * backwards),
        ("w", inputs * outputs * forwards),
        ("w_gi", inputs * outputs * backwards),
        ("go", tokens * outputs * backwards),
        ("go_gw", tokens * outputs * backwards),
    )
    for operand, elements in sites:
        if case.float8.traits.scaling[operand] != "dis":
            shards, own = _shards(case, fqn, operand), elements // _readers(case, fqn, operand)
            yield _gathered(fqn, operand, own, shards) if shards else _cast(case, fqn, operand, own)


def _readers(case: Case, fqn: str, operand: Operand) -> int:
    """How many linears read one cast of their input, each of which has its share of it: a compiler merges equal casts.

    Casts with a scale for each row are counted for every linear: so predictions fit what was published, also of what
    leaving wk and wv in BF16 gains.
    """
    merged = case.compile != "none" and case.float8.traits.scaling[operand] == "ten"
    name = linear_name(fqn)
    same = next((names for names in _SAME_INPUT if name in names), ())
    if not (merged and same and operand in ("i", "i_gw")):
        return 1
    return sum(is_converted(case, f"{fqn.removesuffix(name)}{other}") for other in same)


def _shards(case: Case, fqn: str, operand: Operand) -> int:
    """Number of shards of a tensor that is cast before it is gathered; 0 if it is cast after."""
    if operand in ("w", "w_gi"):
        return case.layout.dp_shard if case.gathers_float8 else 0
    if case.float8.tp_styles == "plain" or case.layout.tp == 1 or fqn == OUTPUT_FQN:
        return 0
    gathered = ("go", "go_gw") if linear_name(fqn) in ROWWISE else ("i", "i_gw")
    return case.layout.tp if operand in gathered else 0


def _cast(case: Case, fqn: str, operand: Operand, elements: int) -> Cast:
    if case.compile == "none":
        return Cast(fqn=fqn, operand=operand, straight_bytes=_EAGER_BYTES * elements)
    rows = case.float8.traits.scaling[operand] == "axs"
    if operand not in _OTHER_AXIS:  # a kernel holds a row whole, and reads a tensor twice
        return Cast(fqn=fqn, operand=operand, straight_bytes=(_READ * (1 if rows else 2) + _WRITE) * elements)
    if rows:
        return Cast(fqn=fqn, operand=operand, column_bytes=(2 * _READ + _WRITE) * elements)
    return Cast(fqn=fqn, operand=operand, transposed_bytes=(_READ + _WRITE) * elements)  # its scale is known


def _gathered(fqn: str, operand: Operand, elements: int, shards: int) -> Cast:
    """A shard is cast; the operand of the other axis is a transposed copy of what was gathered in float8."""
    if operand in _OTHER_AXIS:
        return Cast(fqn=fqn, operand=operand, transposed_bytes=2 * _WRITE * elements)
    return Cast(fqn=fqn, operand=operand, straight_bytes=(2 * _READ + _WRITE) * elements // shards)
