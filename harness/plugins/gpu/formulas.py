"""What is known about the formulas: in how many cases each agrees, and the versions that they were verified with."""

from collections.abc import Iterator

from harness.evidence.verified import VerifiedWith
from harness.expect.expectations import FORMULAS
from harness.report.case import case_section
from harness.report.sections import Block, Facts
from harness.studies.records import Verification
from harness.text import counted

_NAMED = 3  # of the cases that disagree with one formula


def formulas_sections(verification: Verification) -> list[Block]:
    """Return a line for every formula, and then the cases that failed in another way."""
    lines = tuple((formula, "; ".join(_agreement(verification, formula))) for formula in FORMULAS)
    return [Facts(lines), *map(case_section, verification.failed)]


def _agreement(verification: Verification, formula: str) -> Iterator[str]:
    against, number = verification.contradicted[formula], verification.compared[formula]
    if not number:
        yield "not verified: no clean run was compared with it"
        return
    yield f"{'agrees in' if not against else 'not verified:'} {counted(number, 'case')}{' compared' if against else ''}"
    if against:
        more = f" and {len(against) - _NAMED} more" if len(against) > _NAMED else ""
        yield f"disagrees in {len(against)}: {', '.join(against[:_NAMED])}{more}"


def verified_line(verified: VerifiedWith) -> str:
    """Return the versions, in how many cases the formulas were compared, why and when."""
    missing = [formula for formula in FORMULAS if not verified.cases.get(formula)]
    without = f", not {', '.join(missing)}" if missing else ""
    made = verified.provenance
    return (
        f"formulas with torch {verified.torch} and torchao {verified.torchao}{without}: "
        f"{counted(max(verified.cases.values(), default=0), 'case')}, {made.created[:10]}: {made.reason}"
    )
