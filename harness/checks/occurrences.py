"""The casts and matmuls of a rank, keyed so that the same one can be found on another rank or in another run.

A key says where an operand is cast or multiplied (`CastKey`, `MatmulKey`) and is paired with the occurrence, counted
from 0: a linear casts the same operand several times in a step when forward is recomputed or batches are replayed.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from harness.trace import RankTrace
from harness.trace.operands import CastPhase, CastRecord, GemmRole, MatmulRecord, Role

Record = TypeVar("Record")
Key = TypeVar("Key", bound=Hashable)


class CastKey(NamedTuple):
    """Where a cast happens: one operand of one linear in one phase of one step."""

    step: int
    fqn: str
    role: Role
    phase: CastPhase


class MatmulKey(NamedTuple):
    """Where a matmul happens: one GEMM of one linear in one step. The solo witness repeats it for every dp rank."""

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
    """The record with this key on every one of the ranks that has it; `records` are those of every rank."""
    return {rank: records[rank][key] for rank in ranks if key in records.get(rank, {})}


def with_occurrence(records: Iterable[tuple[Key, Record]]) -> dict[tuple[Key, int], Record]:
    seen: Counter[Key] = Counter()
    by_key = {}
    for key, record in records:
        by_key[key, seen[key]] = record
        seen[key] += 1
    return by_key
