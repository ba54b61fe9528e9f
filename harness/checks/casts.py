"""Casts and matmuls of a rank by their keys, rules about scales and values of casts, and what a wrong scale is from.

A key says where an operand is cast or multiplied (`CastKey`, `MatmulKey`), so that the same one can be found on another
rank or in another run. It is paired with the occurrence, counted from 0: a linear casts the same operand several times
in a step when forward is recomputed or batches are replayed.

Every rule, of eager casts or those inside of a compiled graph, yields (rule, expected, found) for what is broken and
nothing otherwise.
"""

import functools
import itertools
import math
import struct
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from harness.checks.assembly import largest, same_number
from harness.checks.check import Rule, Rules, Stage
from harness.expect.expectations import CASTS
from harness.matrix.case import Case
from harness.matrix.layout import MESH_AXES, peers
from harness.matrix.recipes import E8M0, FLOAT8_MAX, RecipeTraits
from harness.promises import Limit
from harness.text import format_ranks
from harness.trace import RankTrace
from harness.trace.operands import CastPhase, CastRecord, CastStatistics, GemmRole, MatmulRecord, Role, ScaleSummary

Record = TypeVar("Record")
Key = TypeVar("Key", bound=Hashable)


class CastKey(NamedTuple):
    """Where a cast happens: one operand of one linear in one phase of one step."""

    step: int
    fqn: str
    role: Role
    phase: CastPhase


class MatmulKey(NamedTuple):
    """Where a matmul happens: a GEMM of a linear in a step. The single-rank reference repeats it per dp rank."""

    step: int
    fqn: str
    gemm: GemmRole


def casts_by_key(trace: RankTrace) -> dict[tuple[CastKey, int], CastRecord]:
    casts = trace.operands.casts if trace.operands is not None else ()
    return with_occurrence((CastKey(cast.step, cast.fqn, cast.role, cast.phase), cast) for cast in casts)


def matmuls_by_key(trace: RankTrace) -> dict[tuple[MatmulKey, int], MatmulRecord]:
    matmuls = trace.operands.matmuls if trace.operands is not None else ()
    return with_occurrence((MatmulKey(matmul.step, matmul.fqn, matmul.gemm), matmul) for matmul in matmuls)


def on_ranks(records: Mapping[int, Mapping[Key, Record]], ranks: Iterable[int], key: Key) -> dict[int, Record]:
    """Return the record with this key on every one of the ranks that has it; `records` are those of every rank."""
    return {rank: records[rank][key] for rank in ranks if key in records.get(rank, {})}


def with_occurrence(records: Iterable[tuple[Key, Record]]) -> dict[tuple[Key, int], Record]:
    seen: Counter[Key] = Counter()
    by_key = {}
    for key, record in records:
        by_key[key, seen[key]] = record
        seen[key] += 1
    return by_key


Broken = tuple[Rule, str, str]  # with what was expected and found


_EPS = 1e-12  # torchao replaces a smaller amax by this one


class CastRules:
    """The rules about one cast, declared among those of a check of scales. Its methods yield what is broken."""

    def __init__(self, rule: Rules) -> None:
        values = functools.partial(rule, stage=Stage.VALUES)
        self.amax = rule("amax", "scale does not match the amax")
        self.scale_dtype = rule("scale-dtype", "scale has the wrong dtype")
        self.scale_range = rule("scale-range", "scale is not positive and finite")
        self.power_of_two = rule("power-of-two", "scale is not a power of two")
        self.scale_shape = rule("scale-shape", "scale has the wrong shape")
        self.target_dtype = rule("target-dtype", "cast to the wrong dtype")
        self.number = rule("number", "wrong number of casts{of}", key=("of",), formula=CASTS)
        self.data = values("data", "float8 data does not match its source and scale")
        self.saturated = values("saturated", "float8 values saturate")
        self.nonfinite = values("nonfinite", "float8 values are NaN or infinite")

    def of_numbers(self, case: Case, cast: CastStatistics) -> Iterator[Broken]:
        """Rules that need nothing but the numbers of the cast."""
        scale = cast.scale
        traits = case.float8.traits
        if scale.dtype != traits.scale_dtype:
            yield self.scale_dtype, traits.scale_dtype, scale.dtype
        usable = scale.minimum > 0 and math.isfinite(scale.maximum)
        if not usable and cast.elements and math.isfinite(cast.amax):  # else the tensor was wrong before its cast
            yield self.scale_range, "finite, above 0", f"{scale.minimum} to {scale.maximum}"
        finite = math.isfinite(scale.minimum) and math.isfinite(scale.maximum)
        if traits.power_of_two_scales and finite and not scale.power_of_two:
            yield self.power_of_two, "powers of two", f"{scale.minimum} to {scale.maximum}"
        for count, rule in (
            (cast.mismatched, self.data),
            (0 if traits.rounds_scales_down else cast.saturated, self.saturated),
            (cast.nonfinite, self.nonfinite),
        ):
            if count:
                yield rule, "0 elements", f"{count} of {cast.elements} elements"

    def of_tensor(self, cast: CastStatistics, amax: float) -> Iterator[Broken]:
        """Yield the one scale of a tensor is the one for `amax`, the amax of the whole tensor."""
        expected = tensorwise_scale(cast.target_dtype, amax)
        if not same_number(cast.scale.maximum, expected):
            limit, found = FLOAT8_MAX.get(cast.target_dtype, math.nan), cast.scale.maximum
            implied = f" = {limit:g} / amax {limit / found:.7g}" if found > 0 else ""
            yield self.amax, f"{expected!r} = {limit:g} / amax {amax!r}", f"{found!r}{implied}"

    def of_powers(self, traits: RecipeTraits, target_dtype: str, lowest: float, highest: float) -> Iterator[Broken]:
        """Scales put every amax * scale, here from `lowest` to `highest`, into their binade, or where it belongs."""
        limit = FLOAT8_MAX.get(target_dtype, math.nan)
        if highest == 0 or math.isnan(highest) or _in_binade(traits, limit, lowest, highest):
            return
        found = f"{lowest / limit:.9g} to {highest / limit:.9g} of it"
        if 0 < lowest <= highest < math.inf:
            low, high = limit / highest * least_share(traits), limit / lowest
            found += f", as for amaxes of {low:.3g} to {high:.3g} times the right ones"
        binade = "[4/7, 8/7)" if traits.rounds_scales_down else "(1/2, 1]" if traits.power_of_two_scales else "[1, 1]"
        yield self.amax, f"amax * scale in {binade} of {limit:g}", found


def tensorwise_scale(target_dtype: str, amax: float) -> float:
    """Return the scale of a tensor with this amax: fp8 max / amax, rounded once to float32.

    torchao divides in float64, so eager, compiled and precomputed scales are equal to the last bit, and a stale scale
    differs once the amax changes.
    """
    return as_float32(FLOAT8_MAX.get(target_dtype, math.nan) / max(amax, _EPS))


def _in_binade(traits: RecipeTraits, limit: float, lowest: float, highest: float) -> bool:
    """Return True for (1/2, 1] of the largest value, or [256, 512) of E4M3 where the scales of blocks are rounded down.

    Scales that are exponents are exact, those of rows come out of a logarithm, others are rounded to float32.
    """
    if traits.rounds_scales_down:
        return lowest >= limit * 4 / 7 and highest < limit * 8 / 7
    slack = 0.0 if traits.scale_dtype == E8M0 else Limit("casts.next_to_power")
    return lowest / limit > least_share(traits) * (1 - slack) and highest / limit <= 1 + slack


def least_share(traits: RecipeTraits) -> float:
    """Return what share of the largest value an amax must be cast to."""
    return 0.5 if traits.power_of_two_scales else 1.0


def inverse(scale: ScaleSummary) -> tuple[float, float]:
    """Return the smallest and the largest scale that `_scaled_mm` must be given for an operand cast with `scale`."""
    return _reciprocal(scale.maximum), _reciprocal(scale.minimum)


def _reciprocal(value: float) -> float:
    return as_float32(1 / value) if value else math.copysign(math.inf, value)


def as_float32(value: float) -> float:
    """Round as torch does; infinite where float32 overflows."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)


# Which amax was a wrong scale computed from? A scale that is wrong says by its value what it was made from: a source is
# named if the scale that its amax gives is the one that was found, up to rounding. Chance does not make two amaxes of
# different tensors equal.

Casts = Mapping[int, Mapping[tuple[CastKey, int], CastRecord]]  # of every rank

_FACTOR = "it is the right scale times 2**{}"
_MAXIMA = {**FLOAT8_MAX, "float8_e4m3fnuz": 240.0}


class Source(NamedTuple):
    """An amax that a scale may have been made from by mistake, and whose it is."""

    name: str
    amax: float


def implied_source(target_dtype: str, scale: float, right: float, sources: Iterable[Source]) -> str:
    """Return what the scale was made from instead of the amax `right`: "the amax of ..."; empty if nothing fits."""
    expected = tensorwise_scale(target_dtype, right)
    if not (math.isfinite(scale) and scale > 0 and math.isfinite(expected)) or scale == expected:
        return ""
    if _near(scale, expected):
        return "it differs by one rounding: the division may have been in float32"
    for source in (*sources, Source("the amax rounded to bfloat16", _as_bfloat16(right))):
        if source.amax != right and _near(scale, tensorwise_scale(target_dtype, source.amax)):
            return f"it is the scale for {source.name}"
    if _as_bfloat16(FLOAT8_MAX[target_dtype] / scale) == right:
        return "it is the scale for an amax that bfloat16 rounds to the right one"
    return _factor(target_dtype, scale / expected)


def _near(found: float, expected: float) -> bool:
    return abs(found - expected) <= Limit("casts.scale_in_float32") * abs(expected)


def _factor(target_dtype: str, factor: float) -> str:
    """Return what a scale for the right amax was multiplied by: the maximum of another dtype, or a power of two."""
    for dtype, limit in _MAXIMA.items():
        if dtype != target_dtype and _near(factor, limit / FLOAT8_MAX.get(target_dtype, math.nan)):
            return f"it is the scale for the maximum of {dtype}, {limit:g}"
    exponent = round(math.log2(factor))
    return _FACTOR.format(exponent) if exponent and _near(factor, 2.0**exponent) else ""


def implied_by_power(
    traits: RecipeTraits, cast: CastStatistics, lowest: float, highest: float, earlier: Iterable[CastRecord]
) -> str:
    """Return the same of scales that are powers of two, with the smallest and largest amax * scale.

    Each implies an interval of amaxes alone, so all of them are compared with those of `earlier` casts.
    """
    limit = FLOAT8_MAX.get(cast.target_dtype, math.nan)
    if 0 < lowest <= highest < math.inf:
        exponent = math.ceil(math.log2(highest / limit))
        for power in (exponent - 1, exponent):  # the lower one where scales are rounded down
            if power and _in_binade(traits, limit, lowest / 2.0**power, highest / 2.0**power):
                return _FACTOR.format(power)
    differ = cast.scale.minimum < cast.scale.maximum  # or they are equal to others by chance
    steps = [other.step for other in earlier if differ and other.scale.digest == cast.scale.digest]
    return f"it is the scale of step {max(steps)}" if steps else ""


def earlier_casts(casts: Casts, rank: int, place: tuple[CastKey, int]) -> Iterator[CastRecord]:
    key, occurrence = place
    for step in range(1, key.step):
        yield from on_ranks(casts, (rank,), (key._replace(step=step), occurrence)).values()


def _as_bfloat16(value: float) -> float:
    """Round to the nearest bfloat16, ties to even; keep NaN and infinity."""
    if not math.isfinite(value):
        return value
    (bits,) = struct.unpack("<I", struct.pack("<f", as_float32(value)))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


def cast_sources(
    case: Case, casts: Casts, rank: int, place: tuple[CastKey, int], group: Mapping[int, CastRecord]
) -> Iterator[Source]:
    """Yield the amaxes that the scale of this cast may have been made from by mistake, the likeliest first.

    `group` has the cast on every rank that must share its scale.
    """
    cast, (key, occurrence) = casts[rank][place], place
    used = [axis for axis in MESH_AXES if case.layout.mesh[axis] > 1]

    def over(axes: tuple[str, ...]) -> float:
        return _amax(on_ranks(casts, peers(case.layout, rank, axes), place))

    for axes in itertools.chain.from_iterable(itertools.combinations(used, count) for count in range(len(used) + 1)):
        ranks, amax = peers(case.layout, rank, axes), over(axes)
        right = [axis for axis in used if set(peers(case.layout, rank, (axis,))) <= set(group)]
        lacking = [axis for axis in right if over((*axes, axis)) != amax]
        wrong = [axis for axis in axes if axis not in right]
        same = [axis for axis in right if axis not in (*axes, *lacking)] if lacking else []  # it has replicas there
        words = ((" or over", same), (", reduced over", wrong), (", not reduced over", lacking))
        if ranks != tuple(group):
            yield Source(_on(ranks) + "".join(f"{what} {' and '.join(of)}" for what, of in words if of), amax)
    for other, part in group.items():
        yield Source(_on((other,)), part.amax)
    positive = [part.largest for part in group.values() if part.largest is not None]
    if len(positive) == len(group):
        yield Source("the largest value without abs", max(positive))
    before = {step: (key._replace(step=step), occurrence) for step in range(1, key.step)}
    for ranks, where in ((tuple(group), ""), ((rank,), f" on rank {rank} alone")):
        yield from of_steps({step: _amax(on_ranks(casts, ranks, then)) for step, then in before.items()}, where)
    if cast.source_dtype == "bfloat16":
        return  # of so few values that tensors have the same amax by chance
    for (site, _), other_cast in casts[rank].items():
        if site.step == key.step and (site.fqn, site.role) != (key.fqn, key.role):
            yield Source(f"the amax of {site.role} of {site.fqn}", other_cast.amax)


def of_steps(amaxes: Mapping[int, float], where: str = "") -> Iterator[Source]:
    for amax in dict.fromkeys(amaxes.values()):
        steps = [str(step) for step, other in amaxes.items() if other == amax]
        yield Source(f"the amax of {'step' if len(steps) == 1 else 'steps'} {', '.join(steps)}{where}", amax)


def _on(ranks: tuple[int, ...]) -> str:
    return f"the amax on {format_ranks(ranks)} alone" if len(ranks) == 1 else f"the amax over {format_ranks(ranks)}"


def _amax(parts: Mapping[int, CastRecord]) -> float:
    return largest(part.amax for part in parts.values())
