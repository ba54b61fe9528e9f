"""Compiled blocks: what async TP must fuse, and how far generated code may be from its graph.

Async TP fuses the collectives between the blocks' matmuls that torch 2.13's pass can fuse. Arithmetic for the reference
Llama, per rank and step. A block gathers its input for attention and for feed-forward and reduce-scatters the outputs
of `wo` and `w2`; backward gathers the gradients of these two outputs and reduce-scatters the sums of input gradients.
Verified with torch 2.13 for every recipe, checkpointing mode and local batch, TP 2 to 8.

Inductor fuses operators and keeps float32 between them where the graph rounds. So a tensor in bfloat16 differs in its
last bits, and what is cast from it to float8 now and then by one float8 value. Where inductor is asked to round as the
graph does (`emulate_precision_casts`, rowwise), only sums in float32 differ, by their order.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.expect.model import is_recomputed
from harness.matrix.case import Case
from harness.matrix.linears import BLOCK_LINEARS, is_converted
from harness.promises import Limit
from harness.trace.graphs import Collective, GeneratedResult, GradientDistance, Phase

# The linears that read the input of attention and of feed-forward, and those that write their outputs.
_READ_INPUT = (("attention.wq", "attention.wk", "attention.wv"), ("feed_forward.w1", "feed_forward.w3"))
_WRITE_OUTPUT = ("attention.wo", "feed_forward.w2")


class FusionCandidate(NamedTuple):
    """A collective next to `matmuls` matmuls of one block. `fuses`: torch's pass fuses them into one operator."""

    phase: Phase
    collective: Collective
    purpose: str
    matmuls: int
    scaled: bool
    fuses: bool


def fusion_candidates(case: Case) -> tuple[FusionCandidate, ...]:
    """Return every collective of one step that async TP could fuse, block by block; none without async TP."""
    if not case.layout.async_tp:
        return ()
    return tuple(candidate for layer in range(case.model.shape.layers) for candidate in _block(case, layer))


def extra_matmul_calls(case: Case, *, scaled: bool) -> int:
    """Additional matmuls of one rank, `scaled` or not: pipelined operators split each fused one into TP chunks."""
    if case.layout.symm_mem == "fallback":
        return 0
    split = (candidate for candidate in fusion_candidates(case) if candidate.fuses and candidate.scaled == scaled)
    return sum(candidate.matmuls for candidate in split) * (case.layout.tp - 1)


def _block(case: Case, layer: int) -> Iterator[FusionCandidate]:
    scaled = {name: is_converted(case, f"layers.{layer}.{name}") for name in BLOCK_LINEARS}
    recomputed, bias = case.checkpointing.wraps(layer), case.model.bias

    def candidate(
        phase: Phase, collective: Collective, purpose: str, names: Sequence[str], fuses: bool
    ) -> FusionCandidate:
        return FusionCandidate(phase, collective, purpose, len(names), all(scaled[name] for name in names), fuses)

    for names in _READ_INPUT:
        wide = [name for name in names if not scaled[name]]  # they read what is gathered, and the others a cast of it
        fuses, readers = _gather_fuses(case, not wide, bias=bias), wide or names
        yield candidate("forward", "all_gather", f"input of {_names(names)}", readers, fuses)
        if recomputed:
            again = [name for name in readers if is_recomputed(case, layer, name)] or readers
            yield candidate("backward", "all_gather", f"recomputed input of {_names(names)}", again, fuses)
    for name in _WRITE_OUTPUT:
        fuses = _gather_fuses(case, scaled[name], bias=False)
        yield candidate("forward", "reduce_scatter", f"output of {name}", (name,), _scatter_fuses(case, scaled[name]))
        yield candidate("backward", "all_gather", f"output gradient of {name}", (name,), fuses)
    if recomputed and case.checkpointing.mode != "selective_op":  # selective_op saves the scattered output
        name = "attention.wo"
        purpose, fuses = f"recomputed output of {name}", _scatter_fuses(case, scaled[name])
        yield candidate("backward", "reduce_scatter", purpose, (name,), fuses)
    for names in _READ_INPUT:  # the sum of several matmuls cannot be fused with one of them
        yield candidate("backward", "reduce_scatter", f"input gradient of {_names(names)}", names, fuses=False)


def _gather_fuses(case: Case, scaled: bool, *, bias: bool) -> bool:
    """Return where the matmuls read the gathered tensor itself: in high precision, or in float8 cast before the gather.

    In high precision a matmul with a `bias` is `aten.addmm`, which the pass does not know. With one sequence per rank
    the gathered tensor is assembled in a way that the pass does not recognize.
    """
    reads_gathered = case.float8.tp_styles == "float8" if scaled else not bias
    return reads_gathered and case.local_batch > 1


def _scatter_fuses(case: Case, scaled: bool) -> bool:
    """Unless something follows the matmul: a bias, or a cast where axiswise scaling writes bfloat16 for float32.

    In float64, which no GPU has, the virtual device writes what the activations are.
    """
    cast = scaled and case.float8.traits.writes_bfloat16 and case.train.dtype == "float32"
    return not cast and not case.model.bias


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(name.rsplit(".", 1)[-1] for name in names)


# Generated code


def rounding(case: Case) -> Limit:
    """Return how far a tensor that is rounded to what the case computes in may be off, relative to its norm."""
    return Limit(_unit(case).name, Limit("code.units"))


def _unit(case: Case, *, emulated: bool = False) -> Limit:
    if case.train.dtype == "float64":
        return Limit("code.scale")  # scales are float32 whatever the case computes in
    return Limit("code.unit_float32" if emulated else f"code.unit_{case.train.dtype}")


def allowed_distance(case: Case, result: GeneratedResult, *, emulated: bool) -> Limit:
    """Return the largest distance of this tensor that rounding explains. `emulated`: the code rounds as its graph does.

    A value that is off by a share `r` of itself is rounded to a neighbor, a share `s` away, with probability r / s,
    which adds r * s to the square of the distance. The code adds up terms that the graph rounds first: `cancelled`.
    """
    if result.tensor.startswith("scale") and case.float8.traits.power_of_two_scales:
        return Limit("code.moved_rows")
    share = _unit(case, emulated=emulated)
    step = _step(result.dtype)
    if step is not None and share < step:
        return Limit(step.name, Limit("code.units") * math.sqrt(share / 2 / step))
    rows_move = case.float8.traits.power_of_two_scales and not emulated
    return Limit(share.name, Limit("code.units") * result.cancelled * (2 if rows_move else 1))


def _step(dtype: str) -> Limit | None:
    """Return the largest relative distance between neighboring values of a dtype."""
    if dtype.startswith("float8"):
        return Limit(f"code.step_{dtype}")
    return Limit("code.unit_bfloat16") if dtype == "bfloat16" else None


def allowed_row(case: Case, result: GeneratedResult, limit: Limit) -> float:
    """Return the largest distance of one row, where `limit` is the tensor's.

    Where the amax of a row is next to a power of two, its scale, and so its float8 data, may be twice or half as large,
    and products of such a row are rounded differently.
    """
    of_row = Limit("code.row", limit)
    if not case.float8.traits.power_of_two_scales:
        return of_row
    moves = result.tensor.startswith("scale") or result.dtype.startswith("float8")
    return 1.0 if moves else max(of_row, Limit("code.step_float8_e5m2"))


def reduced_distance(case: Case, distance: GradientDistance) -> float:
    """Return how far a gradient may be from the one that generated code returned, relative to its norm.

    On one rank it is the same tensor. FSDP2 rounds it to `reduce_dtype` in every sum, and to the dtype of parameters. A
    sum over TP ranks is rounded to the dtype of the case.
    """
    if distance.summed_over_tp:
        return rounding(case)
    if case.layout.dp == 1:
        return 0.0
    is_rounded = "bfloat16" in (case.train.reduce_dtype, case.parameter_dtype)
    return Limit("code.unit_bfloat16" if is_rounded else "code.scale", Limit("code.units"))
