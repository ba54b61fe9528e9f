"""Does every rank send what its case must send, and nothing else? Traffic against the formula of `spec/traffic.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from harness.checks.ranks import by_value, rank_names
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.spec.traffic import converted_weight_shards, expected_transfers
from harness.trace import RankTrace, Run
from harness.verdict import Finding

NAME = "wire"

# float8 is half of bfloat16; the rest is for the norms that travel with the weights in high precision.
MOST_OF_BFLOAT16 = 0.51


class Key(NamedTuple):
    """What is counted together."""

    axis: str
    kind: str
    op: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind}{f' ({self.op})' if self.op else ''} in {self.dtype} along {self.axis}"


class Amount(NamedTuple):
    """How much of it: collectives, bytes that one rank puts in, and how many carried one element."""

    times: int = 0
    payload_bytes: int = 0
    scalars: int = 0

    def __str__(self) -> str:
        scalars = f", {self.scalars} of one element" if self.scalars else ""
        return f"{self.times} with {self.payload_bytes} bytes{scalars}" if self.times else "none"


Traffic = dict[Key, Amount]


class _Difference(NamedTuple):
    step: int
    key: Key
    expected: Amount
    found: Amount
    purposes: str


class _Words(NamedTuple):
    """A difference that has a name. `step` is the first one that shows it."""

    step: int
    message: str
    expected: str
    found: str


def check_wire(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """A finding for everything that is sent too often, too seldom, in another dtype or along another axis.

    What has a name comes first, in plain words: float8 weights gathered in high precision, amax reductions that are
    missing or go to the wrong ranks. Ranks that agree share a finding.
    """
    del witnesses  # the formula needs no other run
    silent = [trace.rank for trace in run.traces if trace.traffic is None]
    if silent or not run.traces:
        whom = rank_names(sorted(silent)) if silent else "any rank"
        return [Finding(check=NAME, message=f"no traffic was recorded on {whom}", expected="traffic of every rank")]
    named = [
        Finding(
            check=NAME,
            message=f"{words.message} on {rank_names(ranks)}",
            step=words.step,
            rank=ranks[0],
            expected=words.expected,
            found=words.found,
        )
        for group, ranks in by_value(run, lambda trace: _in_words(case, trace)).items()
        for words in group
    ]
    return [*named, *_differences(case, run)]


def expected_traffic(case: Case, *, step: int, rank: int) -> Traffic:
    """The formula, added up as the probe adds up what it sees."""
    total: defaultdict[Key, Amount] = defaultdict(Amount)
    for term in expected_transfers(case, step=step, rank=rank):
        key = Key(term.axis, term.kind, term.op, term.dtype)
        scalars = term.times if term.elements == 1 else 0
        total[key] = _plus(total[key], Amount(term.times, term.payload_bytes, scalars))
    return dict(total)


def limits(case: Case, *, step: int, rank: int) -> dict[Key, tuple[int, int]]:
    """Fewest and most collectives of the kinds of which a compiled run need not send the exact number."""
    if case.compile == "none":
        return {}
    found: dict[Key, tuple[int, int]] = {}
    for term in expected_transfers(case, step=step, rank=rank):
        key = Key(term.axis, term.kind, term.op, term.dtype)
        fewest, most = found.get(key, (0, 0))
        exact = term.least is None
        least = term.times if term.least is None else min(term.times, term.least)
        found[key] = (fewest + least, most + term.times * (1 if exact else 2))
    return {key: limit for key, limit in found.items() if limit[0] != limit[1]}


def recorded_traffic(trace: RankTrace, step: int) -> Traffic:
    """What one rank sent in one step."""
    total: defaultdict[Key, Amount] = defaultdict(Amount)
    for record in trace.traffic or ():
        if record.step == step:
            key = Key(record.axis, record.kind, record.op, record.dtype)
            total[key] = _plus(total[key], Amount(record.count, record.payload_bytes, record.scalars))
    return dict(total)


def _plus(one: Amount, other: Amount) -> Amount:
    return Amount(*(a + b for a, b in zip(one, other, strict=True)))


def _differences(case: Case, run: Run) -> list[Finding]:
    return [
        Finding(
            check=NAME,
            message=f"{wrong.key}: not what the case must send on {rank_names(ranks)} ({wrong.purposes})",
            step=wrong.step,
            rank=ranks[0],
            expected=str(wrong.expected),
            found=str(wrong.found),
        )
        for group, ranks in by_value(run, lambda trace: _first_differences(case, trace)).items()
        for wrong in group
    ]


def _first_differences(case: Case, trace: RankTrace) -> tuple[_Difference, ...]:
    """For every kind of traffic that is off, the first step in which it is."""
    first: dict[Key, _Difference] = {}
    for step in _steps(case, trace):
        expected, found = expected_traffic(case, step=step, rank=trace.rank), recorded_traffic(trace, step)
        allowed = limits(case, step=step, rank=trace.rank)
        for key in sorted(expected.keys() | found.keys()):
            pair = expected.get(key, Amount()), found.get(key, Amount())
            fewest, most = allowed.get(key, (math.inf, -math.inf))
            if pair[0] != pair[1] and not fewest <= pair[1].times <= most and key not in first:
                first[key] = _Difference(step, key, *pair, _purposes(case, trace.rank, step, key))
    return tuple(first.values())


def _steps(case: Case, trace: RankTrace) -> list[int]:
    """The steps of the case, and any other that was recorded."""
    return sorted({*range(1, case.train.steps + 1), *(record.step for record in trace.traffic or ())})


def _purposes(case: Case, rank: int, step: int, key: Key) -> str:
    """What this kind of traffic is for, at most three examples."""
    purposes = [
        term.purpose
        for term in expected_transfers(case, step=step, rank=rank)
        if (term.axis, term.kind, term.op, term.dtype) == key
    ]
    shown = "; ".join(purposes[:3]) + (f"; {len(purposes) - 3} more" if len(purposes) > 3 else "")
    return f"expected for: {shown}" if shown else "nothing of this kind is expected"


def _in_words(case: Case, trace: RankTrace) -> tuple[_Words, ...]:
    """What has a name, in the first step that shows it."""
    first: dict[str, _Words] = {}
    for step in _steps(case, trace):
        expected, found = expected_traffic(case, step=step, rank=trace.rank), recorded_traffic(trace, step)
        # weights that are not cast before they are gathered need no amax either: that is one fault, not two
        allowed = limits(case, step=step, rank=trace.rank)
        for words in _precision(case, trace.rank, step, expected, found) or _amax(step, expected, found, allowed):
            first.setdefault(words.message, words)
    return tuple(first.values())


def _precision(case: Case, rank: int, step: int, expected: Traffic, found: Traffic) -> list[_Words]:
    """float8 all-gather was asked for: how many bytes do the converted weights really take?"""
    elements = converted_weight_shards(case, rank)
    if not elements:
        return []
    surplus = _gathered_bytes(found) - _gathered_bytes(expected)
    ratio = (elements + surplus) / (2 * elements)
    if ratio <= MOST_OF_BFLOAT16:
        return []
    return [
        _Words(
            step,
            "float8 all-gather was asked for, but the converted weights travel in high precision",
            f"at most {MOST_OF_BFLOAT16:.2f} of the bytes of bfloat16",
            f"{ratio:.2f}",
        )
    ]


def _gathered_bytes(traffic: Traffic) -> int:
    return sum(
        amount.payload_bytes for key, amount in traffic.items() if (key.axis, key.kind) == ("dp_shard", "all_gather")
    )


def _amax(step: int, expected: Traffic, found: Traffic, allowed: dict[Key, tuple[int, int]]) -> list[_Words]:
    """Maxima are reduced for scales only, but for the one per token of loss parallel."""
    within = {key for key, (fewest, most) in allowed.items() if fewest <= found.get(key, Amount()).times <= most}
    wanted, seen = _maxima(expected, within), _maxima(found, within)
    missing = {axis: count - seen[axis] for axis, count in wanted.items() if count > seen[axis]}
    extra = {axis: count - wanted[axis] for axis, count in seen.items() if count > wanted[axis]}
    words = []
    for axis, count in missing.items():
        promise = f"{wanted[axis]} reductions by max along {axis}"
        if extra:
            elsewhere = ", ".join(f"{number} along {other}" for other, number in extra.items())
            message = f"amax is reduced over the wrong ranks: not along {axis}"
            words.append(_Words(step, message, promise, f"{seen[axis]} along {axis}, {elsewhere} too many"))
        else:
            message = f"{count} amax reductions are missing along {axis}: the scale of a part is used for the whole"
            words.append(_Words(step, message, promise, str(seen[axis])))
    return words


def _maxima(traffic: Traffic, within: set[Key]) -> defaultdict[str, int]:
    """Reductions by max along every axis, those left out whose number is within its limits."""
    counts: defaultdict[str, int] = defaultdict(int)
    for key, amount in traffic.items():
        if key.op == "max" and key not in within:
            counts[key.axis] += amount.times
    return counts
