"""From what the ranks of a run recorded to the numbers that are kept of it (`harness/result.py`), and which moved."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.checks.assembly import largest, same_numbers
from harness.checks.check import Witnesses, finished
from harness.checks.findings import traces_by_rank
from harness.checks.parity import rounding_floor, same_bits, worst_distances, worst_gradient
from harness.expect.casts import OF_GATHERS
from harness.expect.expectations import Expectations
from harness.expect.work import executed
from harness.matrix.case import Case
from harness.result import CastRange, Curve, Measured, Multiplied, Numbers, Sent, multiplied_by, sent_by
from harness.trace import RankTrace, Run
from harness.trace.counts import multiplied_words
from harness.trace.operands import CastRecord

DIGESTS = ("casts", "matmuls", "gradients", "parameters")  # in the order of causes
LOSSES, GRADIENT_NORMS, FLUSHED = "losses", "gradient norms", "flushed values"


def measured(case: Case, run: Run, witnesses: Witnesses) -> Measured | None:
    """The numbers of a run and of what it was compared with; None where no rank finished."""
    if not run.traces:
        return None
    traces = traces_by_rank(run)
    golden, solo, replay = witnesses.golden, finished(witnesses.solo), witnesses.replay
    curves = {"case": _curve(run), "solo": _curve(solo)}
    if golden is not None:
        curves["golden"] = Curve(losses=golden.losses, grad_norms=golden.grad_norms)
    available = {name: curve for name, curve in curves.items() if curve is not None}
    replayed = () if replay is None or not replay.complete else replay.traces[0].module_distances or ()
    return Measured(
        curves=available,
        allowed_loss=() if golden is None or witnesses.tolerance is None else witnesses.tolerance.per_step,
        worst_gradient=worst_gradient(case, run, solo, witnesses.parity_tolerance) if solo is not None else None,
        same_bits=same_bits(run, solo) if solo is not None else None,
        loss_distance=_largest_gap(available["case"], available["golden"]) if golden is not None else None,
        parity=_parity(case, run, solo) if solo is not None else None,
        local_parity=_worst([tensor.distance for tensor in replayed if tensor.problem is None]),
        flushed=_flushed(traces),
        scaled_mm_calls=sum(step.scaled_mm_calls for trace in traces for step in trace.steps),
        flops=_flops(traces),
        expected_flops=_expected_flops(witnesses.expect, traces),
        wire=_wire(traces),
        expected_wire=_expected_wire(witnesses.expect, traces),
        saved_bytes=_saved(traces),
        expected_saved_bytes=_expected_saved(witnesses.expect, traces),
        fused=_fused(traces),
        digests=_digests(traces),
        casts=_casts(traces),
        cast_calls=_cast_calls(traces),
        expected_cast_calls=_expected_cast_calls(witnesses.expect, traces),
        peak_memory_bytes=max(trace.peak_memory_bytes for trace in traces),
        step_s=_slowest(traces),
    )


def _curve(run: Run | None) -> Curve | None:
    if run is None or not run.traces:
        return None
    steps = traces_by_rank(run)[0].steps
    return Curve(losses=tuple(step.loss for step in steps), grad_norms=tuple(step.grad_norm for step in steps))


def _largest_gap(curve: Curve, golden: Curve) -> float | None:
    return _worst([abs(loss - reference) for loss, reference in zip(curve.losses, golden.losses, strict=False)])


def _parity(case: Case, run: Run, solo: Run) -> float | None:
    sketches = (sketch for trace in solo.traces for sketch in trace.sketches or ())
    steps = sorted({sketch.step for sketch in sketches if sketch.kind == "grad"})
    return _worst(worst_distances(run, solo, steps=steps, ignored=rounding_floor(case)))


def _worst(values: Sequence[float]) -> float | None:
    return largest(values) if values else None


def _flushed(traces: Iterable[RankTrace]) -> float | None:
    casts = [cast for trace in traces if trace.operands is not None for cast in trace.operands.casts]
    elements = sum(cast.elements for cast in casts)
    return sum(cast.flushed for cast in casts) / elements if elements else None


def _slowest(traces: Sequence[RankTrace]) -> tuple[float, ...]:
    """The seconds of every step on the rank that took most."""
    of_ranks = ([step.seconds for step in trace.steps] for trace in traces)
    return tuple(max(seconds) for seconds in zip(*of_ranks, strict=False))


def _flops(traces: Iterable[RankTrace]) -> Mapping[str, Multiplied]:
    records = (record for trace in traces for record in trace.flops or ())
    words = ((multiplied_words(part=record.part, precision=record.precision), record) for record in records)
    return multiplied_by((name, record.calls, record.flops) for name, record in words)


def _expected_flops(expect: Expectations, traces: Sequence[RankTrace]) -> Mapping[str, Multiplied]:
    """What the formula says that these ranks multiply; empty where it does not apply."""
    if not _applies(expect) or expect.case.model.experts or any(trace.flops is None for trace in traces):
        return {}  # how many rows experts multiply is found in the run
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


def _expected_wire(expect: Expectations, traces: Sequence[RankTrace]) -> Mapping[str, Sent]:
    """What the formula says that these ranks send; empty where it does not apply."""
    if not _applies(expect) or any(trace.traffic is None for trace in traces):
        return {}
    terms = [
        term
        for trace in traces
        for step, rank in _turns(expect, [trace])
        for term in expect.transfers(step=step, rank=rank, calls=trace.expert_calls(step))
    ]
    wire = sent_by((term.words, term.times, term.payload_bytes) for term in terms)
    limited = {term.words for term in terms if term.least is not None and expect.case.compile != "none"}
    return {words: sent for words, sent in wire.items() if words not in limited}


def _expected_saved(expect: Expectations, traces: Sequence[RankTrace]) -> int | None:
    """What the formula says that these ranks save; None where it does not apply."""
    if not _applies(expect) or not expect.saves_exactly or _saved(traces) is None:
        return None
    return sum(
        sum(expect.saved_bytes(step=step, rank=rank, calls=trace.expert_calls(step)).values())
        for trace in traces
        for step, rank in _turns(expect, [trace])
    )


def _applies(expect: Expectations) -> bool:
    return expect.has_formulas and expect.refusal is None


def _turns(expect: Expectations, traces: Iterable[RankTrace]) -> Iterator[tuple[int, int]]:
    """Every step (1-based) of every rank."""
    return ((step, trace.rank) for trace in traces for step in range(1, expect.case.train.steps + 1))


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
    for cast in (cast for trace in traces if trace.operands is not None for cast in trace.operands.casts):
        by_operand[cast.step, cast.fqn, cast.role].append(cast)
    return tuple(_range(*key, casts) for key, casts in sorted(by_operand.items()))


def _cast_calls(traces: Sequence[RankTrace]) -> int | None:
    if any(trace.operands is None for trace in traces):
        return None
    casts = (cast for trace in traces if trace.operands is not None for cast in trace.operands.casts)
    return sum(cast.phase not in OF_GATHERS for cast in casts)


def _expected_cast_calls(expect: Expectations, traces: Sequence[RankTrace]) -> int | None:
    """What the formula says that the linears of these ranks cast; None where it does not apply, or nothing is seen."""
    if not _applies(expect) or _cast_calls(traces) is None:
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
    """The names of the exact numbers that differ, of those that both runs have; only counts repeat on a GPU."""
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
        "local parity": numbers.local_parity,
    }


def _counts(numbers: Numbers) -> Mapping[str, object]:
    return {
        "collectives": numbers.wire,
        "saved bytes": numbers.saved_bytes,
        "fused operators": numbers.fused,
        "scaled matmuls": numbers.scaled_mm_calls,
        "FLOPs": numbers.flops,
    }
