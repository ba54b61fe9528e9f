"""Relations: pairs of cases whose results the arithmetic promises to be equal, and how equal.

Every promise was verified on the virtual device; `tests/worker/test_metamorphic.py` keeps it so. What is not promised:
that the float8 all-gather changes nothing in bfloat16 (it casts the float32 master weight, a linear without it casts
the bfloat16 copy), that bits survive another order of summation, and anything about the float8 all-gather where FSDP2
meets TP: torchao 0.18 computes its scale per TP rank when it is dynamic and over all ranks when it is precomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from harness.spec.case import Case, Checkpointing, Checks, Layout
from harness.spec.gemms import converted_fqns, linear_features
from harness.spec.rules import exclusions, expected_refusal

# bitwise: every loss, gradient norm, gradient and final parameter, on every rank. exact: the same numbers up to the
# rounding of sums in float64.
Promise = Literal["bitwise", "exact"]


class Relation(msgspec.Struct, frozen=True, kw_only=True):
    """`partner` computes what the case computes. `name` says what it lacks or has differently, joined by `+`.

    `steps`: the promise is about that many steps only; None: about all.
    """

    name: str
    partner: Case
    promise: Promise
    reason: str
    steps: int | None = None


def relations(case: Case) -> tuple[Relation, ...]:
    """Every relation of a case to one that differs in one option; none for a case that must not train."""
    found = (_relation(rule, case) for rule in _RULES) if _trains(case) else ()
    return tuple(relation for relation in found if relation is not None)


def partner(case: Case) -> Relation | None:
    """The one relation to check in a matrix; None where the solo witness is as sharp, or no option is neutral.

    Its partner lacks every option that promises to change no bit, all removed at once: equality of bits is transitive.
    """
    if _solo_is_sharp(case) or not _trains(case):
        return None
    removed: list[Relation] = []
    for rule in _NEUTRAL:
        relation = _relation(rule, removed[-1].partner if removed else case)
        if relation is not None and relation.steps is None:
            removed.append(relation)
    if not removed:
        return None
    return Relation(
        name="+".join(relation.name for relation in removed),
        partner=removed[-1].partner,
        promise="bitwise",
        reason="; ".join(relation.reason for relation in removed),
    )


_Rule = Callable[[Case], Relation | None]


def _relation(rule: _Rule, case: Case) -> Relation | None:
    if case.compile == "inductor" and rule is not _inductor:
        return None  # generated code may round differently whatever option changes its graph
    relation = rule(msgspec.structs.replace(case, checks=Checks()))
    return relation if relation is not None and _trains(relation.partner) else None


def _trains(case: Case) -> bool:
    return not exclusions(case) and expected_refusal(case) is None


def _solo_is_sharp(case: Case) -> bool:
    """True when parity leaves no room for rounding: nothing that changes a number could hide in its tolerance."""
    in_order = case.layout.tp == 1 and case.layout.dp_replicate == 1
    return (case.train.dtype == "float64" or in_order) and not _scale_is_inconsistent(case)


def _scale_is_inconsistent(case: Case) -> bool:
    """True where torchao 0.18 gives a weight one scale or several, depending on when it is computed."""
    return case.float8.fp8_all_gather and case.layout.tp > 1


def _async_tp(case: Case) -> Relation | None:
    if not case.layout.async_tp or case.compile != "graph":
        return None
    return Relation(
        name="async_tp",
        partner=msgspec.structs.replace(case, layout=msgspec.structs.replace(case.layout, async_tp=False)),
        promise="bitwise",
        reason="a fused operator multiplies the same rows and sums the same partial results in rank order",
    )


def _compile(case: Case) -> Relation | None:
    if case.compile != "graph" or case.layout.async_tp:
        return None
    return Relation(
        name="compile",
        partner=msgspec.structs.replace(case, compile="none"),
        promise="bitwise",
        reason="the graph is executed operator by operator, undecomposed",
    )


def _inductor(case: Case) -> Relation | None:
    if case.compile != "inductor" or case.train.dtype != "float64":
        return None
    eager = msgspec.structs.replace(case, compile="none", layout=msgspec.structs.replace(case.layout, async_tp=False))
    reason = "generated code rounds in float64 only; in less it keeps float32 where eager code rounds in between"
    return Relation(name="inductor", partner=eager, promise="exact", reason=reason)


def _checkpointing(case: Case) -> Relation | None:
    if case.checkpointing.mode == "none":
        return None
    return Relation(
        name="checkpointing",
        partner=msgspec.structs.replace(case, checkpointing=Checkpointing()),
        promise="bitwise",
        reason="a recompute repeats the same arithmetic on the same bits",
    )


def _tp_styles(case: Case) -> Relation | None:
    if case.float8.tp_styles == "plain":
        return None
    return Relation(
        name="tp_styles",
        partner=_with_float8(case, tp_styles="plain"),
        promise="bitwise",
        reason="a cast with the scale of the logical tensor is the same before and after an all-gather",
    )


def _pad_inner_dim(case: Case) -> Relation | None:
    if not case.float8.pad_inner_dim:
        return None
    return Relation(
        name="pad_inner_dim",
        partner=_with_float8(case, pad_inner_dim=False),
        promise="bitwise",
        reason="where every matmul is aligned there is nothing to pad",
    )


def _fp8_all_gather(case: Case) -> Relation | None:
    if not case.float8.fp8_all_gather or _scale_is_inconsistent(case) or case.train.dtype == "bfloat16":
        return None
    return Relation(
        name="fp8_all_gather",
        partner=_with_float8(case, fp8_all_gather=False, precompute_scale=False),
        promise="bitwise",
        reason="the gathered shards carry the scale of the full weight, so it does not matter where they are cast",
    )


def _precompute_scale(case: Case) -> Relation | None:
    if not case.float8.precompute_scale:
        return None
    return Relation(
        name="precompute_scale",
        partner=_with_float8(case, precompute_scale=False),
        promise="bitwise",
        steps=1 if _scale_is_inconsistent(case) else None,
        reason="the largest magnitude of a weight is the same right after its update and right before its use; in the "
        "first step no scale is precomputed",
    )


def _tp_degree(case: Case) -> Relation | None:
    tp = case.layout.tp
    if tp % 2 or tp < 4 or _scale_is_inconsistent(case):
        return None
    return _exact(case, "tp", tp // 2, "DTensor scales by the logical tensor, so only the order of sums differs")


def _hsdp(case: Case) -> Relation | None:
    layout = case.layout
    if layout.dp_replicate == 1:
        return None
    sharded = msgspec.structs.replace(layout, dp_replicate=1, dp_shard=layout.dp)
    if case.float8.fp8_all_gather and not _shards_evenly(case, sharded):
        return None  # torch cannot gather uneven shards in float8
    words = "the same slices of the batch are summed, in two stages or in one"
    return _related_in_float64(case, "dp_replicate", sharded, words)


def _sequence_parallel(case: Case) -> Relation | None:
    if case.layout.sequence_parallel:
        return None
    return _exact(case, "sequence_parallel", True, "it splits what is computed between TP blocks and moves no scale")


def _loss_parallel(case: Case) -> Relation | None:
    if case.layout.loss_parallel:
        return None
    return _exact(case, "loss_parallel", True, "it splits the softmax over the vocabulary")


_NEUTRAL: tuple[_Rule, ...] = (
    _async_tp,
    _compile,
    _checkpointing,
    _tp_styles,
    _pad_inner_dim,
    _fp8_all_gather,
    _precompute_scale,
)
_RULES: tuple[_Rule, ...] = (*_NEUTRAL, _inductor, _tp_degree, _hsdp, _sequence_parallel, _loss_parallel)


def _with_float8(case: Case, **changes: object) -> Case:
    return msgspec.structs.replace(case, float8=msgspec.structs.replace(case.float8, **changes))


def _exact(case: Case, name: str, value: object, reason: str) -> Relation | None:
    return _related_in_float64(case, name, msgspec.structs.replace(case.layout, **{name: value}), reason)


def _related_in_float64(case: Case, name: str, layout: Layout, reason: str) -> Relation | None:
    """In lower precision another order of sums flips the rounding of some float8 value within a step or two."""
    if case.train.dtype != "float64":
        return None
    return Relation(name=name, partner=msgspec.structs.replace(case, layout=layout), promise="exact", reason=reason)


def _shards_evenly(case: Case, layout: Layout) -> bool:
    """True when every rank holds as many rows of every converted weight."""
    rows = (linear_features(case, fqn.split(".", 2)[-1])[1] for fqn in converted_fqns(case))
    return all(count % (layout.dp_shard * layout.tp) == 0 for count in rows)
