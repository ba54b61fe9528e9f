"""The briefs: what every case of a run is judged by, gathered before any rank starts.

Owns finding the witnesses of a case. A damaged golden or an unfounded tolerance ends the run here, before anything was
spent; a missing one is judged as a failure of the case that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from harness.checks.judge import Judgement, judge
from harness.checks.twin import asks_for_twin, with_twins_word
from harness.checks.witnesses import Witnesses
from harness.engine.wire import JobStatus
from harness.measured.golden import Golden, GoldenMissing, load_golden
from harness.measured.tolerance import (
    Tolerance,
    ToleranceMissing,
    parity_key,
    parity_tolerance_for,
    tolerance_for,
    tolerance_key,
)
from harness.project import Project
from harness.running.machine import installed_version
from harness.running.witness import WitnessBench
from harness.spec.case import Case
from harness.spec.caseid import case_id, family_id
from harness.spec.fusion import executed_scaled_mm_calls
from harness.spec.gemms import converted_fqns
from harness.spec.known import KnownFault, match_known, read_known
from harness.spec.relations import partner
from harness.spec.rules import expected_refusal
from harness.trace import Run


class Brief(msgspec.Struct, frozen=True, kw_only=True):
    """What one case is judged by."""

    family: str
    witnesses: Witnesses
    known: KnownFault | None = None

    @property
    def needs_golden(self) -> bool:
        """True when the case is compared with a golden that is not there."""
        return self.witnesses.refusal is None and self.witnesses.golden is None


class Briefs:
    """The briefs of all cases of a run, by case id. It is the `Judge` of `casework.py`."""

    def __init__(self, briefs: dict[str, Brief]) -> None:
        self._briefs = briefs

    @property
    def missing_goldens(self) -> tuple[str, ...]:
        """Families that a case is compared with and that have no golden, sorted."""
        return tuple(sorted({brief.family for brief in self._briefs.values() if brief.needs_golden}))

    def expectation(self, case: Case) -> str | None:
        """Name of the known fault or the refusal that the case must show, if any."""
        brief = self._briefs[case_id(case)]
        if brief.known is not None:
            return brief.known.name
        refusal = brief.witnesses.refusal
        return refusal.name if refusal is not None else None

    def judge(self, case: Case, run: Run, status: JobStatus, bench: WitnessBench) -> Judgement:
        """The verdict on what came back from the ranks."""
        brief = self._briefs[case_id(case)]
        witnesses = brief.witnesses
        if run.complete and witnesses.refusal is None and all(trace.sketches is not None for trace in run.traces):
            witnesses = msgspec.structs.replace(witnesses, solo=bench.solo(case), partner=bench.partner(case))
        found = judge(case, run, status, witnesses, brief.known)
        if witnesses.golden is None or not run.complete or not asks_for_twin(found.findings):
            return found
        findings = with_twins_word(found.findings, run, witnesses.golden, bench.twin(case))
        return msgspec.structs.replace(found, findings=findings)


class _Shelf:
    """Reads each golden and each tolerance of a project once."""

    def __init__(self, root: Path, hardware: str) -> None:
        self._root = root
        self._hardware = hardware
        self._goldens: dict[str, Golden | None] = {}
        self._parity: dict[tuple[str, int], Tolerance | None] = {}
        self._tolerances: dict[tuple[str, int, float | None], Tolerance | None] = {}

    def golden(self, case: Case) -> Golden | None:
        family = family_id(case)
        if family not in self._goldens:
            try:
                self._goldens[family] = load_golden(self._root, self._hardware, family)
            except GoldenMissing:
                self._goldens[family] = None
        return self._goldens[family]

    def parity_tolerance(self, case: Case) -> Tolerance | None:
        key = (parity_key(case), case.train.steps)
        if key not in self._parity:
            try:
                self._parity[key] = parity_tolerance_for(case, self._root)
            except ToleranceMissing:
                self._parity[key] = None
        return self._parity[key]

    def tolerance(self, case: Case) -> Tolerance | None:
        key = (tolerance_key(case), case.train.steps, case.checks.loss_tolerance)
        if key not in self._tolerances:
            try:
                self._tolerances[key] = tolerance_for(case, self._root)
            except ToleranceMissing:
                self._tolerances[key] = None
        return self._tolerances[key]


def make_briefs(project: Project, cases: Iterable[Case], *, hardware: str) -> Briefs:
    """The briefs of these cases on one hardware class (`golden.hardware_class`).

    Raises `HarnessError` for a damaged golden, an unfounded tolerance or an unreadable record of known faults.
    """
    shelf = _Shelf(project.root, hardware)
    known = known_here(project)
    return Briefs({case_id(case): _brief(case, shelf, known) for case in cases})


def known_here(project: Project) -> tuple[KnownFault, ...]:
    """The recorded upstream faults of the torch that is installed; all of them where none is."""
    recorded = read_known(project.known) if project.known.exists() else ()
    torch = installed_version("torch")
    return tuple(fault for fault in recorded if torch is None or fault.hits_torch(torch))


def _brief(case: Case, shelf: _Shelf, known: tuple[KnownFault, ...]) -> Brief:
    refusal = expected_refusal(case)
    witnesses = Witnesses(
        golden=shelf.golden(case) if refusal is None else None,
        tolerance=shelf.tolerance(case) if refusal is None else None,
        parity_tolerance=shelf.parity_tolerance(case) if refusal is None else None,
        relation=partner(case),
        refusal=refusal,
        expected_fqns=converted_fqns(case),
        expected_scaled_mm=executed_scaled_mm_calls(case),
    )
    return Brief(family=family_id(case), witnesses=witnesses, known=match_known(known, case))
