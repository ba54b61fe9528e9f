"""The predicted gain of converting each linear to float8, whether a case converts it or not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from harness.matrix.case import Case, Float8
from harness.matrix.linears import BLOCK_LINEARS, OUTPUT_FQN, is_converted, linear_features, linear_name
from harness.matrix.recipes import MatmulRole
from harness.performance.casts import casts
from harness.performance.gemms import Gemm, gemms, is_refused
from harness.performance.machine import Machine
from harness.performance.padding import padding_bytes
from harness.performance.roofline import cast_s, gemm_s


class Matmul(msgspec.Struct, frozen=True, kw_only=True):
    """One matmul of a linear on one rank: its shape after sharding, and the time of one execution in microseconds.

    `refused`: `torch._scaled_mm` does not take it, with what pads it.
    """

    role: MatmulRole
    m: int
    n: int
    k: int
    aligned: bool
    refused: bool
    bf16_us: float
    float8_us: float


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """One linear of all blocks, or the output layer, in BF16 and in float8: milliseconds of one rank and step.

    `gain`: how many times as fast as in BF16 it is in float8, casts and padding included. `refused`: one of its float8
    matmuls is.
    """

    name: str
    count: int
    converted: bool
    refused: bool
    gain: float
    bf16_ms: float
    float8_ms: float
    cast_ms: float
    padding_ms: float
    matmuls: tuple[Matmul, ...]


def conversions(case: Case, machine: Machine) -> tuple[Conversion, ...]:
    """Every linear in the order of a block, then the output layer. A linear that is kept is costed as if converted."""
    all_of_them = replace(case, float8=replace(case.float8, output_layer=True, filter_fqns=()))
    twin = replace(case, float8=Float8())
    found = {name: _by_name(gemms(each)) for name, each in (("bf16", twin), ("float8", all_of_them))}
    cast_by_name: defaultdict[str, float] = defaultdict(float)
    for cast in casts(all_of_them):
        cast_by_name[linear_name(cast.fqn)] += cast_s(cast, machine)
    return tuple(
        _conversion(
            case, (twin, found["bf16"][name]), (all_of_them, found["float8"][name]), cast_by_name[name], machine
        )
        for name in (*BLOCK_LINEARS, OUTPUT_FQN)
    )


def too_small_for_rowwise(case: Case) -> tuple[str, ...]:
    """Linears of blocks that torchao's `_auto_filter_for_recipe` (0.18) does not convert with the recipe rowwise.

    By the size of the whole weight: linears are converted before they are sharded.
    """
    sizes = {name: linear_features(case, name) for name in BLOCK_LINEARS}
    return tuple(name for name, (k, n) in sizes.items() if n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048))


def _conversion(
    case: Case,
    bf16: tuple[Case, list[Gemm]],
    float8: tuple[Case, list[Gemm]],
    casting_s: float,
    machine: Machine,
) -> Conversion:
    (twin, plain), (converted, scaled) = bf16, float8
    fqn, name = scaled[0].fqn, linear_name(scaled[0].fqn)
    firsts = [(one, other) for one, other in zip(plain, scaled, strict=True) if one.fqn == fqn]
    padding_ms = sum(padding_bytes(converted, gemm) for gemm in scaled) / machine.memory_bytes_s * 1e3
    bf16_ms = sum(gemm_s(twin, gemm, machine) for gemm in plain) * 1e3
    float8_ms = sum(gemm_s(converted, gemm, machine) for gemm in scaled) * 1e3
    matmuls = tuple(
        Matmul(
            role=other.role,
            m=other.m,
            n=other.n,
            k=other.k,
            aligned=other.aligned,
            refused=is_refused(converted, other),
            bf16_us=gemm_s(twin, _once(one), machine) * 1e6,
            float8_us=gemm_s(converted, _once(other), machine) * 1e6,
        )
        for one, other in firsts
    )
    return Conversion(
        name=name,
        count=len({gemm.fqn for gemm in scaled}),
        converted=is_converted(case, fqn),
        refused=any(matmul.refused for matmul in matmuls),
        gain=bf16_ms / (float8_ms + casting_s * 1e3 + padding_ms),
        bf16_ms=bf16_ms,
        float8_ms=float8_ms,
        cast_ms=casting_s * 1e3,
        padding_ms=padding_ms,
        matmuls=matmuls,
    )


def _once(gemm: Gemm) -> Gemm:
    return replace(gemm, count=1, repeats=0)


def _by_name(found: Iterable[Gemm]) -> dict[str, list[Gemm]]:
    named: defaultdict[str, list[Gemm]] = defaultdict(list)
    for gemm in found:
        named[linear_name(gemm.fqn)].append(gemm)
    return named
