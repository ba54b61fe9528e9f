"""One comparison: what a run has beside what a reference has, and what is promised of the difference.

A check lists what it compares: each with the rule that it breaks where it is further off than its `Limit` allows.
`first_wrong` picks what is told of it, and `numbers` compares what ranks report. A new comparison is one such list, a
new limit one row of `promises.toml`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.checks.assembly import nan_as_inf, size_of_error
from harness.checks.check import Rule, about_ranks
from harness.promises import keeps
from harness.trace import Run
from harness.verdict import Finding, Value


class Compared(NamedTuple):
    """One tensor or number beside the reference's.

    `ranks`: whose it is, where it is not the whole run's. `of`: the record that it is made from. `expected`, `found`:
    in words; empty: the distance says it. `same`: False where bits differ, whatever the distance.
    """

    rule: Rule
    step: int
    distance: float
    allowed: float
    module: str | None = None
    kind: str = ""
    ranks: tuple[int, ...] = ()
    of: Any = None
    expected: str = ""
    found: str = ""
    same: bool = True

    @property
    def good(self) -> bool:
        return keeps(self.distance, self.allowed) and self.same


class Wrong(NamedTuple):
    """What is too far off: the one that is told, all of the same step and kind, and how many of these were compared."""

    told: Compared
    together: Sequence[Compared]
    compared: int

    def finding(self, run: Run | None = None, own: Iterable[int] | None = None, **fields: Any) -> Finding:
        """Return the finding about it. With `run`, it names ranks: `own`, or those of `together`."""
        told, allowed = self.told, float(self.told.allowed)
        made = told.rule.finding(
            **{
                "distance": told.distance,
                "allowed": allowed,
                "count": len(self.together),
                "compared": self.compared,
                "step": told.step,
                "module": told.module,
                "expected": told.expected or f"distance <= {allowed:.2g}",
                "found": told.found or f"{told.distance:.2g}",
                "size": max(nan_as_inf(one.distance) for one in self.together),
                **fields,
            }
        )
        of = (rank for one in self.together for rank in one.ranks) if own is None else own
        return made if run is None else about_ranks(made, of, run)


def first_wrong(compared: Iterable[Compared], *, worst: bool = False) -> Wrong | None:
    """Return what is wrong in the first step and kind where something is: the first of it as given, or the worst."""
    every = list(compared)
    wrong = [one for one in every if not one.good]
    if not wrong:
        return None
    place = wrong[0].step, wrong[0].kind
    together = [one for one in wrong if (one.step, one.kind) == place]
    told = max(together, key=lambda one: nan_as_inf(one.distance)) if worst else together[0]
    return Wrong(told, together, sum((one.step, one.kind) == place for one in every))


def reported(
    rule: Rule, run: Run, name: str, expected: Mapping[int, float], allowed: Callable[[int, float], float]
) -> Iterator[Compared]:
    """Yield what every rank reports, step by step, beside the number that is expected there.

    `allowed`: how far it may be off, by step and expected number. `of` is the number itself.
    """
    found = [(step.step, trace.rank, getattr(step, name)) for trace in run.by_rank for step in trace.steps]
    told = [(step, rank, math.nan if value is None else value) for step, rank, value in found if step in expected]
    for step, rank, value in sorted(told, key=lambda number: number[:2]):
        right = expected[step]
        one = Compared(rule, step, abs(value - right), allowed(step, right), ranks=(rank,), of=value)
        yield one._replace(expected=repr(right), found=repr(value))


def numbers(
    rule: Rule,
    run: Run,
    name: str,
    expected: Mapping[int, float],
    allowed: Callable[[int, float], float],
    **values: Value,
) -> list[Finding]:
    """Return the finding about the first step in which ranks report another number than expected."""
    wrong = first_wrong(reported(rule, run, name, expected, allowed))
    if wrong is None:
        return []
    size = size_of_error(name, wrong.told.of, expected[wrong.told.step])
    return [wrong.finding(run, number=name, size=size, values=values)]
