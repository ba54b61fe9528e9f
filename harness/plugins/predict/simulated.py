"""What a rank of a simulation is asked for, and what it returns."""

from collections.abc import Mapping

import msgspec

from harness.matrix.case import Case
from harness.trace.counts import FlopsRecord, TrafficRecord
from harness.trace.record import Record


class SimulationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Simulate a step of a case. Rank i of the job stands for rank `ranks[i]` of the case."""

    case: Case
    ranks: tuple[int, ...]


class SimulatedMatmul(Record, frozen=True, kw_only=True):
    """Equal matmuls [m, k] x [k, n] of one step; `precision` is "float8" or a dtype."""

    precision: str
    m: int
    n: int
    k: int
    calls: int


class SimulatedRank(Record, frozen=True, kw_only=True):
    """One rank in step 2. `refusal`: the error in which it ended instead, "" where it trained.

    `memory` are bytes by the names of fields of `cost.Memory`; `peak` is up to 1 % too low.
    """

    rank: int
    refusal: str = ""
    traffic: tuple[TrafficRecord, ...] = ()
    matmuls: tuple[SimulatedMatmul, ...] = ()
    flops: tuple[FlopsRecord, ...] = ()
    memory: Mapping[str, int] = {}
