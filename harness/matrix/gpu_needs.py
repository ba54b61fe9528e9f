"""What a case needs of a GPU: the rows of `gpu_needs.toml`, and which of them are not met."""

import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from harness.matrix.case import Case
from harness.matrix.selector import Selector, parse_selector

Capability = tuple[int, int]
_NEWEST: Capability = (1000, 0)


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether a need is met, None where it is not known: that is in no one's way.

    `peers`: every GPU can read the memory of the others.
    """

    capability: Capability | None = None
    peers: bool | None = None


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """A row. `where`: the cases that it is about; without `since` and `peers` no GPU meets it."""

    name: str
    where: tuple[Selector, ...]
    reason: str
    source: str
    since: Capability | None = None
    below: Capability = _NEWEST
    peers: bool = False
    kernel: bool = False  # torch's float8 matmul needs it, and the exact one does not
    exact: bool = False  # `--device auto` takes the exact matmul instead

    def is_about(self, case: Case) -> bool:
        return any(selector.matches(case) for selector in self.where)

    def is_met(self, facts: GpuFacts) -> bool:
        if self.peers:
            return facts.peers is not False
        if self.since is None:
            return False
        return facts.capability is None or self.since <= facts.capability < self.below


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row as it is written."""

    where: tuple[str, ...]
    reason: str
    source: str
    since: str = msgspec.field(name="from", default="")
    below: str = ""
    peers: bool = False
    kernel: bool = False
    exact: bool = False


@functools.cache
def gpu_needs() -> tuple[Need, ...]:
    """All rows, in the order in which reasons are given."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    rows = msgspec.convert(tomllib.loads(text), dict[str, _Row])
    return tuple(_need(name, row) for name, row in rows.items())


def unmet_needs(case: Case, facts: GpuFacts, *, exact: bool) -> Iterator[Need]:
    """The needs of a case that GPUs do not meet. `exact`: it multiplies float8 with the exact matmul."""
    for need in gpu_needs():
        if need.is_about(case) and not (exact and need.kernel) and not need.is_met(facts):
            yield need


def parse_capability(text: str) -> Capability:
    """(9, 0) for "9.0". Raises ValueError."""
    major, minor = text.split(".")
    return int(major), int(minor)


def _need(name: str, row: _Row) -> Need:
    since = parse_capability(row.since) if row.since else None
    needed = f"{row.since.partition('.')[0]}.x" if row.below else row.since
    return Need(
        name=name,
        where=tuple(parse_selector(text) for text in row.where),
        reason=row.reason.format(needed=needed),
        source=row.source,
        since=since,
        below=parse_capability(row.below) if row.below else _NEWEST,
        peers=row.peers,
        kernel=row.kernel,
        exact=row.exact,
    )
