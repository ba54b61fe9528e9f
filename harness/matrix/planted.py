"""The planted faults that a plug-in knows, as far as cases are chosen for them."""

from collections.abc import Mapping
from typing import Any, Protocol

from harness.matrix.case import Case
from harness.registry import answer, answers


class PlantedFault(Protocol):
    """A deliberate bug, which some cases show from a step on."""

    @property
    def name(self) -> str: ...

    @property
    def since_step(self) -> int:
        """The first step in which anything can differ."""

    @property
    def unrefuses(self) -> bool:
        """True when a case that must be refused trains with it, so only such a case can show it."""

    def applies(self, case: Case) -> bool:
        """True when it can be planted in this case and has its effect there."""

    def hosts(self, *, at_most: int) -> tuple[Case, ...]:
        """The cases of its catalogue that it applies to, the first with the fewest ranks."""


PREFIX = "fault:"  # of the injection that plants a fault


class Catalogue(Protocol):
    """What a plug-in answers about planted faults."""

    def all_faults(self) -> Mapping[str, Any]:
        """Every fault by its name."""

    def fault_named(self, name: str) -> Any:
        """The fault of this name. Raises HarnessError with a suggestion if it does not exist."""


def planted_faults() -> tuple[PlantedFault, ...]:
    """Every planted fault; none where no plug-in knows any."""
    return tuple(fault for catalogue in answers("planted faults") for fault in catalogue.all_faults().values())


def catalogue_of_faults(where: str) -> Catalogue:
    """The planted faults, of which something at `where` cannot do without. HarnessError where no plug-in knows any."""
    catalogue: Catalogue = answer("planted faults", where=where)
    return catalogue
