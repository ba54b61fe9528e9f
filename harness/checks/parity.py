"""Parity: does the layout compute what one rank computes? Losses, gradients and updated parameters of every step.

Runs are compared with the single-rank reference, not BF16: FP8 rounding is then the same on both sides. Gradients are
compared directly, because AdamW hides a gradient of the wrong magnitude.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from harness.checks import assembly
from harness.checks.assembly import Assembled, Explanation, SketchKey, assemble, largest, nan_as_inf, sketched
from harness.checks.check import Rule, Rules, Stage, Witnesses, finished
from harness.checks.comparison import Compared, first_wrong, numbers
from harness.checks.failures import unfinished, why_unfinished
from harness.evidence.tolerance import NONE_DERIVED, OF_EVERY_MODEL, Tolerance
from harness.matrix.case import Case
from harness.matrix.layout import batch_of, coordinates
from harness.matrix.numerics import clips_by_a_rounded_norm, norm_rounding, rounding_of_norm
from harness.promises import Limit
from harness.registry import REFERENCE
from harness.result import Errors, WorstGradient
from harness.text import format_ranks
from harness.trace import Run
from harness.trace.model import TensorSketch
from harness.verdict import Finding, Value

IGNORED = "parity.cancelled_bfloat16"  # in the BF16 runs that a tolerance is derived from

Tensors = dict[SketchKey, Assembled]


FLOAT32_LOSS = Limit("parity.float32_loss")

_rule = Rules("parity", Stage.ONE_RANK, only={"a missing reference": "no-tolerance"})
NO_REFERENCE = _rule.no_reference()
NO_TOLERANCE = _rule("no-tolerance", "no parity tolerance {why}", stage=Stage.RUN, judged=False)
_OFF = " differs from the single-rank reference by {distance:.2g}, tolerance {allowed:.2g}"
LOSS = _rule("loss", "{number}" + _OFF, numeric=True)
GRAD_NORM = _rule("grad-norm", "{number}" + _OFF, numeric=True)
REPORTED_NORM = _rule("reported-grad-norm", "{number}" + _OFF, numeric=True)
_FAR = (
    "{count} of {compared} {noun} differ from the single-rank reference; worst {module}: relative error "
    "{distance:.2g}, tolerance {allowed:.2g} (norm {norm:.6g}, reference {reference:.6g})"
)
GRADIENTS = _rule("gradients", _FAR, numeric=True)
PARAMETERS = _rule("parameters", _FAR, numeric=True)
INITIAL = _rule(
    "initial-weights",
    "{count} of {compared} parameters do not start from the weights of the single-rank reference; worst {module}: "
    "relative error {distance:.2g}, tolerance {allowed:.2g}",
    stage=Stage.DATA,
    located=True,
)
NOTHING_COMPARED = _rule("nothing-compared", "no {noun} were compared")
ONE_SIDE = _rule("one-side", "{kind} of {module} is missing from {side} (the first of {count})", key=("kind", "side"))
ELEMENTS = _rule("elements", "the ranks hold {elements} elements of {module}, which has shape {shape}")
TOKENS = _rule("tokens", "wrong tokens on {ranks}", stage=Stage.DATA)
REPLICAS = _rule(
    "replicas",
    "replicas of a shard differ: {kind} of {module} at offset {offset} (the first of {count})",
    key=("kind",),
)


@_rule.judged_by(
    blind="Bugs that the single-rank reference shares; small ones in bfloat16 under TP, where trajectories drift.",
    records=("sketches",),
)
def check_parity(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does the layout compute what one rank computes?"""
    solo, tolerance = finished(witnesses.solo), witnesses.parity_tolerance
    if solo is None:
        return [unfinished(NO_REFERENCE, "the single-rank reference", witnesses.solo, run)]
    if tolerance is None:
        why = f"{NONE_DERIVED}{why_unfinished(witnesses.underived)}"
        return [NO_TOLERANCE.finding(why=why, expected="a tolerance")]
    found, expected = assemble(run.traces), assemble(solo.traces)
    rounded = Limit("parity.other_dtype" if case.parameter_dtype == "bfloat16" else "parity.sums")
    sides = _Sides(run, solo, found, expected)
    initial = _tensors(sides, 1, "initial", rounded)
    every_step = [*initial, *_missing(found, expected), *replicas(case, run, expected), *_batches(case, run, solo)]
    floor = rounding_floor(case, tolerance)
    unseen = floor if _is_derived(tolerance) else 0.0
    for step in range(1, case.train.steps + 1):
        allowed = allowed_distance(case, tolerance, step)
        findings = [
            *_tensors(sides, step, "grad", allowed, floor, unseen),
            *_reported_numbers(case, run, solo, step, allowed),
        ]
        if findings:
            gradients, loss = _factors(case, run, witnesses, step)
            return every_step + [_with_factor(finding, gradients if finding.module else loss) for finding in findings]
        updated = _tensors(sides, step, "param", _allowed_of_weights(case, tolerance))
        if updated:
            return [*every_step, *updated]
    return every_step


def allowed_distance(case: Case, tolerance: Tolerance, step: int) -> float:
    """Return how far a gradient of this step may be from the reference's, relative to its norm."""
    return max(tolerance.per_step[step - 1], norm_rounding(case))


def _allowed_of_weights(case: Case, tolerance: Tolerance) -> float:
    """Return how far an updated parameter may be from the reference's, relative to its norm."""
    is_exact = tolerance.key in OF_EVERY_MODEL and case.target == REFERENCE  # others may add up microbatches otherwise
    is_rounded = not is_exact and case.parameter_dtype == "float32"
    return max(tolerance.per_step[-1], Limit("parity.last_bit") if is_rounded else 0.0)


def _factors(case: Case, run: Run, witnesses: Witnesses, step: int) -> tuple[Explanation | None, Explanation | None]:
    solo, golden = finished(witnesses.solo), witnesses.golden
    assert solo is not None, "there is nothing to compare with"
    norm, losses = (None, None) if golden is None else (golden.grad_norms[step - 1], golden.losses)
    gradients = assembly.explain_gradients(case, run, solo, step, norm)
    loss = assembly.explain_loss(case, run, solo, step, losses)
    if gradients and loss and loss.factor is not None and loss.factor == gradients.factor:
        loss = loss._replace(fix=gradients.fix)  # one mistake: gradients are those of the loss that is reported
    return gradients, loss


def _with_factor(finding: Finding, explanation: Explanation | None) -> Finding:
    if explanation is None or not (finding.module or finding.rule == LOSS.name):
        return finding
    return msgspec.structs.replace(finding, notes=(*finding.notes, explanation.what), fix=explanation.fix or None)


def worst_distances(run: Run, solo: Run, *, steps: Iterable[int], ignored: float = 0.0) -> tuple[float, ...]:
    """Return the largest relative distance of any gradient at each of `steps`; NaN where no gradient was compared."""
    found, expected = assemble(run.traces), assemble(solo.traces)
    return tuple(largest(_distances(found, expected, step, "grad", ignored).values()) for step in steps)


def gradient_distances(case: Case, run: Run, solo: Run, tolerance: Tolerance | None) -> dict[SketchKey, float]:
    """Return how far every gradient of every step is from the reference's, relative to its norm."""
    expected = {key: tensor for key, tensor in assemble(solo.traces).items() if key.kind == "grad"}
    return assembly.relative_distances(assemble(run.traces), expected, ignored=rounding_floor(case, tolerance))


def worst_gradient(
    case: Case, distances: Mapping[SketchKey, float], tolerance: Tolerance | None
) -> WorstGradient | None:
    """Return the gradient of any step that is furthest from the reference's; None where none was compared."""
    if not distances:
        return None
    worst = max(distances, key=lambda key: nan_as_inf(distances[key]))
    allowed = None if tolerance is None else float(allowed_distance(case, tolerance, worst.step))
    return WorstGradient(fqn=worst.fqn, step=worst.step, distance=distances[worst], allowed=allowed)


def errors(distances: Iterable[tuple[int, str, float]], tolerance: Sequence[float] = ()) -> Errors | None:
    """Return the largest distance of every row in every step; None where nothing was compared."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for step, name, distance in distances:
        found[name][step] = largest((distance, found[name].get(step, 0.0)))
    steps = tuple(sorted({step for of_steps in found.values() for step in of_steps}))
    rows = {name: tuple(_short(of_steps.get(step)) for step in steps) for name, of_steps in found.items()}
    return Errors(steps=steps, rows=rows, tolerance=tuple(map(float, tolerance[: len(steps)]))) if rows else None


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.3g}")


def same_bits(run: Run, solo: Run) -> bool | None:
    """Return True if every shard of a gradient or parameter has the bits of one rank, which holds the same shard.

    One rank holds the shards of FSDP2 without replicas: those of HSDP are compared in parts. Shards over TP, and shards
    that do not divide evenly, are no pieces of the reference: then it is False. None if nothing was compared.
    """
    found, expected = _bits(run), _bits(solo)
    return found <= expected if found and expected else None


def _bits(run: Run) -> set[tuple[SketchKey, tuple[int, ...], tuple[int, ...], str]]:
    """Return the digest of every shard that is not empty, with the place of it."""
    held = [(key, sketch) for key, _, sketch in sketched(run.traces) if math.prod(sketch.local_shape)]
    return {(key, *piece) for key, sketch in held for piece in _pieces(sketch)}


def _pieces(sketch: TensorSketch) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], str]]:
    parts, offset, shape = sketch.parts or (sketch.digest,), list(sketch.offset), list(sketch.local_shape)
    if shape:
        shape[sketch.cut] //= len(parts)
    for digest in parts:
        yield tuple(offset), tuple(shape), digest
        if shape:
            offset[sketch.cut] += shape[sketch.cut]


def rounding_floor(case: Case, tolerance: Tolerance | None = None) -> float:
    """Return the largest distance of a gradient that is only rounding error, as a share of the norm of all gradients.

    A derived tolerance says nothing of distances that its own runs ignore.
    """
    # Elsewhere only gradients are summed in another order.
    drifting = case.layout.tp > 1 or case.compile == "inductor" or clips_by_a_rounded_norm(case)
    floor = Limit(f"parity.cancelled_{case.train.dtype if drifting else case.wide_dtype}")
    return max(floor, Limit(IGNORED)) if drifting and _is_derived(tolerance) and case.float8.enabled else floor


def _is_derived(tolerance: Tolerance | None) -> bool:
    return tolerance is not None and tolerance.derived and tolerance.key not in OF_EVERY_MODEL


def _distances(found: Tensors, expected: Tensors, step: int, kind: str, ignored: float) -> dict[SketchKey, float]:
    wanted = {key: tensor for key, tensor in expected.items() if (key.step, key.kind) == (step, kind)}
    return assembly.relative_distances(found, wanted, ignored=ignored)


class _Sides(NamedTuple):
    run: Run
    solo: Run
    found: Tensors
    expected: Tensors


_TENSORS: Mapping[str, tuple[Rule, str]] = {
    "initial": (INITIAL, "initial weights"),
    "grad": (GRADIENTS, "gradients"),
    "param": (PARAMETERS, "updated parameters"),
}


def _tensors(
    sides: _Sides, step: int, kind: str, allowed: float, ignored: float = 0.0, unseen: float = 0.0
) -> list[Finding]:
    """Return the finding about what is further away than allowed, with the ranks whose own part is, if they show.

    `unseen`: the share of the norm of all tensors that each may be off besides, because the runs that `allowed` comes
    from ignore it: in bfloat16 attention rounds a gradient of queries or keys by as much, which is small where
    attention is even. The error has rank one, and a sketch may take that for twice as large.
    """
    rule, noun = _TENSORS[kind]
    distances = _distances(sides.found, sides.expected, step, kind, ignored)
    if not distances:
        return [NOTHING_COMPARED.finding(noun=noun, step=step or None)]
    besides = unseen and unseen * math.hypot(*(sides.expected[key].norm for key in distances))

    def limit(key: SketchKey) -> float:
        norm = sides.expected[key].norm
        return allowed + besides / norm if norm else allowed

    compared = (Compared(rule, step, distance, limit(key), key.fqn, of=key) for key, distance in distances.items())
    wrong = first_wrong(compared, worst=True)
    if wrong is None:
        return []
    key, several = wrong.told.of, len(sides.run.traces) > 1
    ranks = assembly.wrong_ranks(sides.run.traces, sides.solo.traces, key, wrong.told.allowed) if several else []
    norms = sides.found[key].norm, sides.expected[key].norm
    return [wrong.finding(sides.run, ranks, noun=noun, norm=norms[0], reference=norms[1])]


def _reported_numbers(case: Case, run: Run, solo: Run, step: int, allowed: float) -> list[Finding]:
    """Return the loss and gradient norm that ranks report. The norm cannot be further off than the worst gradient.

    That of the target itself has the rounding of its own sum besides.
    """
    expected = solo.traces[0].steps[step - 1]
    rounding, own = max(allowed, rounding_of_norm(case)), expected.reported_grad_norm
    reported = {} if own is None else {step: own}
    of_loss = max(Limit("parity.loss_share", allowed), 0.0 if case.train.dtype == "float64" else FLOAT32_LOSS)
    return [
        *numbers(LOSS, run, "loss", {step: expected.loss}, lambda *_: of_loss),
        *numbers(GRAD_NORM, run, "grad_norm", {step: expected.grad_norm}, lambda _, norm: allowed * norm),
        *numbers(REPORTED_NORM, run, "reported_grad_norm", reported, lambda _, norm: rounding * norm),
    ]


def _missing(found: Tensors, expected: Tensors) -> Iterator[Finding]:
    """Yield tensors that only one side sketched, and one of which the ranks hold too few or too many elements."""
    sides = {"this run": expected.keys() - found.keys(), "the single-rank reference": found.keys() - expected.keys()}
    for side, keys in sides.items():
        for key in sorted(keys)[:1]:
            count: dict[str, Value] = {"kind": key.kind, "side": side, "count": len(keys)}
            yield ONE_SIDE.finding(step=key.step, module=key.fqn, values=count)
    incomplete = [key for key, tensor in found.items() if not tensor.complete]
    for key in incomplete[:1]:
        held: dict[str, Value] = {"elements": found[key].elements, "shape": str(found[key].shape)}
        yield ELEMENTS.finding(step=key.step, module=key.fqn, values=held)


def _batches(case: Case, run: Run, solo: Run) -> list[Finding]:
    """Ranks that trained on other tokens than those of their data-parallel rank, which no global number shows."""
    expected = solo.traces[0].batch_digests
    parts = {trace.rank: batch_of(case.layout, trace.rank) for trace in run.traces}
    wrong = [trace for trace in run.traces if trace.batch_digests != expected[parts[trace.rank] :][:1]]
    if not wrong:
        return []
    first = wrong[0]
    others = [part for part, digest in enumerate(expected) if (digest,) == first.batch_digests]
    found = f"tokens of data-parallel rank {others[0]}" if others else "tokens of no data-parallel rank"
    right, ranks = f"tokens of data-parallel rank {parts[first.rank]}", [trace.rank for trace in wrong]
    return [TOKENS.finding(rank=first.rank, ranks=ranks, expected=right, found=found)]


def replicas(case: Case, run: Run, reference: Tensors) -> list[Finding]:
    """Return the replicated shards that are not bitwise equal. `reference`: what explains them."""
    unequal = assembly.unequal_replicas(run.traces)
    if not unequal:
        return []
    key, offset, digests = unequal[0]
    values: dict[str, Value] = {"kind": key.kind, "offset": str(offset), "count": len(unequal)}
    found = ", ".join(f"rank {rank}: {digest}" for rank, digest in sorted(digests.items()))
    notes = _not_reduced(case, run, reference.get(key), key, sorted(digests))
    return [
        REPLICAS.finding(
            step=key.step, module=key.fqn, ranks=digests, expected="one digest", found=found, notes=notes, values=values
        )
    ]


def _not_reduced(
    case: Case, run: Run, reference: Assembled | None, key: SketchKey, ranks: Sequence[int]
) -> Iterator[str]:
    """That these ranks, which hold the same part of a gradient, hold terms of its sum or mean instead."""
    where = [coordinates(case.layout, rank) for rank in ranks]
    axes = " and ".join(axis for axis in where[0] if len({of_rank[axis] for of_rank in where}) > 1)
    held = [assembly.sum_of([trace], key) for trace in run.traces if trace.rank in ranks]
    apart = largest(assembly.relative_distance(one, held[0]) for one in held)
    if reference is None or key.kind != "grad" or not axes or apart <= Limit("parity.terms"):
        return  # replicas this close are no terms of a sum
    total = assembly.sum_of(run.traces, key)
    for word, times in (("sum", 1), ("mean", len(ranks))):
        scaled = total._replace(norm=reference.norm, sums=tuple(signed_sum / times for signed_sum in total.sums))
        if assembly.relative_distance(scaled, reference) <= Limit("parity.terms"):
            yield f"the {word} over {axes} of {format_ranks(ranks)} equals the reference: it is not reduced over {axes}"
            return
