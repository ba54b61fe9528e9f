"""Casts and matmuls of a rank by what they are and the how-manieth of their kind: what is compared across ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import NamedTuple, TypeVar

from harness.trace import RankTrace
from harness.trace.operands import CastPhase, CastRecord, Gemm, MatmulRecord, Role

Record = TypeVar("Record")
Kind = TypeVar("Kind", bound=Hashable)


# The operands a and b of a linear's matmuls.
ROLES: dict[Gemm, tuple[Role, Role]] = {
    "forward": ("input", "weight"),
    "recompute": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}


class CastKind(NamedTuple):
    """Casts that follow one another in one step of one linear."""

    step: int
    fqn: str
    role: Role
    phase: CastPhase


class MatmulKind(NamedTuple):
    """Matmuls that follow one another in one step of one linear. Several when a witness replays dp ranks."""

    step: int
    fqn: str
    gemm: Gemm


def casts_of(trace: RankTrace) -> dict[tuple[CastKind, int], CastRecord]:
    """Every cast of a rank by its kind and number (from 0), in execution order."""
    casts = trace.operands.casts if trace.operands is not None else ()
    return _numbered((CastKind(cast.step, cast.fqn, cast.role, cast.phase), cast) for cast in casts)


def matmuls_of(trace: RankTrace) -> dict[tuple[MatmulKind, int], MatmulRecord]:
    """Every matmul of a rank by its kind and number (from 0), in execution order."""
    matmuls = trace.operands.matmuls if trace.operands is not None else ()
    return _numbered((MatmulKind(matmul.step, matmul.fqn, matmul.gemm), matmul) for matmul in matmuls)


def _numbered(records: Iterable[tuple[Kind, Record]]) -> dict[tuple[Kind, int], Record]:
    seen: Counter[Kind] = Counter()
    numbered = {}
    for kind, record in records:
        numbered[kind, seen[kind]] = record
        seen[kind] += 1
    return numbered
