"""What a target itself states of a run: the numbers that `expect` of its module returned on this rank.

Written by `worker/targets/statement.py`, compared with what was recorded by `checks/stated.py`.
"""

from __future__ import annotations

from msgspec import field

from harness.trace.record import Record

MATMULS, SAVED_BYTES, TRAFFIC = "matmuls", "saved_bytes", "traffic"  # what can be stated: the keys of the answer


class Sent(Record, frozen=True, kw_only=True):
    """Collectives of one kind in one step of one rank. `payload_bytes`: as in `TrafficRecord`."""

    calls: int
    payload_bytes: int


class Stated(Record, frozen=True, kw_only=True):
    """What is stated of one step of one rank. What is not in it is not stated."""

    step: int
    matmuls: int | None = None  # scaled matmuls
    saved_bytes: dict[str, int] = field(default_factory=dict)  # by dtype, of what autograd saves for backward
    traffic: dict[str, Sent] = field(default_factory=dict)  # by `collective_words`

    @property
    def topics(self) -> frozenset[str]:
        """Which of MATMULS, SAVED_BYTES and TRAFFIC something is stated of."""
        given = {MATMULS: self.matmuls is not None, SAVED_BYTES: self.saved_bytes, TRAFFIC: self.traffic}
        return frozenset(topic for topic, is_stated in given.items() if is_stated)
