"""The chosen cases of a tier, and what each covers and carries.

`dev tier` writes them to `cases/chosen/TIER.toml`. `tier.py` refuses a choice that does not cover its tier.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.hints import choose_tier
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.cover import combinations_in
from harness.matrix.known import KnownFault, matching
from harness.matrix.planted import PlantedFault
from harness.matrix.pricing import Goal
from harness.matrix.rules import expected_refusal
from harness.matrix.space import Space, is_hit
from harness.matrix.tier import tables_of
from harness.matrix.tomlfile import TomlFile, read_toml_file


def carries(case: Case, fault: PlantedFault, known: Sequence[KnownFault]) -> bool:
    """True when a fault that is planted in this case must show, and no recorded fault could be taken for it."""
    return bool(carried(case, (fault,), known))


def carried(case: Case, faults: Iterable[PlantedFault], known: Sequence[KnownFault]) -> tuple[PlantedFault, ...]:
    """Those of the faults that the case `carries`."""
    if any(known_fault.masks_new_findings(case) for known_fault in matching(known, case)):
        return ()
    refused = expected_refusal(case) is not None
    return tuple(
        fault
        for fault in faults
        if case.train.steps >= fault.since_step and fault.unrefuses == refused and fault.applies(case)
    )


def contained(case: Case, spaces: Sequence[Space], strength: int) -> set[Goal]:
    """The combinations that a case covers: none when it is refused or runs into a recorded fault."""
    goals: set[Goal] = set()
    for index, space in enumerate(spaces):
        row = space.row_of(case)
        if row is not None and not is_hit(row, tables_of(space, "excluded", "refused", "known")):
            goals |= {
                (index, combination)
                for combination in combinations_in([row], strength)
                if space.block.combines(space.block.groups[factor].name for factor, _ in combination)
            }
    return goals


FOLDER = "chosen"


class ChosenCase(msgspec.Struct, frozen=True, kw_only=True):
    case: Case
    cost_cpu_s: float
    reason: str


def chosen_path(case_file: Path) -> Path:
    return case_file.parent / FOLDER / case_file.name


def read_chosen(path: Path) -> tuple[ChosenCase, ...]:
    """The cases of a choice, in its order. HarnessError with the line on anything that is not right."""
    toml = read_toml_file(path)
    toml.check_keys(table=toml.data, known=("case",))
    return tuple(_chosen(toml, table, index) for index, table in enumerate(toml.tables("case")))


def chosen_file(tier: str, chosen: Iterable[ChosenCase]) -> bytes:
    import tomli_w

    head = (
        f"# The cases of tier {tier}: written by `fp8-harness dev tier {tier}`, never by hand. Each has the CPU\n"
        "# seconds that it was expected to cost and what it is there for.\n\n"
    )
    tables = [
        {"id": case_id(choice.case), "cost_cpu_s": round(choice.cost_cpu_s, 1), "reason": choice.reason}
        for choice in chosen
    ]
    return (head + tomli_w.dumps({"case": tables})).encode()


def _chosen(toml: TomlFile, table: object, index: int) -> ChosenCase:
    known = toml.check_keys("case", index, table=table, known=("id", "cost_cpu_s", "reason"))
    try:
        return ChosenCase(
            case=parse_case_id(str(known.get("id", ""))),
            cost_cpu_s=float(known.get("cost_cpu_s", 0.0)),
            reason=str(known.get("reason", "")),
        )
    except (HarnessError, ValueError) as error:
        what = error.what if isinstance(error, HarnessError) else str(error)
        raise toml.error("case", index, what=what, fix=f"run `{choose_tier(_tier_of(toml))}`.") from error


def _tier_of(toml: TomlFile) -> str:
    """The file of the tier that the cases were chosen for: `chosen_path` backwards."""
    path = Path(toml.where)
    return str(path.parents[1] / path.name)
