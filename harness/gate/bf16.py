"""Whether BF16 moved, which distinguishes a change of the environment from a change of FP8."""

from __future__ import annotations

import msgspec

from harness.checks.mismatch import same_numbers
from harness.gate.reason import Kind
from harness.gate.sides import Pair, Sides
from harness.matrix.case import Case, Float8
from harness.matrix.caseid import case_id, parse_case_id, twin_case
from harness.plural import counted
from harness.result import CaseResult


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What BF16 says of a case whose numbers moved."""

    kind: Kind
    text: str


class Bf16:
    """The BF16 runs that both sides have: the twin of a case, its curve, a reference that both ran, other cases."""

    def __init__(self, sides: Sides, moved: frozenset[str]) -> None:
        self._moved = moved
        self._others = [pair.id for pair in sides.compared if not parse_case_id(pair.id).float8.enabled]

    def diagnosis(self, pair: Pair) -> Diagnosis:
        """Whose change it is, from the nearest BF16 run that both sides have."""
        case = parse_case_id(pair.id)
        if not case.float8.enabled:
            return Diagnosis(kind=Kind.BF16_MOVED, text="the case is BF16 itself: the environment changed")
        twin = next((name for name in twins(case) if name in self._others), None)
        if twin is not None:
            return _diagnosis(twin in self._moved, f"its BF16 twin {twin}")
        for name, text in (("twin", "the BF16 twin that was run here"), ("golden", "the BF16 reference")):
            moved = _curve_moved(pair, name)
            if moved is not None:
                return _diagnosis(moved, text)
        return Diagnosis(kind=Kind.MOVED, text=self._unknown())

    def _unknown(self) -> str:
        if not self._others:
            return "no BF16 case is in both runs: FP8 or the environment may have changed"
        moved = sum(name in self._moved for name in self._others)
        return f"no BF16 twin is in both runs; of {counted(len(self._others), 'other BF16 case')} {moved} moved"


def twins(case: Case) -> tuple[str, ...]:
    """The ids of the BF16 twins of a case, the nearest first: in its own dtype, and in bfloat16."""
    alike = twin_case(case)
    return case_id(msgspec.structs.replace(case, float8=Float8())), case_id(alike)


def _diagnosis(moved: bool, of_what: str) -> Diagnosis:
    if moved:
        return Diagnosis(kind=Kind.BF16_MOVED, text=f"{of_what} moved too: the environment changed")
    return Diagnosis(kind=Kind.FP8_MOVED, text=f"{of_what} did not move: FP8 changed")


def _curve_moved(pair: Pair, name: str) -> bool | None:
    """Whether a BF16 curve that both sides ran moved; None where one did not run it. A stored golden never does."""
    before, after = _curve(pair.baseline, name), _curve(pair.candidate, name)
    return None if before is None or after is None else not same_numbers(before, after)


def _curve(case: CaseResult, name: str) -> tuple[float, ...] | None:
    if name == "golden":
        return case.golden_losses if case.golden == "run here" else None
    curve = None if case.measured is None else case.measured.curves.get(name)
    return None if curve is None else curve.losses
