"""Movement: which exact numbers of a case differ from those of another run."""

from __future__ import annotations

from collections.abc import Mapping

from harness.checks.mismatch import same_numbers
from harness.measured import Numbers

DIGESTS = ("casts", "matmuls", "gradients", "parameters")  # in the order of causes
LOSSES, GRADIENT_NORMS, FLUSHED = "losses", "gradient norms", "flushed values"


def moved(before: Numbers | None, now: Numbers | None, *, counts_only: bool = False) -> tuple[str, ...]:
    """The names of the exact numbers that differ, of those that both runs have; only counts repeat on a GPU."""
    if before is None or now is None:
        return ()
    one, other = (_counts(each) if counts_only else {**_values(each), **_counts(each)} for each in (before, now))
    return tuple(
        name
        for name, value in one.items()
        if value not in (None, {}) and other[name] not in (None, {}) and not _same(value, other[name])
    )


def _same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return same_numbers(one, other)
    return one == other or repr(one) == repr(other)  # NaN


def _values(numbers: Numbers) -> Mapping[str, object]:
    curve = numbers.curves.get("case")
    return {
        **{name: numbers.digests.get(name) for name in DIGESTS},
        LOSSES: None if curve is None else curve.losses,
        GRADIENT_NORMS: None if curve is None else curve.grad_norms,
        FLUSHED: numbers.flushed,
        "loss distance": numbers.loss_distance,
        "parity": numbers.parity,
        "local parity": numbers.local_parity,
    }


def _counts(numbers: Numbers) -> Mapping[str, object]:
    return {
        "collectives": numbers.wire,
        "saved bytes": numbers.saved_bytes,
        "fused operators": numbers.fused,
        "scaled matmuls": numbers.scaled_mm_calls,
        "FLOPs": numbers.flops,
    }
