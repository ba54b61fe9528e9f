"""The expected scaled matmuls of a rank in one step, including its evaluation and what checkpointing recomputes."""

from __future__ import annotations

from harness.expect.model import Model, llama_model
from harness.expect.trainer_traits import traits_of
from harness.matrix.case import Case
from harness.matrix.linears import BLOCK_LINEARS, is_converted
from harness.matrix.recipes import OPERANDS


def scaled_mm_calls(case: Case) -> int:
    """Scaled matmuls of one rank in one step: evaluation, forward, dgrad, wgrad, and forwards that are recomputed."""
    return calls_of_linears(case, llama_model(case)) + recomputed_calls(case)


def calls_of_linears(case: Case, model: Model) -> int:
    """Scaled matmuls of one rank in one step but recomputed ones: those in float8 of every call, and its evaluation."""
    forward, dgrad, wgrad = map(case.float8.traits.multiplies, OPERANDS)
    return (forward * (1 + case.train.evaluate) + dgrad + wgrad) * sum(model.calls.values())


def recomputed_calls(case: Case) -> int:
    """Forward scaled matmuls that checkpointing recomputes, in one rank and one step.

    `selective_op` saves every second matmul of a block (torchtitan 0.2.2, `_apply_op_sac`), converted or not: the
    policy sees `aten.mm` of a Float8TrainingTensor or DTensor, so its list needs no `_scaled_mm` to include them.
    """
    if not case.float8.traits.multiplies("forward"):
        return 0
    return case.train.accumulation * sum(
        is_converted(case, f"layers.{layer}.{name}")
        for layer in range(case.model.shape.layers)
        for name in BLOCK_LINEARS
        if is_multiplied_again(case, layer, name)
    )


def is_recomputed(case: Case, layer: int, name: str) -> bool:
    """True when checkpointing recomputes the matmul of this linear of a block.

    `selective_op` counts `aten.mm`. A linear in high precision with a bias is `aten.addmm`, which it never saves.
    """
    if case.checkpointing.mode != "selective_op":
        return case.checkpointing.wraps(layer)
    counted = [each for each in BLOCK_LINEARS if not case.model.bias or is_converted(case, f"layers.{layer}.{each}")]
    return name not in counted or counted.index(name) % 2 == 1


def is_multiplied_again(case: Case, layer: int, name: str) -> bool:
    """True when the forward of this linear of a block, in whatever precision, is executed again in backward.

    A compiled block does not recompute what backward does not read. An eager one stops once it has the last tensor that
    backward reads, which `aten.mm` saves before it multiplies: the last linear multiplies again in float8 only.
    """
    if not is_recomputed(case, layer, name):
        return False
    if case.compile != "none":
        return not _is_unused_in_backward(case, name)
    stops_before = name == BLOCK_LINEARS[-1] and not traits_of(case).recomputes_whole_blocks
    return not stops_before or is_converted(case, f"layers.{layer}.{name}")


def _is_unused_in_backward(case: Case, name: str) -> bool:
    """True when backward does not read the output of this linear: it is the last, or its scattered output is saved."""
    if name == BLOCK_LINEARS[-1]:
        return True
    scattered = case.layout.tp > 1 and case.layout.sequence_parallel
    return name == "attention.wo" and scattered and case.checkpointing.mode == "selective_op"
