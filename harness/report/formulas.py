"""What is known of the formulas: as a table after clean runs, and as a line for every pair of verified versions."""

from __future__ import annotations

from collections.abc import Iterator

from harness.evidence.formulas import VerifiedWith
from harness.expect.expectations import FORMULAS
from harness.plural import counted
from harness.report.case import case_section
from harness.report.sections import text_of
from harness.studies.formulas import Verification

_NAMED = 3  # of the cases that disagree with one formula


def formulas_text(found: Verification) -> str:
    """A line for every formula, and then the cases that failed in another way, in full."""
    lines = [f"{formula:<13} {'; '.join(_said(found, formula))}" for formula in FORMULAS]
    return "\n\n".join(["\n".join(lines), *(text_of([case_section(each)]) for each in found.failed)])


def _said(found: Verification, formula: str) -> Iterator[str]:
    against, number = found.contradicted[formula], found.compared[formula]
    if not number:
        yield "not verified: no clean run was compared with it"
        return
    yield f"{'agrees in' if not against else 'not verified:'} {counted(number, 'case')}{' compared' if against else ''}"
    if against:
        more = f" and {len(against) - _NAMED} more" if len(against) > _NAMED else ""
        yield f"disagrees in {len(against)}: {', '.join(against[:_NAMED])}{more}"


def verified_line(each: VerifiedWith) -> str:
    """The versions, in how many cases the formulas were compared, why and when."""
    missing = [formula for formula in FORMULAS if not each.cases.get(formula)]
    without = f", not {', '.join(missing)}" if missing else ""
    said = each.provenance
    return (
        f"formulas with torch {each.torch} and torchao {each.torchao}{without}: "
        f"{counted(max(each.cases.values(), default=0), 'case')}, {said.created[:10]}: {said.reason}"
    )
