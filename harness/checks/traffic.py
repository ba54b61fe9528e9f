"""Does every rank send exactly the collectives of its case? Recorded traffic against `expect/traffic.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from harness.checks.ranks import merge_ranks, missing_records
from harness.checks.witnesses import Witnesses
from harness.expect.expectations import Expectations
from harness.expect.traffic import Transfer
from harness.matrix.case import Case
from harness.trace import RankTrace, Run
from harness.verdict import Finding

NAME = "traffic"

# Of the bytes of bfloat16: float8 takes half; the rest is for the norms, which are gathered in high precision.
MAX_SHARE_OF_BFLOAT16 = 0.51

_finding = partial(Finding, check=NAME)


class CollectiveKey(NamedTuple):
    """What collectives are counted by."""

    axis: str
    kind: str
    op: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind}{f' ({self.op})' if self.op else ''} in {self.dtype} along {self.axis}"


class Volume(NamedTuple):
    """How many collectives, the bytes that one rank puts in, and how many of them carried a single element."""

    times: int = 0
    payload_bytes: int = 0
    scalars: int = 0

    def __str__(self) -> str:
        scalars = f", {self.scalars} of one element" if self.scalars else ""
        return f"{self.times} with {self.payload_bytes} bytes{scalars}" if self.times else "none"


Traffic = dict[CollectiveKey, Volume]


class _Step(NamedTuple):
    """The traffic of one rank in one step. `allowed` limits the counts that a compiled run need not match exactly."""

    number: int
    rank: int
    expected: Traffic
    found: Traffic
    allowed: dict[CollectiveKey, tuple[int, int]]


def check_traffic(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """A finding for every kind of collective with a wrong count or size. Ranks with the same findings share them.

    Recognized causes come first: float8 weights gathered in high precision, amax reductions that are missing or run
    over the wrong ranks.
    """
    expect = witnesses.expect
    return missing_records(run, NAME, "traffic") or [
        *merge_ranks(run, lambda trace: _causes(expect, trace)),
        *merge_ranks(run, lambda trace: _differences(expect, trace)),
    ]


def expected_traffic(expect: Expectations, *, step: int, rank: int) -> Traffic:
    """The expected transfers, added up as the probe adds up what it records."""
    total: defaultdict[CollectiveKey, Volume] = defaultdict(Volume)
    for term in expect.transfers(step=step, rank=rank):
        scalars = term.times if term.elements == 1 else 0
        total[_key(term)] = _plus(total[_key(term)], Volume(term.times, term.payload_bytes, scalars))
    return dict(total)


def count_limits(expect: Expectations, *, step: int, rank: int) -> dict[CollectiveKey, tuple[int, int]]:
    """Fewest and most collectives of the kinds whose count varies in a compiled run."""
    if expect.case.compile == "none":
        return {}
    found: dict[CollectiveKey, tuple[int, int]] = {}
    for term in expect.transfers(step=step, rank=rank):
        fewest, most = found.get(_key(term), (0, 0))
        exact = term.least is None
        least = term.times if term.least is None else min(term.times, term.least)
        found[_key(term)] = (fewest + least, most + term.times * (1 if exact else 2))
    return {key: limit for key, limit in found.items() if limit[0] != limit[1]}


def recorded_traffic(trace: RankTrace, step: int) -> Traffic:
    """What one rank sent in one step."""
    total: defaultdict[CollectiveKey, Volume] = defaultdict(Volume)
    for record in trace.traffic or ():
        if record.step == step:
            key = CollectiveKey(record.axis, record.kind, record.op, record.dtype)
            total[key] = _plus(total[key], Volume(record.count, record.payload_bytes, record.scalars))
    return dict(total)


def _key(term: Transfer) -> CollectiveKey:
    return CollectiveKey(term.axis, term.kind, term.op, term.dtype)


def _plus(one: Volume, other: Volume) -> Volume:
    return Volume(*(a + b for a, b in zip(one, other, strict=True)))


def _steps(expect: Expectations, trace: RankTrace) -> Iterator[_Step]:
    """The steps of the case, and any other that was recorded."""
    rank = trace.rank
    for step in sorted({*range(1, expect.case.train.steps + 1), *(record.step for record in trace.traffic or ())}):
        expected, found = expected_traffic(expect, step=step, rank=rank), recorded_traffic(trace, step)
        yield _Step(step, rank, expected, found, count_limits(expect, step=step, rank=rank))


def _differences(expect: Expectations, trace: RankTrace) -> list[Finding]:
    """For every kind of collective that is wrong, the first step in which it is."""
    first: dict[CollectiveKey, Finding] = {}
    for step in _steps(expect, trace):
        for key in sorted(step.expected.keys() | step.found.keys()):
            expected, found = step.expected.get(key, Volume()), step.found.get(key, Volume())
            fewest, most = step.allowed.get(key, (math.inf, -math.inf))
            if expected != found and not fewest <= found.times <= most and key not in first:
                first[key] = _finding(
                    message=f"wrong number or size of {key}",
                    step=step.number,
                    expected=f"{expected}{_purposes(expect, step, key)}",
                    found=str(found),
                )
    return list(first.values())


def _purposes(expect: Expectations, step: _Step, key: CollectiveKey) -> str:
    """What these collectives are for, at most three examples."""
    transfers = expect.transfers(step=step.number, rank=step.rank)
    purposes = [term.purpose for term in transfers if _key(term) == key]
    more = [f"{len(purposes) - 3} more"] if len(purposes) > 3 else []
    return f" (for {'; '.join(purposes[:3] + more)})" if purposes else ""


def _causes(expect: Expectations, trace: RankTrace) -> list[Finding]:
    """The causes that the traffic shows, each in the first step that shows it."""
    first: dict[str, Finding] = {}
    for step in _steps(expect, trace):
        # weights that are not cast before they are gathered need no amax either: that is one fault, not two
        for finding in _high_precision_gathers(expect, step) or _amax_reductions(step):
            first.setdefault(finding.message, finding)
    return list(first.values())


def _high_precision_gathers(expect: Expectations, step: _Step) -> list[Finding]:
    """With float8 all-gather: compares the gathered bytes with those that the converted weights take in bfloat16."""
    elements = expect.float8_weight_elements(step.rank)
    if not elements:
        return []
    surplus = _gathered_bytes(step.found) - _gathered_bytes(step.expected)
    ratio = (elements + surplus) / (2 * elements)
    if ratio <= MAX_SHARE_OF_BFLOAT16:
        return []
    return [
        _finding(
            message="float8 all-gather is on, but converted weights are gathered in high precision",
            step=step.number,
            expected=f"at most {MAX_SHARE_OF_BFLOAT16:.2f} of the bytes of bfloat16",
            found=f"{ratio:.2f}",
        )
    ]


def _gathered_bytes(traffic: Traffic) -> int:
    return sum(
        volume.payload_bytes for key, volume in traffic.items() if (key.axis, key.kind) == ("dp_shard", "all_gather")
    )


def _amax_reductions(step: _Step) -> Iterator[Finding]:
    """Reductions by max compute scales, except for one per token with loss parallel."""
    within = {key for key, (fewest, most) in step.allowed.items() if fewest <= _count(step.found, key) <= most}
    expected, found = _max_reductions(step.expected, within), _max_reductions(step.found, within)
    extra = {axis: count - expected[axis] for axis, count in found.items() if count > expected[axis]}
    for axis, count in expected.items():
        if count <= found[axis]:
            continue
        if extra:
            elsewhere = ", ".join(f"{number} too many along {other}" for other, number in extra.items())
            message = f"amax is reduced over the wrong ranks: not along {axis}"
            values = f"{found[axis]} along {axis}, {elsewhere}"
        else:
            message = f"{count - found[axis]} amax reductions are missing along {axis}: each shard uses its own scale"
            values = str(found[axis])
        wanted = f"{count} reductions by max along {axis}"
        yield _finding(message=message, step=step.number, expected=wanted, found=values)


def _max_reductions(traffic: Traffic, within: set[CollectiveKey]) -> defaultdict[str, int]:
    """Reductions by max along every axis, without the kinds whose count is within its limits."""
    counts: defaultdict[str, int] = defaultdict(int)
    for key, volume in traffic.items():
        if key.op == "max" and key not in within:
            counts[key.axis] += volume.times
    return counts


def _count(traffic: Traffic, key: CollectiveKey) -> int:
    return traffic.get(key, Volume()).times
