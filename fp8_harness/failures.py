"""What a call says of a result: nothing, a warning, or the three lines of a failed case."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from fp8_harness.session import MachineFailed

if TYPE_CHECKING:
    from harness.result import CaseResult


class HarnessWarning(UserWarning):
    """A fault that is recorded for the installed packages."""


def three_lines(result: CaseResult) -> str:
    """Return what is wrong, why we say so and what to do next, a line each."""
    lines = result.three_lines.texts
    if lines and result.findings[0].rule == "fp8_on/not-converted":
        name = result.findings[0].module or "NAME"
        lines = (*lines[:2], f'fix: convert it, or say that it is meant: `filter_fqns=("{name}",)`.')
    return "\n".join(lines) if lines else f"{result.case_id}: {result.verdict.value}"


def check_machine(result: CaseResult) -> None:
    """Raises MachineFailed for a run that the machine ended."""
    from harness.verdict import Verdict

    if result.verdict in (Verdict.INFRA, Verdict.NOT_RUN):
        raise MachineFailed(three_lines(result))


def warn_of(result: CaseResult) -> None:
    """Warn of a recorded fault of torch or torchao."""
    warnings.warn(three_lines(result), HarnessWarning, stacklevel=4)
