"""What one simulated rank did in a step: its collectives, its matmuls and its memory, without any data."""

from __future__ import annotations

from collections.abc import Mapping

from harness.trace.flops import FlopsRecord
from harness.trace.record import Record
from harness.trace.traffic import TrafficRecord


class SimulatedMatmul(Record, frozen=True, kw_only=True):
    """Equal matmuls [m, k] x [k, n] of one step; `precision` is "float8" or a dtype."""

    precision: str
    m: int
    n: int
    k: int
    calls: int


class SimulatedRank(Record, frozen=True, kw_only=True):
    """One rank in step 2. `refusal`: the error in which it ended instead, "" where it trained.

    `memory` are bytes by the names of fields of `performance.memory.Memory`; `peak` is up to 1 % too low.
    """

    rank: int
    refusal: str = ""
    traffic: tuple[TrafficRecord, ...] = ()
    matmuls: tuple[SimulatedMatmul, ...] = ()
    flops: tuple[FlopsRecord, ...] = ()
    memory: Mapping[str, int] = {}
