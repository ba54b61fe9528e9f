"""A rule about cases: what it says, why, and when.

A rule declares the axes that it reads, so that the matrix can evaluate it on part of a case; it must not read others.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from harness.matrix.case import Case
from harness.matrix.targets import is_llama


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A named property of cases. `axes` are the axes that it reads (`axes.py`); `when` says if a case has it."""

    name: str
    reason: str
    source: str
    axes: tuple[str, ...]
    when: Callable[[Case], bool]

    def applies(self, case: Case) -> bool:
        """True when the case has the property. A rule that reads shapes of the model says nothing of unknown ones."""
        return (is_llama(case.target) or "target" not in self.axes) and self.when(case)


class Exclusion(Rule, frozen=True):
    """A combination that is never run: impossible or meaningless."""


class Refusal(Rule, frozen=True):
    """A combination that torch must refuse. `check` judges it; the error message must match `pattern` (re.search)."""

    check: str
    pattern: str
