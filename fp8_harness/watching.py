"""`watch` and `compare`: what a running job does, on the devices where it runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.verdict import Finding


def watch(model: Any, optimizer: Any, *, steps: int = 3) -> AbstractContextManager[Any]:
    """Record the first steps of a model inside of a `with` block; behind it, `.record` is that of this rank."""
    from harness.registry import answer

    watching: AbstractContextManager[Any] = answer("watch a model", where="watch")(model, optimizer, steps=steps)
    return watching


def compare(first: Any, second: Any, *, allowed: float = 0.0) -> tuple[Finding, ...]:
    """Return what the same rank did otherwise in the second record: options, counts of a step, then numbers.

    `allowed`: the relative distance that a gradient or a parameter may have.
    """
    from harness.registry import answer

    found: tuple[Finding, ...] = answer("compare records", where="compare")(first, second, allowed=allowed)
    return found
