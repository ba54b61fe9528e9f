"""The linears of a case: which are converted, and how often each of them runs in a step of one rank.

Of a Llama they follow from the case. Of any other model they are those that its single-rank reference was found to
have, which runs without injections; what is recomputed is found in the run itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from harness.matrix.case import Case
from harness.matrix.linears import OUTPUT_FQN, converted_fqns, is_checkpointed
from harness.matrix.targets import is_llama
from harness.trace.model import ModelRecord
from harness.trace.operands import CastRecord

# Linears of the Llama that cast their own input with float8 TP styles too; the others share what their parent casts.
_OWN_INPUT = ("attention.wo", "feed_forward.w2")

# The names under which an output layer is left out unless a case converts it too.
_HEADS = (OUTPUT_FQN, "lm_head")


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """`calls`: how often the forward of a converted linear runs in a step, by FQN; `recomputed`: and again in backward.

    `input_sites`: the modules that cast the inputs of converted linears, by FQN. Of these linears `on_tp` have a weight
    that is distributed over TP ranks, `styled` a float8 TP style, which casts nothing again in backward, and `gathered`
    a weight that FSDP2 gathers in float8.
    """

    converted: tuple[str, ...]  # sorted
    calls: Mapping[str, int]
    recomputed: Mapping[str, int]
    on_tp: frozenset[str]
    styled: frozenset[str]
    gathered: frozenset[str]
    input_sites: Mapping[str, str]


def llama_model(case: Case) -> Model:
    """The linears of the Llama that the case describes."""
    converted = converted_fqns(case)
    has_styles = case.float8.tp_styles == "float8" and case.layout.tp > 1
    styled = frozenset(fqn for fqn in converted if has_styles and fqn != OUTPUT_FQN)
    shares = {fqn for fqn in styled if not fqn.endswith(_OWN_INPUT)}
    return Model(
        converted=converted,
        calls=dict.fromkeys(converted, case.train.accumulation),
        recomputed={fqn: case.train.accumulation * is_checkpointed(case, fqn) for fqn in converted},
        on_tp=frozenset(converted),
        styled=styled,
        gathered=frozenset(converted if case.gathers_float8 else ()),
        input_sites={fqn: fqn.rpartition(".")[0] if fqn in shares else fqn for fqn in converted},
    )


def found_model(case: Case, reference: ModelRecord, run: ModelRecord, casts: Iterable[CastRecord] = ()) -> Model:
    """The linears of a model that is not known: `reference` is that of the single-rank reference of `case`.

    `run` and `casts` are of one rank: which modules have a float8 TP style, and cast, is the choice of the target.
    """
    fqns = sorted(linear.fqn for linear in reference.linears if _is_asked_for(case, linear.fqn))
    weights = {parameter.fqn: parameter for parameter in run.parameters}
    tied = {linear.fqn for linear in reference.linears if linear.tied}  # an embedding cannot look up float8
    inputs = {(cast.fqn, cast.phase) for cast in casts if cast.role == "input"}
    in_forward = {fqn for fqn, phase in inputs if phase == "forward"}
    return Model(
        converted=tuple(fqns),
        calls={fqn: reference.calls.get(fqn, 0) // case.layout.dp for fqn in fqns},
        recomputed={fqn: run.recomputed.get(fqn, 0) for fqn in fqns},
        on_tp=frozenset(
            fqn for fqn in fqns if (weight := weights.get(f"{fqn}.weight")) is not None and "tp" in weight.axes
        ),
        styled=frozenset(
            fqn for fqn in fqns if case.float8.tp_styles == "float8" and inputs and (fqn, "backward") not in inputs
        ),
        gathered=frozenset(fqn for fqn in fqns if case.gathers_float8 and fqn not in tied),
        input_sites={fqn: _input_site(fqn, in_forward) for fqn in fqns},
    )


def _input_site(fqn: str, casting: Collection[str]) -> str:
    """The nearest of the `casting` modules at or above a linear; the linear itself where there is none."""
    parts = fqn.split(".")
    above = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
    return next((module for module in above if module in casting), fqn)


def accumulates(case: Case, model: Model | None) -> bool:
    """True where data-parallel ranks add up the gradients of several calls before they add up theirs, or may do so.

    The single-rank reference does the same where it knows the rank of a forward pass (`worker/sequential_ranks.py`).
    """
    if is_llama(case.target) or model is None or case.layout.dp == 1:
        return False
    return any(calls != 1 for calls in model.calls.values())  # in compiled runs calls are not counted: 0


def _is_asked_for(case: Case, fqn: str) -> bool:
    if not case.float8.enabled or any(entry in fqn for entry in case.float8.filter_fqns):
        return False
    return case.float8.output_layer or fqn.rpartition(".")[2] not in _HEADS


def recomputed_matmuls(case: Case, model: Model) -> tuple[int, int]:
    """Fewest and most scaled matmuls that checkpointing recomputes of a model that is not known.

    `selective_op` keeps the results of some matmuls, and which ones is the choice of the target.
    """
    most = sum(model.recomputed.values())
    return (0 if case.checkpointing.mode == "selective_op" else most), most
