"""Assembly: the sketches of all ranks summed into one per logical tensor, how far apart two numbers are, and by what.

A wrong loss or gradient may be the right one times a number of the case: a mean that is taken twice, or a sum in its
place, is off by exactly a degree, a batch or a number of tokens.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from harness.hints import run_cases
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.promises import Limit
from harness.trace import RankTrace, Run
from harness.trace.model import SKETCH_SIZE, TensorSketch

_SUMS = struct.Struct(f"<{SKETCH_SIZE}d")


class Sketches(Protocol):
    """What one rank sketched: a trace, or less than one."""

    @property
    def rank(self) -> int: ...

    @property
    def sketches(self) -> tuple[TensorSketch, ...] | None: ...


class SketchKey(NamedTuple):
    """Which tensor of a run."""

    step: int
    kind: str
    fqn: str


class Assembled(NamedTuple):
    """One logical tensor: its norm, its signed sums, and the number of elements in the shards of all owners."""

    shape: tuple[int, ...]
    norm: float
    sums: tuple[float, ...]
    elements: int

    @property
    def complete(self) -> bool:
        """Return True if the shards of the owners have as many elements as the tensor."""
        return self.elements == math.prod(self.shape)


def sketched(traces: Iterable[Sketches]) -> Iterator[tuple[SketchKey, int, TensorSketch]]:
    """Yield every sketch with the tensor and the rank that it is of."""
    for trace in traces:
        for sketch in trace.sketches or ():
            yield SketchKey(sketch.step, sketch.kind, sketch.fqn), trace.rank, sketch


def assemble(traces: Iterable[Sketches]) -> dict[SketchKey, Assembled]:
    """Return every sketched tensor of a run, sorted by step, kind and FQN."""
    shards: dict[SketchKey, list[TensorSketch]] = defaultdict(list)
    for key, _, sketch in sketched(traces):
        if sketch.owner:
            shards[key].append(sketch)
    return {key: _sum(shards[key]) for key in sorted(shards)}


def _sum(shards: Sequence[TensorSketch]) -> Assembled:
    columns = zip(*(_SUMS.unpack(shard.sums) for shard in shards), strict=True)
    norm = math.sqrt(sum(shard.norm_squared for shard in shards))  # not fsum, which raises where this is infinite
    elements = sum(math.prod(shard.local_shape) for shard in shards)
    return Assembled(shards[0].shape, norm, tuple(sum(column) for column in columns), elements)


def relative_distance(found: Assembled, expected: Assembled) -> float:
    """Return the estimated |found - expected| / |expected|, within about a quarter; NaN when either is not finite."""
    if not (math.isfinite(found.norm) and math.isfinite(expected.norm)):
        return math.nan
    distance = math.dist(found.sums, expected.sums) / math.sqrt(SKETCH_SIZE)
    if distance == 0 and found.norm == expected.norm:
        return 0.0
    return distance / expected.norm if expected.norm else math.inf


def relative_distances(
    found: Mapping[SketchKey, Assembled], expected: Mapping[SketchKey, Assembled], *, ignored: float = 0.0
) -> dict[SketchKey, float]:
    """Return the relative distance of every tensor that both sides sketched.

    A distance of at most `ignored` of the norm of all tensors of that step and kind is none. Some gradients are sums
    whose terms cancel, and consist of rounding errors alone: the bias of attention's keys, which softmax does
    not see.
    """
    norms: dict[tuple[int, str], list[float]] = defaultdict(list)
    for key, tensor in expected.items():
        norms[key.step, key.kind].append(tensor.norm)
    totals = {of: math.hypot(*tensor_norms) for of, tensor_norms in norms.items()}
    return {
        key: 0.0
        if _apart(found[key], expected[key]) <= ignored * totals[key.step, key.kind] < math.inf
        else relative_distance(found[key], expected[key])
        for key in expected
        if key in found
    }


def _apart(found: Assembled, expected: Assembled) -> float:
    """Return the larger of the distance and the difference of norms; NaN when either is not finite."""
    if not (math.isfinite(found.norm) and math.isfinite(expected.norm)):
        return math.nan
    return max(math.dist(found.sums, expected.sums) / math.sqrt(SKETCH_SIZE), abs(found.norm - expected.norm))


def nan_as_inf(distance: float) -> float:
    """Return a distance to sort by: NaN becomes infinite."""
    return math.inf if math.isnan(distance) else distance


def largest(values: Iterable[float], *, empty: float = math.nan) -> float:
    """Return the largest of the values, or NaN if it is among them; `empty` where there is none."""
    return max(values, key=nan_as_inf, default=empty)


def sum_of(traces: Iterable[Sketches], key: SketchKey) -> Assembled:
    """Return the sum of what all ranks hold of a tensor, replicas included."""
    return _sum(_of(traces, key))


def wrong_ranks(found: Sequence[RankTrace], expected: Sequence[RankTrace], key: SketchKey, allowed: float) -> list[int]:
    """Return the ranks whose own part of a tensor is further off than allowed; none where one rank has no such pieces.

    The single-rank reference is sketched in the pieces that FSDP2 ranks hold.
    """
    pieces = _of(expected, key)
    wrong = []
    for trace in found:
        for shard in _of((trace,), key):
            same = [piece for piece in pieces if _is_inside(piece, shard)]
            if sum(math.prod(piece.local_shape) for piece in same) != math.prod(shard.local_shape):
                return []
            if same and not relative_distance(_sum([shard]), _sum(same)) <= allowed:  # NaN is wrong
                wrong.append(trace.rank)
    return wrong


def _of(traces: Iterable[Sketches], key: SketchKey) -> list[TensorSketch]:
    return [sketch for of, _, sketch in sketched(traces) if of == key]


def _is_inside(piece: TensorSketch, shard: TensorSketch) -> bool:
    places = zip(piece.offset, piece.local_shape, shard.offset, shard.local_shape, strict=True)
    return all(begin <= at and at + size <= begin + length for at, size, begin, length in places)


def unequal_replicas(traces: Iterable[Sketches]) -> list[tuple[SketchKey, tuple[int, ...], dict[int, str]]]:
    """Return the shards that several ranks hold with different bits: (tensor, offset, digest by rank)."""
    holders: dict[tuple[SketchKey, tuple[int, ...], tuple[int, ...]], dict[int, str]] = defaultdict(dict)
    for key, rank, sketch in sketched(traces):
        holders[key, sketch.offset, sketch.local_shape][rank] = sketch.digest
    unequal = {place: digests for place, digests in holders.items() if len(set(digests.values())) > 1}
    return [(key, offset, digests) for (key, offset, _), digests in sorted(unequal.items())]


def size_of_error(name: str, found: float, expected: float) -> float:
    """Return how far off a reported number is: nats for a loss, relative for a gradient norm (NaN if it must be 0)."""
    difference = abs(found - expected)
    if name == "loss":
        return difference
    return difference / abs(expected) if expected else math.nan


def same_number(found: float, expected: float) -> bool:
    """Return True if the numbers are equal or both NaN."""
    return found == expected or (math.isnan(found) and math.isnan(expected))


def same_numbers(found: Sequence[float], expected: Sequence[float]) -> bool:
    return len(found) == len(expected) and all(map(same_number, found, expected))


# Factors between numbers

_CLOSE = Limit("factors.close")


class Factor(NamedTuple):
    """A number is `times` another one, or that part of it where `inverse`; `names`: what the case calls this number."""

    times: int
    inverse: bool
    names: tuple[str, ...]

    def __str__(self) -> str:
        size = f"1/{self.times}" if self.inverse else f"{self.times} times"
        return f"{size} ({' or '.join(self.names)})"


class Explanation(NamedTuple):
    """What a wrong number is, and what to do about it, where that is certain.

    `factor`: by which number of the case it is off.
    """

    what: str
    fix: str
    factor: Factor | None = None


_DP, _TP, _WORLD = "the data-parallel degree", "the tensor-parallel degree", "the number of ranks"
_CP = "the context-parallel degree"
_OF_RANKS = (_DP, _CP, _TP, _WORLD)
_MICROBATCHES = "the microbatches of an update"


def factor(found: float, expected: float, case: Case, *, within: float = _CLOSE) -> Factor | None:
    """Return the number of the case by which `found` is larger or smaller than `expected`, or None."""
    if not (found > 0 and expected > 0 and math.isfinite(found) and math.isfinite(expected)):
        return None
    ratio = found / expected
    inverse = ratio < 1
    times = 1 / ratio if inverse else ratio
    names = {value: names for value, names in _numbers(case).items() if abs(times / value - 1) <= within}
    return next((Factor(value, inverse, names) for value, names in names.items()), None)


def _numbers(case: Case) -> Mapping[int, tuple[str, ...]]:
    """Return the numbers above 1 that a mean may be taken over, with their names; the nearest cause first."""
    train, layout = case.train, case.layout
    numbers: dict[int, tuple[str, ...]] = {}
    for name, value in (
        (_DP, layout.dp),
        (_CP, layout.cp),
        (_TP, layout.tp),
        (_WORLD, layout.world_size),
        (_MICROBATCHES, train.accumulation),
        ("the sequences of a microbatch", case.microbatch),
        ("the sequences of the global batch", train.global_batch),
        ("the tokens of a sequence", train.seq_len),
        ("the tokens of a microbatch", case.tokens_per_rank),
        ("the tokens of the global batch", train.tokens),
        ("the labels of the global batch", train.valid_tokens if train.counts_labels else 0),
    ):
        if value > 1:
            numbers[value] = (*numbers.get(value, ()), name)
    return numbers


_OF_BF16 = Limit("factors.of_bfloat16")


class _Cause(NamedTuple):
    """A mistake that makes a loss or gradients `here` times as large as they must be, and `there` in the reference."""

    here: float
    there: float
    what: str
    fix: str


def _causes(case: Case, times: Factor) -> Iterator[_Cause]:
    """Yield the mistakes of which the run is so many times its reference, which has the microbatches of all ranks."""
    size = 1 / times.times if times.inverse else float(times.times)
    own, every = float(case.train.accumulation), float(case.train.accumulation * case.layout.batches)
    added = "microbatches are added up without dividing by their number"
    twice = "divided by the number of microbatches twice"
    divide = "divide the loss of every microbatch by `len(microbatches)` before backward(), once."
    yield _Cause(own, every, added, divide)
    yield _Cause(1 / own, 1 / every, twice, divide)
    if set(times.names) & set(_OF_RANKS):
        what = "divided by the number of ranks once too often" if times.inverse else "summed over ranks, not averaged"
        fix = "average over ranks once: FSDP2 averages gradients over data-parallel ranks, so backward() from the loss "
        yield _Cause(size, 1, what, f"{fix}of each rank, neither summed nor divided.")
    if _MICROBATCHES in times.names:
        yield _Cause(size, 1, twice if times.inverse else added, divide)
    if _DP in times.names and times.inverse and case.train.counts_labels:
        yield _Cause(size, 1, f"the mean over the labels of each rank; {labels_of_ranks(case)}", OVER_ALL_LABELS)
    if not set(times.names) & {*_OF_RANKS, _MICROBATCHES}:
        what = "divided by their number again" if times.inverse else "a sum instead of a mean"
        yield _Cause(size, 1, what, _loss_fix(times))


OVER_ALL_LABELS = "divide the sum over all labels by their number over all ranks: all-reduce it before backward()."


def labels_of_ranks(case: Case) -> str:
    """Return how many labels every data-parallel rank has in a step."""
    train, size = case.train, case.local_batch
    kept = [*map(train.labels_of, range(train.global_batch))]
    counts = (sum(kept[first : first + size]) for first in range(0, len(kept), size))
    return f"labels per rank: {', '.join(map(str, counts))}"


def _explained(case: Case, noun: str, times: Factor, reference: float | None) -> Explanation:
    """Return what makes `noun` so large. `reference`: how many times BF16 on one rank the single-rank reference is.

    A fix is given where it is the only cause. Otherwise the step is to be looked at with one microbatch, or with two.
    """
    size = 1 / times.times if times.inverse else times.times
    causes = {
        cause.what: cause.fix
        for cause in _causes(case, times)
        if math.isclose(cause.here / cause.there, size, rel_tol=_CLOSE)
        and (reference is None or math.isclose(cause.there, reference, rel_tol=_OF_BF16))
    }
    share = f"1/{times.times} of" if times.inverse else f"{times.times} times"
    what = f"{noun} is {share} the reference's: {', or '.join(causes) or ' or '.join(times.names)}"
    if len(causes) == 1:
        return Explanation(what, next(iter(causes.values())), times)
    other = replace(case, train=replace(case.train, accumulation=1 if case.train.accumulation > 1 else 2))
    told = f"run `{run_cases(case_id(other))}`: a factor that stays comes from the ranks, not from the microbatches."
    return Explanation(what, told if len(causes) > 1 else "", times)


def explain_loss(case: Case, run: Run, solo: Run, step: int, golden: Sequence[float] | None) -> Explanation | None:
    """Return why the losses of a step differ from the single-rank reference's; `golden`: those of BF16 on one rank."""
    losses = [trace.steps[step - 1].loss for trace in run.traces if len(trace.steps) >= step]
    expected = solo.traces[0].steps[step - 1].loss
    if not losses or not all(map(math.isfinite, (*losses, expected))):
        return None
    if max(losses) - min(losses) > Limit("factors.same_loss") * abs(expected):
        return _of_each_rank(losses, expected)
    times = factor(losses[0], expected, case)
    if times is None:
        return None
    return _explained(case, "the loss", times, None if golden is None else expected / golden[step - 1])


def _of_each_rank(losses: Sequence[float], expected: float) -> Explanation | None:
    for total, word, fix in (
        (sum(losses) / len(losses), "mean", "dist.all_reduce(loss); loss /= dist.get_world_size()"),
        (sum(losses), "sum", "dist.all_reduce(loss)"),
    ):
        if math.isclose(total, expected, rel_tol=Limit("factors.mean_of_ranks")):
            what = f"every rank reports the loss of its local batch: the {word} over ranks equals the reference"
            return Explanation(what, f"return the loss of the global batch, the same on every rank: `{fix}`.")
    return None


def _loss_fix(times: Factor) -> str:
    if times.inverse:
        return "the mean over tokens is divided by their number again: leave the division out."
    return "return the mean over tokens, not the sum: cross_entropy(…, reduction='mean')."


def explain_gradients(case: Case, run: Run, solo: Run, step: int, golden_norm: float | None) -> Explanation | None:
    """Return why gradients of a step are a number of the case times those of the single-rank reference."""
    found, expected = assemble(run.traces), assemble(solo.traces)
    pairs = {
        key.fqn: (found[key], tensor)
        for key, tensor in expected.items()
        if (key.step, key.kind) == (step, "grad") and key in found and tensor.norm > 0
    }
    factors = {fqn: _factor_of_tensor(*pair, case) for fqn, pair in pairs.items()}
    scaled = {fqn: tensor_factor for fqn, tensor_factor in factors.items() if tensor_factor is not None}
    if not scaled or len(set(scaled.values())) > 1:
        return None
    times, others = next(iter(scaled.values())), [pair for fqn, pair in pairs.items() if fqn not in scaled]
    if others and all(relative_distance(*pair) <= 2 * _CLOSE for pair in others):
        names = ", ".join(sorted(scaled)[:2]) + (" and others" if len(scaled) > 2 else "")
        what = f"{len(scaled)} of {len(pairs)} are {times} of the reference: {names}"
        return Explanation(what, _partial_fix(times, run, scaled))
    if len(scaled) <= len(others):
        return None
    total = math.hypot(*(tensor.norm for _, tensor in pairs.values()))
    noun = f"every gradient{f' but {len(others)}' if others else ''}"
    return _explained(case, noun, times, total / golden_norm if golden_norm else None)


def _factor_of_tensor(found: Assembled, expected: Assembled, case: Case) -> Factor | None:
    """Return the factor between two gradients of the same direction."""
    times = factor(found.norm, expected.norm, case)
    if times is None:
        return None
    size = found.norm / expected.norm
    scaled = expected._replace(norm=expected.norm * size, sums=tuple(signed_sum * size for signed_sum in expected.sums))
    return times if relative_distance(found, scaled) <= 2 * _CLOSE else None


def _partial_fix(times: Factor, run: Run, scaled: Iterable[str]) -> str:
    """Return the fix where one cause alone scales these gradients and leaves the others right; empty otherwise."""
    model = run.traces[0].model
    over_tp = {parameter.fqn: "tp" in parameter.axes for parameter in model.parameters} if model is not None else {}
    if _TP in times.names and _DP not in times.names and len({over_tp.get(fqn) for fqn in scaled} - {None}) == 1:
        return (
            "over tensor-parallel ranks these gradients are summed or divided once too often: keep such parameters "
            "DTensors of the TP mesh, and add no all-reduce of your own."
        )
    if _DP in times.names and _TP not in times.names:
        return "these parameters are reduced differently: shard them with fully_shard like the rest."
    return ""


def explain_scale(case: Case, loss: float) -> Explanation | None:
    """Whether the first loss looks like a sum, or like a mean of a mean. A model that knows nothing has ln(vocabulary).

    A guess: no reference has another mean than the target itself.
    """
    blank = math.log(case.model.vocab_size)
    if not loss > 0 or blank / 4 < loss < blank * 4:
        return None
    times = factor(loss, blank, case, within=Limit("factors.of_blank_model"))
    if times is None:
        return None
    what = f"the loss of step 1 is {loss:.4g}, about {times} of ln(vocabulary) = {blank:.3g}"
    of_tokens = not set(times.names) & {*_OF_RANKS, _MICROBATCHES}
    return Explanation(what, _loss_fix(times) if of_tokens else "")
