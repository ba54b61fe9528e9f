"""The numbers that are kept of a run (`harness/result.py`), which of them moved, and derived tolerances.

A derived tolerance is how far a run may be from BF16 and from one rank where none was measured. It comes from BF16 runs
of the model, data and steps of the case on one rank, with random errors as large as those of float8
(`worker/training/noise.py`). No FP8 code runs in them, so a fault of it cannot widen what it is checked by, and nothing
is borrowed from another model. `tests/worker/test_training.py` compares them with measured tolerances.
"""

import hashlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from harness.checks import parity
from harness.checks.assembly import largest, nan_as_inf, same_numbers
from harness.checks.check import Witnesses, finished
from harness.evidence.references import DRAWS
from harness.evidence.tolerance import LOSS_VS_GOLDEN, PARITY, SAME_ORDER, Tolerance, parity_key, tolerance_key
from harness.expect.expectations import Expectations
from harness.expect.model import OF_GATHERS
from harness.expect.work import executed
from harness.matrix.case import Case
from harness.matrix.numerics import VIRTUAL_DEVICE, Numerics, activations_differ, norm_rounding
from harness.promises import Limit
from harness.result import CastRange, Curve, Measured, Multiplied, Numbers, Sent, Timeline, multiplied_by, sent_by
from harness.trace import RankTrace, Run
from harness.trace.counts import multiplied_words
from harness.trace.operands import CastRecord

DIGESTS = ("casts", "matmuls", "gradients", "parameters")  # in the order of causes
LOSSES, GRADIENT_NORMS, FLUSHED = "losses", "gradient norms", "flushed values"


def measured(case: Case, run: Run, witnesses: Witnesses) -> Measured | None:
    """Return the numbers of a run and of what it was compared with; None if no rank finished."""
    if not run.traces:
        return None
    traces = run.by_rank
    golden, solo, replay = witnesses.golden, finished(witnesses.solo), witnesses.replay
    available = {"case": _curve(run)} | ({} if solo is None else {"solo": _curve(solo)})
    seconds = ([step.seconds for step in trace.steps] for trace in traces)
    if golden is not None:
        available["golden"] = Curve(losses=golden.losses, grad_norms=golden.grad_norms)
    both = zip(available["case"].losses, golden.losses if golden is not None else (), strict=False)
    replayed = () if replay is None or not replay.complete else replay.traces[0].module_distances or ()
    tolerance = witnesses.parity_tolerance
    distances = {} if solo is None else parity.gradient_distances(case, run, solo, tolerance)
    steps = () if tolerance is None else range(1, case.train.steps + 1)
    allowed = [parity.allowed_distance(case, tolerance, step) for step in steps if tolerance is not None]
    expected_wire, limited_wire = _expected_wire(witnesses.expect, traces)
    return Measured(
        curves=available,
        allowed_loss=() if golden is None or witnesses.tolerance is None else witnesses.tolerance.per_step,
        worst_gradient=parity.worst_gradient(case, distances, tolerance),
        logprobs=None if solo is None else _logprob_distances(traces, solo.traces[0].logprobs or {}),
        same_bits=parity.same_bits(run, solo) if solo is not None else None,
        loss_distance=_worst([abs(loss - reference) for loss, reference in both]),
        parity=_parity(case, run, solo) if solo is not None else None,
        module_replay=_worst([tensor.distance for tensor in replayed if tensor.problem is None]),
        flushed=_flushed(traces),
        scaled_mm_calls=sum(step.scaled_mm_calls for trace in traces for step in trace.steps),
        flops=_flops(traces),
        expected_flops=_expected_flops(witnesses.expect, traces),
        wire=_wire(traces),
        expected_wire=expected_wire,
        limited_wire=limited_wire,
        saved_bytes=_saved(traces),
        expected_saved_bytes=_expected_saved(witnesses.expect, traces),
        fused=_fused(traces),
        digests=_digests(traces),
        gradient_errors=parity.errors(((key.step, key.fqn, apart) for key, apart in distances.items()), allowed),
        replay_errors=parity.errors((each.step, each.fqn, each.distance) for each in replayed if each.problem is None),
        timeline=_timeline(traces),
        casts=_casts(traces),
        cast_calls=_cast_calls(traces),
        expected_cast_calls=_expected_cast_calls(witnesses.expect, traces),
        peak_memory_bytes=max(trace.peak_memory_bytes for trace in traces),
        step_s=tuple(map(max, zip(*seconds, strict=False))),
    )


def _curve(run: Run) -> Curve:
    steps = run.by_rank[0].steps
    return Curve(losses=tuple(step.loss for step in steps), grad_norms=tuple(step.grad_norm for step in steps))


def _parity(case: Case, run: Run, solo: Run) -> float | None:
    sketches = (sketch for trace in solo.traces for sketch in trace.sketches or ())
    steps = sorted({sketch.step for sketch in sketches if sketch.kind == "grad"})
    return _worst(parity.worst_distances(run, solo, steps=steps, ignored=parity.rounding_floor(case)))


def _logprob_distances(traces: Sequence[RankTrace], expected: Mapping[int, bytes]) -> tuple[float, float] | None:
    """Return the largest and the mean distance over all tokens that ranks have; None where there are none."""
    rows = ((row, expected[at]) for trace in traces for at, row in (trace.logprobs or {}).items() if at in expected)
    pairs = (pair for row in rows for pair in zip(*(memoryview(part).cast("d") for part in row), strict=True))
    distances = [abs(own - other) for own, other in pairs if own != math.inf]
    return (largest(distances), sum(distances) / len(distances)) if distances else None


def _worst(values: Sequence[float]) -> float | None:
    return largest(values) if values else None


def _all_casts(traces: Iterable[RankTrace]) -> list[CastRecord]:
    return [cast for trace in traces if trace.operands is not None for cast in trace.operands.casts]


def _flushed(traces: Iterable[RankTrace]) -> float | None:
    casts = _all_casts(traces)
    elements = sum(cast.elements for cast in casts)
    return sum(cast.flushed for cast in casts) / elements if elements else None


def _flops(traces: Iterable[RankTrace]) -> Mapping[str, Multiplied]:
    records = (record for trace in traces for record in trace.flops or ())
    words = ((multiplied_words(part=record.part, precision=record.precision), record) for record in records)
    return multiplied_by((name, record.calls, record.flops) for name, record in words)


def _expected_flops(expect: Expectations, traces: Sequence[RankTrace]) -> Mapping[str, Multiplied]:
    """Return what the formula says that these ranks multiply; empty if it does not apply."""
    found = expect.case.model.experts or expect.case.train.packing != "none"
    if not _applies(expect) or found or any(trace.flops is None for trace in traces):
        return {}  # how many rows experts multiply is found in the run, and so is what documents attend to
    steps, saves_attention = expect.case.train.steps, traces[0].device != "cpu"
    of_ranks = (executed(expect.case, rank=trace.rank, saves_attention=saves_attention) for trace in traces)
    return multiplied_by(
        (words, steps * multiplied.calls, steps * multiplied.flops)
        for of_rank in of_ranks
        for words, multiplied in of_rank.items()
    )


def _wire(traces: Iterable[RankTrace]) -> Mapping[str, Sent]:
    records = (record for trace in traces for record in trace.traffic or ())
    return sent_by((record.words, sum(record.sizes.values()), record.payload_bytes) for record in records)


def _timeline(traces: Sequence[RankTrace]) -> Timeline | None:
    first = traces[0]
    kinds = [record for record in first.traffic or () if record.starts]
    calls = ((at, round(1e3 * s, 3), nbytes) for at, record in enumerate(kinds) for s, nbytes in record.starts)
    ordered, words = tuple(sorted(calls, key=lambda call: call[1])), tuple(record.words for record in kinds)
    return Timeline(rank=first.rank, step=kinds[0].step, kinds=words, calls=ordered) if kinds else None


def _expected_wire(
    expect: Expectations, traces: Sequence[RankTrace]
) -> tuple[Mapping[str, Sent] | None, tuple[str, ...]]:
    """Return what the formula says that these ranks send, None where it does not apply, and what it only limits."""
    if not _applies(expect) or any(trace.traffic is None for trace in traces):
        return None, ()
    terms = [
        term
        for trace in traces
        for step in range(1, expect.case.train.steps + 1)
        for term in expect.transfers(step=step, rank=trace.rank, calls=trace.expert_calls(step))
    ]
    wire = sent_by((term.words, term.times, term.payload_bytes) for term in terms)
    limited = {term.words for term in terms if term.least is not None and expect.case.compile != "none"}
    return {words: sent for words, sent in wire.items() if words not in limited}, tuple(sorted(limited))


def _expected_saved(expect: Expectations, traces: Sequence[RankTrace]) -> int | None:
    """Return what the formula says that these ranks save; None if it does not apply."""
    if not _applies(expect) or not expect.saves_exactly or _saved(traces) is None:
        return None
    return sum(
        sum(expect.saved_bytes(step=step, rank=trace.rank, calls=trace.expert_calls(step)).values())
        for trace in traces
        for step in range(1, expect.case.train.steps + 1)
    )


def _applies(expect: Expectations) -> bool:
    return expect.has_formulas and expect.refusal is None


def _saved(traces: Sequence[RankTrace]) -> int | None:
    if any(trace.saved_memory is None for trace in traces):
        return None
    return sum(record.saved_bytes for trace in traces for record in trace.saved_memory or ())


def _fused(traces: Iterable[RankTrace]) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for call in (call for trace in traces if trace.graphs is not None for call in trace.graphs.calls):
        counts[f"{call.operator} in {call.phase}"] += call.times
    return dict(sorted(counts.items()))


def _digests(traces: Sequence[RankTrace]) -> Mapping[str, str]:
    parts: dict[str, list[str]] = defaultdict(list)
    for trace in traces:
        operands = trace.operands
        for cast in operands.casts if operands is not None else ():
            of_cast = (cast.step, trace.rank, cast.fqn, cast.role, cast.phase)
            parts["casts"].append(repr((*of_cast, cast.scale.digest, cast.data_digest)))
        for matmul in operands.matmuls if operands is not None else ():
            of_matmul = (matmul.step, trace.rank, matmul.fqn, matmul.gemm, matmul.m, matmul.k, matmul.n)
            parts["matmuls"].append(repr((*of_matmul, matmul.a_digest, matmul.b_digest)))
        graphs = trace.graphs
        for seen in (*graphs.casts, *graphs.unknown_casts) if graphs is not None else ():
            parts["casts"].append(repr((trace.rank, seen)))
        for sketch in trace.sketches or ():
            kind = "gradients" if sketch.kind == "grad" else "parameters"
            parts[kind].append(repr((sketch.step, trace.rank, sketch.fqn, sketch.digest)))
    return {kind: hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] for kind, lines in parts.items()}


def _casts(traces: Iterable[RankTrace]) -> tuple[CastRange, ...]:
    by_operand: dict[tuple[int, str, str], list[CastRecord]] = defaultdict(list)
    for cast in _all_casts(traces):
        by_operand[cast.step, cast.fqn, cast.role].append(cast)
    return tuple(_range(*key, casts) for key, casts in sorted(by_operand.items()))


def _cast_calls(traces: Sequence[RankTrace]) -> int | None:
    if any(trace.operands is None for trace in traces):
        return None
    return sum(cast.phase not in OF_GATHERS for cast in _all_casts(traces))


def _expected_cast_calls(expect: Expectations, traces: Sequence[RankTrace]) -> int | None:
    """What the formula says that the linears of these ranks cast; None if it does not apply, or nothing is seen."""
    if not _applies(expect) or any(trace.operands is None for trace in traces):
        return None
    return expect.case.train.steps * sum(expect.of(trace.rank).cast_calls for trace in traces)


def _range(step: int, fqn: str, role: str, casts: Sequence[CastRecord]) -> CastRange:
    elements = sum(cast.elements for cast in casts)
    return CastRange(
        fqn=fqn,
        role=role,
        step=step,
        amax=largest([cast.amax for cast in casts]),
        scale_min=-largest([-cast.scale.minimum for cast in casts]),
        scale_max=largest([cast.scale.maximum for cast in casts]),
        saturated=sum(cast.saturated for cast in casts) / elements if elements else math.nan,
        flushed=sum(cast.flushed for cast in casts) / elements if elements else math.nan,
    )


# What moved: the exact numbers of a case that differ from those of another run


def moved(before: Numbers | None, now: Numbers | None, *, counts_only: bool = False) -> tuple[str, ...]:
    """Return the names of the exact numbers that differ, of those that both runs have; only counts repeat on a GPU."""
    if before is None or now is None:
        return ()
    one, other = (
        _counts(numbers) if counts_only else {**_values(numbers), **_counts(numbers)} for numbers in (before, now)
    )
    return tuple(
        name
        for name, value in one.items()
        if value not in (None, {}) and other[name] not in (None, {}) and not _same(value, other[name])
    )


def _same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return same_numbers(one, other)
    return one == other or repr(one) == repr(other)  # NaN


def _values(numbers: Numbers) -> Mapping[str, object]:
    curve = numbers.curves.get("case")
    return {
        **{name: numbers.digests.get(name) for name in DIGESTS},
        LOSSES: None if curve is None else curve.losses,
        GRADIENT_NORMS: None if curve is None else curve.grad_norms,
        FLUSHED: numbers.flushed,
        "loss distance": numbers.loss_distance,
        "parity": numbers.parity,
        "per-module replay": numbers.module_replay,
    }


def _counts(numbers: Numbers) -> Mapping[str, object]:
    return {
        "collectives": numbers.wire,
        "saved bytes": numbers.saved_bytes,
        "fused operators": numbers.fused,
        "scaled matmuls": numbers.scaled_mm_calls,
        "FLOPs": numbers.flops,
    }


# Derived tolerances

# Of the root mean square of the distances: a few draws do not show the largest, and rounding to nearest repeats its
# errors from step to step, which random errors do not.
LOSS_MARGIN = Limit("derived.loss_margin")
PARITY_MARGIN = Limit("derived.parity_margin")  # of the largest distance
FIRST_STEPS = 3  # they share one number, from all their distances: each has few, and they are close to each other


def derived_tolerance(case: Case, reference: Run, draws: Sequence[Run]) -> Tolerance:
    """Return how far the losses of the case may be from BF16, in nats: never less than at an earlier step."""
    expected = [step.loss for step in reference.traces[0].steps]
    pairs = (zip(draw.traces[0].steps, expected, strict=True) for draw in draws)
    drawn = [[abs(step.loss - loss) for step, loss in of_draw] for of_draw in pairs]
    first = _root_mean_square([distance for distances in drawn for distance in distances[:FIRST_STEPS]])
    later = [_root_mean_square(_without_farthest(distances)) for distances in zip(*drawn, strict=True)]
    per_step = _never_less([first] * len(expected[:FIRST_STEPS]) + later[FIRST_STEPS:])
    return _tolerance(LOSS_VS_GOLDEN, tolerance_key(case), [LOSS_MARGIN * distance for distance in per_step])


def derived_parity_tolerance(
    case: Case, reference: Run, draws: Sequence[Run], numerics: Numerics = VIRTUAL_DEVICE
) -> Tolerance:
    """How far any gradient may be from the single-rank one, relative to its norm: as far as two roundings are apart.

    With experts every draw counts: it is no accident there that a rounding sends a token to another expert.
    """
    steps = range(1, case.train.steps + 1)
    drawn = zip(
        *(parity.worst_distances(draw, reference, steps=steps, ignored=Limit(parity.IGNORED)) for draw in draws),
        strict=True,
    )
    counted = ([*distances] if case.model.experts else _without_farthest(distances) for distances in drawn)
    per_step = _never_less([PARITY_MARGIN * largest(distances) for distances in counted])
    if case.model.experts and case.layout.tp > 1:
        per_step = [max(allowed, Limit("derived.sent_elsewhere")) for allowed in per_step]
    # As far apart as a gradient is large, two runs have parted: how much further is chance.
    per_step = [allowed if allowed < 1 else max(allowed, Limit("derived.parted")) for allowed in per_step]
    key = parity_key(case, numerics)
    if key == SAME_ORDER:  # equal gradients, added up in the order that the target chose
        per_step[0] = Limit("derived.added")
    elif norm_rounding(case) and not activations_differ(case, numerics) and case.compile != "inductor":
        # generated code rounds elsewhere: a gradient that is reduced in bfloat16 was 2.5e-5 off
        per_step[0] = norm_rounding(case)
    return _tolerance(PARITY, key, per_step)


def _without_farthest(distances: Sequence[float]) -> list[float]:
    """Return the distances without the largest or a NaN: one draw may hit a step in which training is unstable."""
    return sorted(distances, key=nan_as_inf)[:-1]


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _never_less(values: Sequence[float]) -> list[float]:
    return list(itertools.accumulate(values, lambda *pair: largest(pair)))


def _tolerance(name: str, key: str, per_step: Sequence[float]) -> Tolerance:
    evidence = f"derived from {DRAWS} BF16 runs with rounding errors of float8"
    return Tolerance(name=name, key=key, per_step=tuple(map(float, per_step)), evidence=evidence, derived=True)
