"""The shard: one of several parts of a selection, which together run every case once.

The division depends on the cases and their stored costs alone, so every machine computes the same one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.matrix.cheap_cover import Price, Pricing


class Shard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part `index` of `count`, counted from 1."""

    index: int
    count: int

    @property
    def text(self) -> str:
        """As it is given: "2/4"."""
        return f"{self.index}/{self.count}"


def parse_shard(text: str) -> Shard:
    """The shard of "2/4". Raises `HarnessError` for anything else."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text, flags=re.ASCII)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise HarnessError("no shard.", where=f"--shard {text}", fix="write I/N with 1 <= I <= N, such as 1/4.")
    return Shard(index=index, count=count)


def cases_of_shard(cases: Sequence[Case], shard: Shard, price: Pricing) -> tuple[Case, ...]:
    """The cases of one shard, in the order of `cases`, which has each once. Empty only where shards outnumber cases."""
    part = shards(cases, shard.count, price)[shard.index - 1]
    return tuple(case for case in cases if case_id(case) in part)


def shards(cases: Iterable[Case], count: int, price: Pricing) -> tuple[frozenset[str], ...]:
    """The ids of `count` shards of nearly the same CPU seconds.

    The dearest case comes first, each to the shard that then has least to do. A witness is paid for once in a shard.
    """
    parts = [_Part() for _ in range(count)]
    prices = sorted(((price(case), case_id(case)) for case in cases), key=lambda each: (-each[0].extra_s(()), each[1]))
    for each, name in prices:
        least = min(parts, key=lambda part: (part.cost_with(each), len(part.ids)))
        least.add(name, each)
    return tuple(frozenset(part.ids) for part in parts)


class _Part:
    """A shard in the making."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self._cost_s = 0.0
        self._witnesses: set[str] = set()

    def cost_with(self, price: Price) -> float:
        """CPU seconds with one more case."""
        return self._cost_s + price.extra_s(self._witnesses)

    def add(self, name: str, price: Price) -> None:
        """Take one more case."""
        self._cost_s = self.cost_with(price)
        self._witnesses |= price.shared_s.keys()
        self.ids.add(name)
