"""The chosen cases of a tier: the file `cases/chosen/TIER.toml` that `fp8-harness tier choose` writes.

Choosing cheaply takes a minute (`cheap_cover.py`), listing a tier must not. So the choice is kept, with what every
case is there for, and a change of it shows in review. `tier.py` refuses a choice that does not cover its tier.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.hints import choose_tier
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.tomlfile import TomlFile, read_toml_file

FOLDER = "chosen"


class ChosenCase(msgspec.Struct, frozen=True, kw_only=True):
    """One case, what it was expected to cost when it was chosen, and what it is there for."""

    case: Case
    cost_cpu_s: float
    reason: str


def chosen_path(case_file: Path) -> Path:
    """Where the choice for a case file is kept; it need not exist."""
    return case_file.parent / FOLDER / case_file.name


def read_chosen(path: Path) -> tuple[ChosenCase, ...]:
    """The cases of a choice, in its order. HarnessError with the line on anything that is not right."""
    toml = read_toml_file(path)
    toml.check_keys(table=toml.data, known=("case",))
    return tuple(_chosen(toml, table, index) for index, table in enumerate(toml.tables("case")))


def chosen_file(tier: str, chosen: Iterable[ChosenCase]) -> bytes:
    """The content of the file for these cases."""
    import tomli_w

    head = (
        f"# The cases of tier {tier}: written by `fp8-harness tier choose {tier}`, never by hand. Each has the CPU\n"
        "# seconds that it was expected to cost and what it is there for.\n\n"
    )
    tables = [
        {"id": case_id(each.case), "cost_cpu_s": round(each.cost_cpu_s, 1), "reason": each.reason} for each in chosen
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
