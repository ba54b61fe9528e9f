"""What cases cost: their own CPU seconds, and those of references that they share."""

from collections.abc import Callable, Collection, Mapping

import msgspec

from harness.matrix.case import Case
from harness.matrix.cover import Combination


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of a case: its own, and by name those of its witnesses, which other cases may share."""

    own_s: float
    shared_s: Mapping[str, float] = {}

    def extra_s(self, witnesses: Collection[str]) -> float:
        """CPU seconds that the case adds when these witnesses exist already."""
        return self.own_s + sum(cost_s for name, cost_s in self.shared_s.items() if name not in witnesses)


Pricing = Callable[[Case], Price]
Goal = tuple[int, Combination]  # a combination of values in one of the spaces
