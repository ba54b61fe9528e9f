"""Does every rank send exactly the collectives of its case? Recorded traffic against `expect/traffic.py`.

Of a model that no formula describes, what holds for any: no collective along an unknown group, every gradient reduced
over all data-parallel ranks, float8 weights gathered in float8, an amax reduction for every cast of a tensor that ranks
hold shards of, over no more ranks, and none for a weight whose scale is precomputed. `metamorphic.py` counts the rest.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from harness.checks.check import Rules, Stage, Witnesses, first_of_each, merge_ranks
from harness.expect.expectations import TRAFFIC, Expectations
from harness.expect.model import scaled_dim
from harness.matrix.case import Case
from harness.matrix.dims.dimension import Transfer
from harness.matrix.dims.fsdp import converted_weight_shards
from harness.matrix.layout import peers
from harness.matrix.recipes import ITEM_BYTES
from harness.promises import Limit
from harness.registry import OF_DTENSOR, computes_on_plain_shards
from harness.text import counted
from harness.trace import RankTrace, Run
from harness.trace.counts import ExpertCall, TrafficRecord, collective_words
from harness.trace.model import Parameter
from harness.trace.operands import CastRecord
from harness.verdict import Finding

MAX_SHARE_OF_BFLOAT16 = Limit("traffic.share_of_bfloat16")
_PADDING = Limit("traffic.padding")

_rule = Rules(
    "traffic",
    Stage.COLLECTIVES,
    only={"an own target": "unknown-ranks gradients-not-summed sequence-parallel not-precomputed"},
)
VOLUME = _rule("volume", "wrong number or size of {collective}", key=("collective",), formula=TRAFFIC)
GATHERS = _rule(
    "gathers",
    "weights are gathered too {often} along {axis}",
    key=("often", "axis"),
    fix="pass the `reshard_after_forward` of the case to fully_shard.",
)
HIGH_PRECISION = _rule(
    "high-precision", "float8 all-gather is on, but converted weights are gathered in high precision", stage=Stage.MODEL
)
AMAX_MISSING = _rule(
    "amax-missing",
    "{missing:n amax reduction is|amax reductions are} missing along {axis}: each shard uses its own scale",
    key=("axis",),
)
AMAX_ELSEWHERE = _rule("amax-elsewhere", "amax is reduced over the wrong ranks: not along {axis}", key=("axis",))
UNKNOWN_RANKS = _rule("unknown-ranks", "a collective runs over ranks that form no mesh axis")
NOT_SUMMED = _rule("gradients-not-summed", "gradients are not summed over all ranks of {axis}", key=("axis",))
INSTEAD = _rule("instead", "{found_kind} instead of {collective}", key=("collective",), formula=TRAFFIC)
REDUCE_DTYPE = _rule("reduce-dtype", "gradients are reduced in {dtypes} instead of {asked}", key=("dtypes", "asked"))
SCATTERED = _rule(
    "sequence-parallel",
    "activations are scattered over tensor-parallel ranks, and the case has sequence_parallel = false",
    fix="shard the sequence only where `case.layout.sequence_parallel` says so.",
)
NOT_PRECOMPUTED = _rule("not-precomputed", "scales are precomputed, but weights still reduce an amax")


class CollectiveKey(NamedTuple):
    axis: str
    kind: str
    op: str
    dtype: str

    def __str__(self) -> str:
        return collective_words(**self._asdict())


class Volume(NamedTuple):
    """The bytes that one rank puts in, and the number of collectives for every size of its input in elements."""

    payload_bytes: int = 0
    sizes: Mapping[int, int] = MappingProxyType({})

    @property
    def times(self) -> int:
        return sum(self.sizes.values())

    def __str__(self) -> str:
        if not self.times:
            return "none"
        return f"{self.times} with {self.payload_bytes} bytes ({_sizes(self.sizes)} elements)"


Traffic = dict[CollectiveKey, Volume]


class Limits(NamedTuple):
    """The fewest and the most collectives for every size of input, where a compiled run may send more or fewer."""

    fewest: Counter[int]
    most: Counter[int]

    def allow(self, volume: Volume) -> bool:
        """Return True if there are enough collectives of every size, not too many, and none of another size."""
        return self.fewest <= Counter(volume.sizes) <= self.most

    def allow_number(self, volume: Volume) -> bool:
        """Return True if there are enough collectives and not too many, whatever their sizes."""
        return self.fewest.total() <= volume.times <= self.most.total()


class _Step(NamedTuple):
    """The traffic of one rank in one step. `allowed` limits the counts that a compiled run need not match exactly."""

    number: int
    trace: RankTrace
    expected: Traffic
    found: Traffic
    allowed: dict[CollectiveKey, Limits]

    def volumes(self, key: CollectiveKey) -> tuple[Volume, Volume]:
        """Return what was expected of a kind of collective, and what was found."""
        return self.expected.get(key, Volume()), self.found.get(key, Volume())

    def gap(self, key: CollectiveKey) -> tuple[Counter[int], Counter[int]]:
        """Return how many collectives of every size are missing, and how many are too many."""
        expected, found = (Counter(volume.sizes) for volume in self.volumes(key))
        return expected - found, found - expected

    def fits(self, key: CollectiveKey) -> bool:
        expected, found = self.volumes(key)
        return found == expected or (key in self.allowed and self.allowed[key].allow(found))


def _not_judged(expect: Expectations, device: str) -> str:
    if not computes_on_plain_shards(expect.case.target):
        return ""
    return f"{OF_DTENSOR}: {expect.case.target} reduces counts of tokens and metrics as well"


def _partly(expect: Expectations, device: str) -> str:
    if expect.has_formulas:
        return ""
    return f"no formula for the model of {expect.case.target}: only general rules are checked; see `profile`"


@_rule.judged_by(
    blind="The order and contents of collectives: `scales` and `parity` see the numbers.",
    not_judged=_not_judged,
    partly=_partly,
    records=("traffic",),
    also_reads=("experts",),
    formula=TRAFFIC,
    needs_linears=True,
)
def check_traffic(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does every rank send exactly the collectives of its case?

    Recognized causes come first: float8 weights gathered in high precision, amax reductions that are missing or run
    over the wrong ranks.
    """
    expect = witnesses.expect
    if not expect.has_formulas:
        traces = {trace.rank: trace for trace in run.traces}
        return merge_ranks(run, lambda trace: first_of_each(_of_any_model(expect, traces, trace)))
    return [
        *merge_ranks(run, lambda trace: first_of_each(_causes(expect, trace))),
        *merge_ranks(run, lambda trace: first_of_each(_differences(expect, trace))),
    ]


def expected_traffic(expect: Expectations, *, step: int, rank: int, calls: Iterable[ExpertCall] = ()) -> Traffic:
    """Return the expected transfers, added up as the probe adds up what it records."""
    return _added(expect.transfers(step=step, rank=rank, calls=calls))


def count_limits(expect: Expectations, *, step: int, rank: int) -> dict[CollectiveKey, Limits]:
    """Return the smallest and the largest number of collectives of the kinds whose count varies in a compiled run."""
    if expect.case.compile == "none":
        return {}
    fewest: defaultdict[CollectiveKey, Counter[int]] = defaultdict(Counter)
    most: defaultdict[CollectiveKey, Counter[int]] = defaultdict(Counter)
    for term in expect.transfers(step=step, rank=rank):
        fewest[_key(term)][term.elements] += term.times if term.least is None else min(term.times, term.least)
        most[_key(term)][term.elements] += term.times * (1 if term.least is None else 2)
    return {key: Limits(fewest[key], most[key]) for key in most if fewest[key] != most[key]}


def recorded_traffic(trace: RankTrace, step: int) -> Traffic:
    return _added(record for record in trace.traffic or () if record.step == step)


def _key(term: Transfer | TrafficRecord) -> CollectiveKey:
    return CollectiveKey(term.axis, term.kind, term.op, term.dtype)


def _added(terms: Iterable[Transfer | TrafficRecord]) -> Traffic:
    volumes: defaultdict[CollectiveKey, list[Volume]] = defaultdict(list)
    for term in terms:
        sizes = term.sizes if isinstance(term, TrafficRecord) else {term.elements: term.times}
        volumes[_key(term)].append(Volume(term.payload_bytes, sizes))
    return {key: _total(of_key) for key, of_key in volumes.items()}


def _along(traffic: Traffic, axis: str, **of: str) -> Volume:
    """Return what is sent along an axis by collectives of one `kind`, or by reductions of one `op`."""
    wanted = {"axis": axis, **of}.items()
    return _total([volume for key, volume in traffic.items() if wanted <= key._asdict().items()])


def _total(volumes: Sequence[Volume]) -> Volume:
    sizes = sum((Counter(volume.sizes) for volume in volumes), Counter[int]())
    return Volume(sum(volume.payload_bytes for volume in volumes), sizes)


def _sizes(sizes: Mapping[int, int]) -> str:
    shown = [f"{times} of {size}" for size, times in sorted(sizes.items())[:3]]
    return ", ".join([*shown, "..."] if len(sizes) > 3 else shown)


def _steps(expect: Expectations, trace: RankTrace) -> Iterator[_Step]:
    rank = trace.rank
    for step in sorted({*range(1, expect.case.train.steps + 1), *(record.step for record in trace.traffic or ())}):
        expected = expected_traffic(expect, step=step, rank=rank, calls=trace.expert_calls(step))
        found = recorded_traffic(trace, step)
        yield _Step(step, trace, expected, found, count_limits(expect, step=step, rank=rank))


def _differences(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    """Yield what is sent instead of something else, each with its counterpart, and then what is wrong by itself."""
    for step in _steps(expect, trace):
        wrong = [key for key in sorted(step.expected.keys() | step.found.keys()) if not step.fits(key)]
        instead = {key: other for key in wrong for other in wrong if _replaces(step, key, other)}
        yield from (_instead(expect, step, key, other) for key, other in instead.items())
        yield from (_volume(expect, step, key) for key in wrong if key not in (*instead, *instead.values()))


def _volume(expect: Expectations, step: _Step, key: CollectiveKey) -> Finding:
    counts = zip((gap.total() for gap in step.gap(key)), ("missing", "too many"), strict=True)
    purposes, off = _purposes(expect, step, key), ", ".join(f"{count} {what}" for count, what in counts if count)
    expected, found = map(str, step.volumes(key))
    values = {**key._asdict(), "collective": str(key)}
    suffix = f": {off or 'other bytes'}" + (f" ({purposes})" if purposes else "")
    return VOLUME.finding(step=step.number, expected=expected, found=found, values=values, suffix=suffix)


def _replaces(step: _Step, key: CollectiveKey, other: CollectiveKey) -> bool:
    """Return True if `other` may have been sent in place of `key`: all but one property are equal."""
    unlike = [name for name in key._fields if getattr(key, name) != getattr(other, name)]
    missing, extra = step.gap(key)
    alone = bool(missing) and not extra and step.gap(other) == (extra, missing)
    return alone and (len(unlike) == 1 or unlike == ["kind", "op"])


def _instead(expect: Expectations, step: _Step, key: CollectiveKey, other: CollectiveKey) -> Finding:
    purposes, sizes = _purposes(expect, step, key), _sizes(step.gap(key)[0])
    rule, values, where = INSTEAD, {"collective": str(key), "found_kind": str(other), **key._asdict()}, ""
    if key.dtype != other.dtype and purposes.startswith("gradients of"):
        rule, values = REDUCE_DTYPE, {"dtypes": other.dtype, "asked": key.dtype}
        where = f", by {key.kind} ({key.op}) along {key.axis}"
    expected, found = (f"{one}, {sizes} elements" for one in (key, other))
    suffix = where + (f": {purposes}" if purposes else "")
    return rule.finding(step=step.number, expected=expected, found=found, values=values, suffix=suffix)


def _purposes(expect: Expectations, step: _Step, key: CollectiveKey) -> str:
    """Return what a kind of collective sends, of what is missing where some is: "gradients of layers.0, layers.1"."""
    trace, number, (missing, _) = step.trace, step.number, step.gap(key)
    transfers = expect.transfers(step=number, rank=trace.rank, calls=trace.expert_calls(number))
    names: dict[str, list[str]] = {}
    for term in transfers:
        if _key(term) == key and (term.elements in missing or not missing):
            noun, _, name = term.purpose.partition(" of ")
            names.setdefault(noun, []).extend(_parameters_of(term, trace) or [name])
    shown = {noun: [*of[:3], *[f"{len(of) - 3} more"] * (len(of) > 3)] for noun, of in names.items()}
    return "; ".join(f"{noun} of {', '.join(of)}" if all(of) else noun for noun, of in shown.items())


def _parameters_of(term: Transfer, trace: RankTrace) -> list[str]:
    """Return the parameters whose gradients are sent one by one, as far as they are recorded."""
    kind = {"gradients of norms": "norm", "gradients of routers": "router"}.get(term.purpose)
    whole = (one for one in _parameters(trace) if one.trained and math.prod(one.shape) == term.elements)
    return [one.fqn.removesuffix(".weight") for one in whole if kind is not None and kind in one.fqn]


def _causes(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    for step in _steps(expect, trace):
        # A weight is cast before every gather, and one that is not cast needs no amax: that is one fault, not three.
        kinds = (_number_of_gathers(expect, step), _high_precision_gathers(expect, step), _amax_reductions(step))
        yield from next((findings for findings in map(list, kinds) if findings), [])


def _number_of_gathers(expect: Expectations, step: _Step) -> Iterator[Finding]:
    """Compare how often weights are gathered; context parallelism gathers keys and values along the same axis."""
    terms = expect.transfers(step=step.number, rank=step.trace.rank)
    keys = {term.elements for term in terms if term.purpose == "keys and values of attention"}
    gathers = (_along(side, "dp_shard", kind="all_gather").sizes for side in (step.expected, step.found))
    expected, found = (sum(times for size, times in sizes.items() if size not in keys) for sizes in gathers)
    if found != expected:
        often = "often" if found > expected else "seldom"
        wanted = f"{expected} all-gathers"
        yield GATHERS.finding(often=often, axis="dp_shard", step=step.number, expected=wanted, found=str(found))


def _high_precision_gathers(expect: Expectations, step: _Step) -> Iterator[Finding]:
    """With float8 all-gather: compares the gathered bytes with those that the converted weights take in bfloat16."""
    elements = converted_weight_shards(expect.case, step.trace.rank)
    expected, found = (_along(side, "dp_shard", kind="all_gather") for side in (step.expected, step.found))
    surplus = found.payload_bytes - expected.payload_bytes
    ratio = (elements + surplus) / (2 * elements) if elements else 0.0
    if ratio > MAX_SHARE_OF_BFLOAT16:
        most = f"at most {MAX_SHARE_OF_BFLOAT16:.2f} of the bytes of bfloat16"
        yield HIGH_PRECISION.finding(step=step.number, expected=most, found=f"{ratio:.2f}")


def _amax_reductions(step: _Step) -> Iterator[Finding]:
    """Reductions by max compute scales, except for one per token with loss parallel."""
    within = {key for key, limits in step.allowed.items() if limits.allow_number(step.found.get(key, Volume()))}
    expected, found = _max_reductions(step.expected, within), _max_reductions(step.found, within)
    extra = {axis: count - expected[axis] for axis, count in found.items() if count > expected[axis]}
    for axis, count in expected.items():
        if count <= found[axis]:
            continue
        if extra:
            elsewhere = ", ".join(f"{number} too many along {other}" for other, number in extra.items())
            rule, values = AMAX_ELSEWHERE, f"{found[axis]} along {axis}, {elsewhere}"
        else:
            rule, values = AMAX_MISSING, str(found[axis])
        wanted = f"{counted(count, 'reduction')} by max along {axis}"
        yield rule.finding(axis=axis, missing=count - found[axis], step=step.number, expected=wanted, found=values)


def _max_reductions(traffic: Traffic, within: set[CollectiveKey]) -> defaultdict[str, int]:
    """Return the max reductions along every axis, without the kinds whose count is within its limits."""
    counts: defaultdict[str, int] = defaultdict(int)
    for key, volume in traffic.items():
        if key.op == "max" and key not in within:
            counts[key.axis] += volume.times
    return counts


# Of any model


def _of_any_model(expect: Expectations, traces: Mapping[int, RankTrace], trace: RankTrace) -> Iterator[Finding]:
    for number in range(1, expect.case.train.steps + 1):
        step = _Step(number, trace, {}, recorded_traffic(trace, number), {})
        for axis in sorted({key.axis for key in step.found if key.axis.startswith("ranks")}):
            yield UNKNOWN_RANKS.finding(step=number, expected="the ranks of one or several mesh axes", found=axis)
        yield from _scattered(expect, step)
        yield from _gradients(expect, traces, step)
        yield from _gathered_bytes(expect, step)
        yield from _amax_of_shards(expect, step)
        yield from _amax_of_gathered(expect, step)
        yield from _not_precomputed(expect, step)


def _scattered(expect: Expectations, step: _Step) -> Iterator[Finding]:
    """Without sequence parallelism, TP sums activations and their gradients on every rank; it scatters none."""
    layout = expect.case.layout
    calls = _along(step.found, "tp", kind="reduce_scatter").times
    if calls and layout.tp > 1 and not layout.sequence_parallel:
        yield SCATTERED.finding(step=step.number, expected="no reduce_scatter along tp", found=counted(calls, "call"))


def _gradients(expect: Expectations, traces: Mapping[int, RankTrace], step: _Step) -> Iterator[Finding]:
    """Yield every gradient is scattered over shards and summed over replicas, in one or several collectives."""
    layout = expect.case.layout
    for axis, kind in (("dp_shard", "reduce_scatter"), ("dp_replicate", "all_reduce")):
        ranks = peers(layout, step.trace.rank, ("dp_shard",)) if axis == "dp_shard" else (step.trace.rank,)
        wanted = sum(
            parameter.local_elements
            for rank in ranks
            for parameter in _parameters(traces.get(rank))
            if parameter.trained and axis in parameter.axes
        )
        elements = sum(size * times for size, times in _along(step.found, axis, kind=kind).sizes.items())
        if elements < wanted:
            least = f"{kind} of at least {wanted} elements, as many as there are parameters"
            yield NOT_SUMMED.finding(axis=axis, step=step.number, expected=least, found=f"{elements} elements")
    asked = expect.case.reduce_dtype
    dtypes = {key.dtype for key in step.found if (key.axis, key.kind) == ("dp_shard", "reduce_scatter")}
    if dtypes - {asked}:
        kept = {parameter.dtype for parameter in _parameters(step.trace) if parameter.trained}
        kept_wide = kept == {expect.case.wide_dtype}  # else their dtype is mended first
        fix = "set reduce_dtype=getattr(torch, case.reduce_dtype) in MixedPrecisionPolicy"
        # `case.train.reduce_dtype` says float32 in float64 too, and the case has no value for less than float64 there.
        other = ", or `reduce_dtype` in the case to what you mean." if asked != "float64" else "."
        yield REDUCE_DTYPE.finding(
            dtypes=", ".join(sorted(dtypes - {asked})),
            asked=asked,
            step=step.number,
            expected=f"reduce_scatter in {asked}",
            found=", ".join(sorted(dtypes)),
            fix=f"{fix}{other}" if kept_wide else None,
        )


def _gathered_bytes(expect: Expectations, step: _Step) -> Iterator[Finding]:
    """Float8 all-gather sends one byte for every element of a converted weight, and not the two of bfloat16.

    Casts show how often weights are gathered; compiled runs do not record them.
    """
    if not expect.case.gathers_float8 or expect.case.layout.dp_shard == 1 or step.trace.operands is None:
        return
    gathered = {f"{fqn}.weight" for fqn in expect.linears.gathered}
    sharded = [parameter for parameter in _parameters(step.trace) if "dp_shard" in parameter.axes]
    narrow = sum(parameter.local_elements for parameter in sharded if parameter.fqn in gathered)
    wide = sum(parameter.local_elements for parameter in sharded if parameter.fqn not in gathered)
    gathers = max(_casts_before_gathers(step.trace, step.number).values(), default=2)
    sent = _along(step.found, "dp_shard", kind="all_gather").payload_bytes
    most = _PADDING * gathers * (narrow + wide * ITEM_BYTES[expect.case.train.dtype])
    if sent > most:
        yield HIGH_PRECISION.finding(step=step.number, expected=f"at most {most:.0f} bytes", found=f"{sent} bytes")


def _amax_of_shards(expect: Expectations, step: _Step) -> Iterator[Finding]:
    """As many reductions by max over TP ranks as casts of a tensor of which each of them holds a shard."""
    casts = [cast for cast in _casts(step.trace, step.number) if cast.phase not in ("all_gather", "gathered")]
    wanted, maxima = sum(_is_sharded(cast) for cast in casts), _along(step.found, "tp", op="max")
    reductions = maxima.sizes.get(1, 0) if expect.case.float8.traits.one_scale_per_tensor else maxima.times
    missing, found = wanted - reductions, str(reductions)
    if missing > 0:
        least = f"{counted(wanted, 'reduction')} by max along tp, one for every cast of a shard"
        yield AMAX_MISSING.finding(axis="tp", missing=missing, step=step.number, expected=least, found=found)


def _amax_of_gathered(expect: Expectations, step: _Step) -> Iterator[Finding]:
    """Yield casts before gathers whose amax more ranks reduce than those of dp_shard.

    Under TP the number may be right even so, and `scales` finds nothing. A model may also reduce the amax of several
    weights at once: fewer reductions alone are no fault.
    """
    gathers = _along(step.found, "dp_shard", kind="all_gather").times
    if expect.case.float8.precompute_scale or not gathers:
        return
    wanted = _casts_before_gathers(step.trace, step.number).total()
    found = _along(step.found, "dp_shard", op="max").sizes.get(1, 0)
    axes = {key.axis for key in step.found if key.axis != "dp_shard"}
    for axis in sorted(axis for axis in axes if axis == "world" or "dp_shard" in axis.split("+")):
        wider = _along(step.found, axis, op="max").sizes.get(1, 0)
        if found + wider >= wanted > found:
            least = f"{counted(wanted, 'reduction')} by max along dp_shard, one for every cast before a gather"
            values = f"{found}, {wider} along {axis}"
            yield AMAX_ELSEWHERE.finding(axis="dp_shard", step=step.number, expected=least, found=values)


def _not_precomputed(expect: Expectations, step: _Step) -> Iterator[Finding]:
    """With precomputed scales no weight reduces its own amax after step 1, whose gathers may come too early.

    What else is reduced by max, number by number, is in step 1 too. Casts are not recorded in compiled runs.
    """
    precomputed = expect.case.gathers_float8 and expect.case.float8.precompute_scale
    if not precomputed or step.trace.operands is None or step.number == 1:
        return
    sides = (recorded_traffic(step.trace, 1), step.found)
    first, later = (_along(traffic, "dp_shard", op="max").sizes.get(1, 0) for traffic in sides)
    of_weights = _casts_before_gathers(step.trace, 1).total()
    allowed = first - of_weights if first >= of_weights else first
    if later > allowed:
        most = f"at most {counted(allowed, 'reduction')} of one number by max along dp_shard"
        yield NOT_PRECOMPUTED.finding(step=step.number, expected=most, found=str(later))


def _is_sharded(cast: CastRecord) -> bool:
    """Return True if TP ranks hold shards of what one scale of this cast spans."""
    dim = scaled_dim(cast)
    return any(
        name == "tp"
        and placement.startswith(("Shard", "_StridedShard"))
        and (dim is None or placement == f"Shard({dim})")
        for name, placement in zip(cast.mesh_axes, cast.placements, strict=True)
    )


def _casts(trace: RankTrace, step: int) -> list[CastRecord]:
    return [cast for cast in (trace.operands.casts if trace.operands is not None else ()) if cast.step == step]


def _casts_before_gathers(trace: RankTrace, step: int) -> Counter[str]:
    casts = _casts(trace, step)
    return Counter(cast.fqn for cast in casts if (cast.phase, cast.role) == ("all_gather", "weight"))


def _parameters(trace: RankTrace | None) -> tuple[Parameter, ...]:
    return () if trace is None or trace.model is None else trace.model.parameters
