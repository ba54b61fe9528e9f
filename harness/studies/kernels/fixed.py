"""The fixed list of kernel checks: every way torchao calls `_scaled_mm`, at the edges of what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from harness.trace.device import Float8Dtype, KernelCheck, OutDtype

# Tokens, inner and output features: the smallest, tokens that are no multiple of 16, small models, long inner dims.
SHAPES = ((16, 16, 16), (7, 64, 32), (32, 96, 48), (64, 256, 128), (48, 1024, 80), (64, 4096, 64))
PAIRS: tuple[tuple[Float8Dtype, Float8Dtype], ...] = (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))
ALL_LAYOUTS_FROM = (10, 0)  # compute capability from which cuBLASLt multiplies any layout


def value_checks() -> tuple[KernelCheck, ...]:
    """Calls that a GPU takes, whose results are compared. Ids are unique."""
    return tuple(dict.fromkeys((*_tensorwise(), *_rowwise(), *_special())))


def _tensorwise() -> Iterator[KernelCheck]:
    outs: tuple[OutDtype, ...] = ("float32", "bfloat16", "float16")
    for (m, k, n), out, fast in product(SHAPES, outs, (False, True)):
        for a, b in PAIRS:
            yield KernelCheck(scaling="tensorwise", m=m, k=k, n=n, a=a, b=b, out=out, fast=fast, values="integers")
        for values in ("normal", "positive"):
            yield KernelCheck(scaling="tensorwise", m=m, k=k, n=n, out=out, fast=fast, values=values)
        if out != "float32":
            yield KernelCheck(scaling="tensorwise", m=m, k=k, n=n, out=out, fast=fast, bias=True, values="integers")
    for a, b in PAIRS[1:]:
        yield KernelCheck(scaling="tensorwise", m=64, k=256, n=128, a=a, b=b, out="float32")


def _rowwise() -> Iterator[KernelCheck]:
    """In bfloat16, as rowwise recipes ask for; a gradient of weights in high precision changes no shape."""
    for (m, k, n), fast in product(SHAPES, (False, True)):
        for values in ("integers", "normal", "positive"):
            yield KernelCheck(scaling="rowwise", m=m, k=k, n=n, fast=fast, values=values)
        yield KernelCheck(scaling="rowwise", m=m, k=k, n=n, fast=fast, bias=True, values="integers")


def _special() -> Iterator[KernelCheck]:
    """Operands and scales with something in them that must come out, and no tokens at all."""
    for fast in (False, True):
        for scaling in ("tensorwise", "rowwise"):
            for values in ("nan", "zero_scale"):
                yield KernelCheck(scaling=scaling, m=32, k=96, n=48, fast=fast, values=values)
            yield KernelCheck(scaling=scaling, m=0, k=64, n=32, fast=fast)
        yield KernelCheck(scaling="tensorwise", m=32, k=96, n=48, a="e5m2", fast=fast, values="inf")


def refusal_checks(capability: tuple[int, int]) -> tuple[KernelCheck, ...]:
    """Calls that a GPU of this compute capability refuses."""
    calls = [
        KernelCheck(scaling="tensorwise", m=32, k=40, n=32),
        KernelCheck(scaling="tensorwise", m=32, k=48, n=24),
        KernelCheck(scaling="rowwise", m=32, k=48, n=1128),
        KernelCheck(scaling="tensorwise", m=32, k=48, n=32, a="e5m2", b="e5m2"),
        KernelCheck(scaling="tensorwise", m=32, k=48, n=32, out="float32", bias=True),
        KernelCheck(scaling="tensorwise", m=32, k=48, n=32, bias=True, misfit="bias_dtype"),
        KernelCheck(scaling="tensorwise", m=32, k=48, n=32, misfit="scale_float64"),
        KernelCheck(scaling="rowwise", m=32, k=48, n=32, misfit="scale_shape"),
        KernelCheck(scaling="rowwise", m=32, k=48, n=32, misfit="scale_strided"),
        KernelCheck(scaling="rowwise", m=32, k=48, n=32, out="float32"),
    ]
    if capability < ALL_LAYOUTS_FROM:
        calls += [
            KernelCheck(scaling="tensorwise", m=32, k=48, n=32, misfit="a_column_major"),
            KernelCheck(scaling="tensorwise", m=32, k=48, n=32, misfit="b_row_major"),
        ]
    return tuple(calls)
