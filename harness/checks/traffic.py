"""Does every rank send exactly the collectives of its case? Recorded traffic against `expect/traffic.py`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from harness.checks import traffic_rules
from harness.checks.check import Check
from harness.checks.ranks import first_of_each, merge_ranks, missing_records
from harness.checks.rule import Stage
from harness.checks.traffic_rules import AMAX_MISSING, HIGH_PRECISION, check_any_model
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import TRAFFIC, Expectations
from harness.expect.traffic import Transfer
from harness.matrix.case import Case
from harness.matrix.targets import OF_DTENSOR, computes_on_plain_shards
from harness.plural import counted
from harness.trace import RankTrace, Run
from harness.trace.counts import TRAFFIC as STATED
from harness.trace.counts import collective_words
from harness.verdict import Finding

NAME = traffic_rules.NAME

# Of the bytes of bfloat16: float8 takes half; the rest is for the norms, which are gathered in high precision.
MAX_SHARE_OF_BFLOAT16 = 0.51


_rule = traffic_rules.RULES
NO_RECORD = _rule.no_record()
VOLUME = _rule(
    "volume", Stage.COLLECTIVES, "wrong number or size of {collective}", key=("collective",), formula=TRAFFIC
)
GATHERS = _rule(
    "gathers",
    Stage.COLLECTIVES,
    "weights are gathered too {often} along {axis}",
    key=("often", "axis"),
    fix="give fully_shard the `reshard_after_forward` that the case asks for.",
)
AMAX_ELSEWHERE = _rule(
    "amax-elsewhere", Stage.COLLECTIVES, "amax is reduced over the wrong ranks: not along {axis}", key=("axis",)
)


class CollectiveKey(NamedTuple):
    """What collectives are counted by."""

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
        """How many collectives."""
        return sum(self.sizes.values())

    def __str__(self) -> str:
        if not self.times:
            return "none"
        return f"{self.times} with {self.payload_bytes} bytes ({_sizes(self.sizes)} elements)"


Traffic = dict[CollectiveKey, Volume]


class Limits(NamedTuple):
    """The fewest and the most collectives for every size of input, where a compiled run may send more or fewer."""

    fewest: Mapping[int, int]
    most: Mapping[int, int]

    def allow(self, volume: Volume) -> bool:
        """True when there are enough collectives of every size, not too many, and none of another size."""
        return all(
            self.fewest.get(size, 0) <= volume.sizes.get(size, 0) <= self.most.get(size, 0)
            for size in self.most.keys() | volume.sizes.keys()
        )

    def allow_number(self, volume: Volume) -> bool:
        """True when there are enough collectives and not too many, whatever their sizes."""
        return sum(self.fewest.values()) <= volume.times <= sum(self.most.values())


class _Step(NamedTuple):
    """The traffic of one rank in one step. `allowed` limits the counts that a compiled run need not match exactly."""

    number: int
    rank: int
    expected: Traffic
    found: Traffic
    allowed: dict[CollectiveKey, Limits]

    def fits(self, key: CollectiveKey) -> bool:
        """True when this kind of collective is as expected, or within its limits."""
        found = self.found.get(key, Volume())
        if found == self.expected.get(key, Volume()):
            return True
        return key in self.allowed and self.allowed[key].allow(found)


def check_traffic(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """A finding for every kind of collective with a wrong count or size. Ranks with the same findings share them.

    Recognized causes come first: float8 weights gathered in high precision, amax reductions that are missing or run
    over the wrong ranks.
    """
    expect = witnesses.expect
    if not expect.has_formulas:
        return missing_records(run, NO_RECORD, "traffic") or check_any_model(expect, run)
    return missing_records(run, NO_RECORD, "traffic") or [
        *merge_ranks(run, lambda trace: first_of_each(_causes(expect, trace))),
        *merge_ranks(run, lambda trace: first_of_each(_differences(expect, trace))),
    ]


def expected_traffic(expect: Expectations, *, step: int, rank: int) -> Traffic:
    """The expected transfers, added up as the probe adds up what it records."""
    total: defaultdict[CollectiveKey, Volume] = defaultdict(Volume)
    for term in expect.transfers(step=step, rank=rank):
        total[_key(term)] = _plus(total[_key(term)], Volume(term.payload_bytes, {term.elements: term.times}))
    return dict(total)


def count_limits(expect: Expectations, *, step: int, rank: int) -> dict[CollectiveKey, Limits]:
    """Fewest and most collectives of the kinds whose count varies in a compiled run."""
    if expect.case.compile == "none":
        return {}
    fewest: defaultdict[CollectiveKey, Counter[int]] = defaultdict(Counter)
    most: defaultdict[CollectiveKey, Counter[int]] = defaultdict(Counter)
    for term in expect.transfers(step=step, rank=rank):
        exact = term.least is None
        least = term.times if term.least is None else min(term.times, term.least)
        fewest[_key(term)][term.elements] += least
        most[_key(term)][term.elements] += term.times * (1 if exact else 2)
    return {key: Limits(fewest[key], most[key]) for key in most if fewest[key] != most[key]}


def recorded_traffic(trace: RankTrace, step: int) -> Traffic:
    """What one rank sent in one step."""
    total: defaultdict[CollectiveKey, Volume] = defaultdict(Volume)
    for record in trace.traffic or ():
        if record.step == step:
            key = CollectiveKey(record.axis, record.kind, record.op, record.dtype)
            total[key] = _plus(total[key], Volume(record.payload_bytes, record.sizes))
    return dict(total)


def _key(term: Transfer) -> CollectiveKey:
    return CollectiveKey(term.axis, term.kind, term.op, term.dtype)


def _plus(one: Volume, other: Volume) -> Volume:
    return Volume(one.payload_bytes + other.payload_bytes, Counter(one.sizes) + Counter(other.sizes))


def _sizes(sizes: Mapping[int, int]) -> str:
    """How many of which size, at most three examples."""
    shown = [f"{times} of {size}" for size, times in sorted(sizes.items())[:3]]
    return ", ".join([*shown, "..."] if len(sizes) > 3 else shown)


def _steps(expect: Expectations, trace: RankTrace) -> Iterator[_Step]:
    """The steps of the case, and any other that was recorded."""
    rank = trace.rank
    for step in sorted({*range(1, expect.case.train.steps + 1), *(record.step for record in trace.traffic or ())}):
        expected, found = expected_traffic(expect, step=step, rank=rank), recorded_traffic(trace, step)
        yield _Step(step, rank, expected, found, count_limits(expect, step=step, rank=rank))


def _differences(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    """Every kind of collective that is wrong, step by step."""
    for step in _steps(expect, trace):
        for key in sorted(step.expected.keys() | step.found.keys()):
            if not step.fits(key):
                yield VOLUME.finding(
                    collective=str(key),
                    values=key._asdict(),
                    step=step.number,
                    expected=f"{step.expected.get(key, Volume())}{_purposes(expect, step, key)}",
                    found=str(step.found.get(key, Volume())),
                )


def _purposes(expect: Expectations, step: _Step, key: CollectiveKey) -> str:
    """What these collectives are for, at most three examples."""
    transfers = expect.transfers(step=step.number, rank=step.rank)
    purposes = [term.purpose for term in transfers if _key(term) == key]
    more = [f"{len(purposes) - 3} more"] if len(purposes) > 3 else []
    return f" (for {'; '.join(purposes[:3] + more)})" if purposes else ""


def _causes(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    """The causes that the traffic shows, step by step."""
    for step in _steps(expect, trace):
        # A weight is cast before every gather, and one that is not cast needs no amax: that is one fault, not three.
        yield from _number_of_gathers(step) or _high_precision_gathers(expect, step) or _amax_reductions(step)


def _number_of_gathers(step: _Step) -> list[Finding]:
    expected, found = _gathers(step.expected).times, _gathers(step.found).times
    if found == expected:
        return []
    return [
        GATHERS.finding(
            often="often" if found > expected else "seldom",
            axis="dp_shard",
            step=step.number,
            expected=f"{expected} all-gathers",
            found=str(found),
        )
    ]


def _high_precision_gathers(expect: Expectations, step: _Step) -> list[Finding]:
    """With float8 all-gather: compares the gathered bytes with those that the converted weights take in bfloat16."""
    elements = expect.float8_weight_elements(step.rank)
    if not elements:
        return []
    surplus = _gathers(step.found).payload_bytes - _gathers(step.expected).payload_bytes
    ratio = (elements + surplus) / (2 * elements)
    if ratio <= MAX_SHARE_OF_BFLOAT16:
        return []
    return [
        HIGH_PRECISION.finding(
            step=step.number,
            expected=f"at most {MAX_SHARE_OF_BFLOAT16:.2f} of the bytes of bfloat16",
            found=f"{ratio:.2f}",
        )
    ]


def _gathers(traffic: Traffic) -> Volume:
    """All-gathers of weights."""
    volumes = [volume for key, volume in traffic.items() if (key.axis, key.kind) == ("dp_shard", "all_gather")]
    sizes = sum((Counter(each.sizes) for each in volumes), Counter[int]())
    return Volume(sum(each.payload_bytes for each in volumes), sizes)


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
    """Reductions by max along every axis, without the kinds whose count is within its limits."""
    counts: defaultdict[str, int] = defaultdict(int)
    for key, volume in traffic.items():
        if key.op == "max" and key not in within:
            counts[key.axis] += volume.times
    return counts


def _not_judged(expect: Expectations, device: str) -> str:
    del device
    if not computes_on_plain_shards(expect.case.target):
        return ""
    return f"{OF_DTENSOR}: {expect.case.target} reduces counts of tokens and metrics as well"


def _partly(expect: Expectations, device: str) -> str:
    del device
    if expect.has_formulas:
        return ""
    instead = expect.judged_instead(STATED)
    return f"no formula for the model of {expect.case.target}: only what holds for any; {instead}"


CHECK = Check(
    name=NAME,
    question="Does every rank send exactly the collectives of its case?",
    blind="The order of collectives, and what is in them: `scales` and `parity` see the numbers.",
    function=check_traffic,
    rules=_rule.declared,
    not_judged=_not_judged,
    partly=_partly,
    record="traffic",
    formula=TRAFFIC,
    needs_linears=True,
)
