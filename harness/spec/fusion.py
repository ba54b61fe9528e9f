"""What async TP must fuse: the collectives between the blocks' matmuls, and which of them torch 2.13's pass can fuse.

Pure arithmetic of the reference Llama, per rank and step. A block gathers its input for attention and for feed-forward
and scatters what comes out of `wo` and `w2`; backward gathers the gradients of these two outputs and scatters the sums
of input gradients. Counted with torch 2.13 over every recipe, checkpointing mode and local batch, at TP 2, 4 and 8.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.spec.case import Case, Value
from harness.spec.gemms import is_checkpointed, is_converted, scaled_mm_calls
from harness.trace.graphs import Collective, Phase

_ENTRIES = (
    ("attention.wq", "attention.wk", "attention.wv"),
    ("feed_forward.w1", "feed_forward.w3"),
)
_EXITS = ("attention.wo", "feed_forward.w2")


class Joint(Value, frozen=True, kw_only=True):
    """A collective next to `matmuls` matmuls of one block. `fuses`: torch's pass makes one operator of them."""

    phase: Phase
    collective: Collective
    layer: int
    purpose: str
    matmuls: int
    scaled: bool
    fuses: bool


def joints(case: Case) -> tuple[Joint, ...]:
    """Every collective of one step that async TP could fuse, block by block; none without async TP."""
    if not case.layout.async_tp:
        return ()
    return tuple(joint for layer in range(case.model.shape.layers) for joint in _block(case, layer))


def extra_scaled_mm_calls(case: Case) -> int:
    """Scaled matmuls that one rank executes in addition because the pipelined operators cut each into TP pieces."""
    if case.layout.symm_mem == "fallback":
        return 0
    return sum(joint.matmuls for joint in joints(case) if joint.fuses and joint.scaled) * (case.layout.tp - 1)


def executed_scaled_mm_calls(case: Case) -> int:
    """Scaled matmuls that one rank executes in one step, pieces of fused ones counted each."""
    return scaled_mm_calls(case) + extra_scaled_mm_calls(case)


def _block(case: Case, layer: int) -> Iterator[Joint]:
    recomputed = is_checkpointed(case, layer)
    for names in _ENTRIES:
        yield _gather(case, layer, "forward", names, f"input of {_names(names)}")
        if recomputed:
            yield _gather(case, layer, "backward", names, f"recomputed input of {_names(names)}")
    for name in _EXITS:
        yield _scatter(case, layer, "forward", name, f"output of {name}")
        yield _gather(case, layer, "backward", (name,), f"output gradient of {name}")
    if recomputed and case.checkpointing.mode != "selective_op":  # which saves what it scattered
        yield _scatter(case, layer, "backward", "attention.wo", "recomputed output of attention.wo")
    for names in _ENTRIES:  # a sum of several matmuls has no single one to fuse with
        yield Joint(
            phase="backward",
            collective="reduce_scatter",
            layer=layer,
            purpose=f"input gradient of {_names(names)}",
            matmuls=len(names),
            scaled=_is_scaled(case, layer, names[0]),
            fuses=False,
        )


def _gather(case: Case, layer: int, phase: Phase, names: tuple[str, ...], purpose: str) -> Joint:
    """Fused where the matmuls take what was gathered as it is: high precision linears, or casts before the gather.

    With one sequence per rank the gather is put together on a way that the pass does not know.
    """
    scaled = [_is_scaled(case, layer, name) for name in names]
    as_it_is = not any(scaled) or case.float8.tp_styles == "float8"
    return Joint(
        phase=phase,
        collective="all_gather",
        layer=layer,
        purpose=purpose,
        matmuls=len(names),
        scaled=all(scaled),
        fuses=as_it_is and case.local_batch > 1,
    )


def _scatter(case: Case, layer: int, phase: Phase, name: str, purpose: str) -> Joint:
    """Fused unless a cast follows the matmul: axiswise scaling writes bfloat16 whatever the activations are."""
    scaled = _is_scaled(case, layer, name)
    cast = scaled and case.float8.recipe != "tensorwise" and case.train.dtype != "bfloat16"
    return Joint(
        phase=phase,
        collective="reduce_scatter",
        layer=layer,
        purpose=purpose,
        matmuls=1,
        scaled=scaled,
        fuses=not cast,
    )


def _is_scaled(case: Case, layer: int, name: str) -> bool:
    return is_converted(case, f"layers.{layer}.{name}")


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(name.rsplit(".", 1)[-1] for name in names)
