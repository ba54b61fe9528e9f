"""The judge of a run: what each case is checked by, gathered before any rank starts, and the verdict on what came back.

A damaged golden or an unfounded tolerance ends the run here, before anything was spent. It starts no rank: it names the
references that a case wants, whoever runs cases has them run, and the verdict follows from the case, its run and them.
"""

import contextlib
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from harness.checks import loss_vs_golden, metamorphic, module_replay, parity
from harness.checks.catalogue import CHECKS, by_cause
from harness.checks.check import Witnesses, finished
from harness.checks.divergence import with_operands
from harness.checks.judge import Judgement, judge, require_rules, showing, with_doubts, with_known_faults
from harness.checks.measuring import derived_parity_tolerance, derived_tolerance, measured
from harness.checks.model import reference_without_fsdp
from harness.engine.messages import JobStatus
from harness.evidence import references
from harness.evidence.golden import Golden, find_golden, make_golden
from harness.evidence.profile import Profile, find_profile, needs_profile
from harness.evidence.references import RunsByRole
from harness.evidence.sealed import Missing
from harness.evidence.tolerance import (
    SAME_ORDER,
    Tolerance,
    ToleranceMissing,
    parity_key,
    parity_tolerance_for,
    tolerance_for,
    tolerance_key,
)
from harness.evidence.verified import doubts, read_verified
from harness.expect.expectations import Expectations
from harness.expect.model import accumulates, found_model
from harness.hints import update_profile
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id, reference_case
from harness.matrix.records import PACKAGES, KnownFault, matching
from harness.matrix.upstream import installed_changes
from harness.project import Project
from harness.running.case_runner import NONE
from harness.running.plan import Injection, Plan, parse_injection
from harness.running.selection import recorded_faults
from harness.sources import holds_for, installed_versions
from harness.trace import Run
from harness.verdict import GoldenSource, Verdict

Evidence = TypeVar("Evidence", Golden, Tolerance, Profile)


class JudgedBy(msgspec.Struct, frozen=True, kw_only=True):
    family: str
    witnesses: Witnesses
    known: tuple[KnownFault, ...] = ()  # the recorded faults that affect the case
    fixes: tuple[Injection, ...] = ()  # their candidate fixes
    partner_fixes: tuple[Injection, ...] = ()  # those that its counterpart needs as well
    golden_of_other_build: bool = False  # one is stored that was made with an unreleased build, which is not this one
    doubts: Mapping[str, str] = {}  # the formulas that were not verified with the installed versions, each with a note

    def needs_fix(self, fixes: Sequence[Injection]) -> bool:
        """Return True if only the second run is compared with the counterpart, as both have a known issue."""
        return not fixes and any(_hides_the_partner(fault, self.witnesses.expect.case) for fault in self.known)

    @property
    def needs_golden(self) -> bool:
        return self.witnesses.expect.refusal is None and self.witnesses.golden is None

    @property
    def needs_profile(self) -> bool:
        return needs_profile(self.witnesses.expect.case) and self.witnesses.profile is None


class CaseJudge:
    """Judges the cases of a run by everything the project knows of them, and says which references that takes.

    `goldens`: losses are compared with those of BF16 too.
    """

    def __init__(self, judged_by: dict[str, JudgedBy], *, goldens: bool = True) -> None:
        self._judged_by = judged_by
        self._goldens = goldens
        self._checks = [of for of in CHECKS if goldens or of is not loss_vs_golden.check_loss_vs_golden]

    @property
    def missing_goldens(self) -> tuple[str, ...]:
        """Families that a case is compared with and that have no golden, sorted."""
        return tuple(sorted({basis.family for basis in self._judged_by.values() if basis.needs_golden}))

    @property
    def goldens_of_other_builds(self) -> tuple[str, ...]:
        """Return those of the `missing_goldens` that are stored, but of an unreleased build that is not this one."""
        return tuple(sorted({basis.family for basis in self._judged_by.values() if basis.golden_of_other_build}))

    @property
    def without_golden(self) -> tuple[str, ...]:
        """Return the ids of the cases that are compared with a golden and have none."""
        return tuple(name for name, basis in self._judged_by.items() if basis.needs_golden)

    @property
    def missing_profiles(self) -> tuple[str, ...]:
        """Return the ids of the cases that are compared with a profile and have none, sorted."""
        return tuple(sorted(name for name, basis in self._judged_by.items() if basis.needs_profile))

    def expectation(self, case: Case) -> str | None:
        basis = self._judged_by[case_id(case)]
        expected = [fault.name for fault in basis.known if fault.must_show(case)]
        if expected:
            return ", ".join(expected)
        refusal = basis.witnesses.expect.refusal
        return refusal.name if refusal is not None else None

    def fixes(self, case: Case) -> tuple[Injection, ...]:
        return self._judged_by[case_id(case)].fixes

    def needed_fixes(self, case: Case) -> tuple[Injection, ...]:
        """The candidate fixes of a case in which, without them, no step ends: a crash or a hang is recorded for it."""
        known = self._judged_by[case_id(case)].known
        unfinished = any(fault.verdict in (Verdict.CRASH, Verdict.HANG) and fault.must_show(case) for fault in known)
        return self.fixes(case) if unfinished else ()

    def needs(
        self, case: Case, run: Run | None = None, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
    ) -> tuple[references.Reference, ...]:
        basis = self._judged_by[case_id(case)]
        witnesses = basis.witnesses
        if run is not None:
            if not run.complete:
                return ()
            witnesses = _with_model(case, run, witnesses, have)
        parity_of = _parity_tolerance(case, witnesses, have)
        lacking = {"golden": witnesses.golden, "tolerance": witnesses.tolerance, "parity_tolerance": parity_of}
        unused = () if self._goldens else ("golden", "tolerance")
        return references.needs(
            witnesses.expect,
            references.Stored(**{name: kept is not None or name in unused for name, kept in lacking.items()}),
            recorded=witnesses.records if run is None else _recorded(run),
            run=run,
            with_partner=not basis.needs_fix(fixes),
            fixes={fix.content: fix.patch for fix in basis.partner_fixes if fixes},
        )

    def needs_if_failing(self, case: Case, run: Run, judgement: Judgement) -> tuple[references.Reference, ...]:
        recorded = run.complete and all(trace.operands is not None for trace in run.traces)
        far = any(finding.check == parity.check_parity.name for finding in judgement.findings)
        return (references.operands_reference(case),) if recorded and far else ()

    def judge(
        self, case: Case, run: Run, status: JobStatus, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
    ) -> Judgement:
        basis = self._judged_by[case_id(case)]
        golden, source = _golden(basis, have)
        witnesses = replace(
            basis.witnesses,
            golden=golden,
            reference=have.get(references.BF16) if basis.needs_golden else None,
            partner_has_fix=basis.needs_fix(fixes),
            solo=have.get(references.SOLO) if _is_sketched(run) else None,
            partner=have.get(references.PARTNER),
            replay=have.get(references.REPLAY),
        )
        if run.complete:
            witnesses = _with_derived_tolerances(case, _with_model(case, run, witnesses, have), have, run)
        return replace(
            judge(case, run, status, witnesses, self._checks), golden=source, measured=measured(case, run, witnesses)
        )

    def concluded(
        self, case: Case, run: Run, judgement: Judgement, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
    ) -> Judgement:
        """Return the judgement with the first operand that differs and the recorded faults, except those in `fixes`."""
        basis = self._judged_by[case_id(case)]
        explained = _explained(run, judgement, have, basis.witnesses) if run.complete else judgement
        mended = {fix.text for fix in fixes}
        left = tuple(fault for fault in showing(basis.known, case, explained.findings) if fault.fix not in mended)
        return with_doubts(with_known_faults(explained, left, datetime.date.today()), basis.doubts)


def _recorded(run: Run) -> frozenset[str]:
    """Return which of the records that references are for are there."""
    there = {"module_tensors", "model"}
    found = {record for trace in run.traces for record in there if getattr(trace, record) is not None}
    return frozenset(found | ({"sketches"} if _is_sketched(run) else set()))


def _is_sketched(run: Run) -> bool:
    return run.complete and all(trace.sketches is not None for trace in run.traces)


def _golden(basis: JudgedBy, have: RunsByRole) -> tuple[Golden | None, GoldenSource]:
    """Return the stored golden; where there is none, one from the BF16 reference that was run for want of it."""
    if not basis.needs_golden:
        return basis.witnesses.golden, "stored" if basis.witnesses.golden is not None else ""
    reference = finished(have.get(references.BF16))
    if reference is None:
        return None, ""
    name, why = case_id(reference_case(basis.witnesses.expect.case)), "run as a reference: no golden is stored"
    golden = make_golden(reference, family=basis.family, case_id=name, command="", reason=why, commit="unknown")
    return golden, "run here"


_COMPARED = (parity.check_parity.name, module_replay.check_module_replay.name)  # with one rank


def _explained(run: Run, judgement: Judgement, have: RunsByRole, witnesses: Witnesses) -> Judgement:
    """Return the judgement with the first operand that differs, and what explains a wrong gradient or reference."""
    findings, case = judgement.findings, witnesses.expect.case
    with_all, solo = finished(have.get(references.OPERANDS)), finished(have.get(references.SOLO))
    if with_all is not None:
        expect = _with_model(case, run, witnesses, have).expect
        findings = by_cause(
            with_operands(findings, case, run, with_all, has_formulas=expect.has_formulas, numerics=expect.numerics)
        )
    if solo is not None and _is_sketched(run) and any(finding.check in _COMPARED for finding in findings):
        findings = by_cause((*findings, *reference_without_fsdp(case, run, solo)))
    return replace(judgement, findings=findings)


def _with_model(case: Case, run: Run, witnesses: Witnesses, have: RunsByRole) -> Witnesses:
    """Return the references that know the linears of the model: of one that is no Llama its solo reference tells."""
    model, operands = run.traces[0].model, run.traces[0].operands
    solo = finished(have.get(references.SOLO)) if witnesses.expect.model is None and model is not None else None
    reference = None if solo is None else solo.traces[0].model
    if model is None or reference is None:
        return witnesses
    linears = found_model(case, reference, model, () if operands is None else operands.casts)
    expect = Expectations(case, linears, numerics=witnesses.expect.numerics, changes=witnesses.expect.changes)
    return replace(witnesses, expect=expect)


def _parity_tolerance(case: Case, witnesses: Witnesses, have: RunsByRole) -> Tolerance | None:
    """Return the stored tolerance; None if it was measured for another order of forward passes than the target's."""
    stored, solo = witnesses.parity_tolerance, finished(have.get(references.SOLO))
    if stored is None or stored.key != SAME_ORDER or not accumulates(case, witnesses.expect.model):
        return stored
    told = solo is None or solo.traces[0].inputs is not None  # tokens tell which rank a forward pass is for
    return stored if told else None


def _with_derived_tolerances(case: Case, witnesses: Witnesses, have: RunsByRole, run: Run) -> Witnesses:
    """Return the references with derived tolerances where none was measured for cases like this.

    The one of parity only for a run with sketches. Where a run for it did not finish, the checks say so.
    """
    loss, parity_of = witnesses.tolerance, _parity_tolerance(case, witnesses, have)
    witnesses = replace(witnesses, parity_tolerance=parity_of)
    reference = have.get(references.NOISE)
    if reference is None or not reference.complete:
        return replace(witnesses, underived=reference)
    draws = [Run(traces=(draw,), failures=()) for draw in reference.traces[0].draws or ()]
    if parity_of is None and _is_sketched(run):
        parity_of = derived_parity_tolerance(case, reference, draws, witnesses.expect.numerics)
    loss = loss or derived_tolerance(case, reference, draws)
    return replace(witnesses, tolerance=loss, parity_tolerance=parity_of)


class _EvidenceReader:
    """Reads each golden and each tolerance of a project once."""

    def __init__(self, project: Project, plan: Plan, *, profiles: bool) -> None:
        self.root = project.root
        self.plan = plan
        self._profiles = profiles
        self.installed = installed_versions(PACKAGES)
        self.changes = installed_changes()
        self.doubts = doubts(read_verified((project.shipped, project.root)), self.installed)
        self._kept: dict[object, Any] = {}

    def golden(self, case: Case) -> Golden | None:
        return self._once(family_id(case), lambda: find_golden(self.root, self.plan.hardware, family_id(case)))

    def profile(self, case: Case) -> Profile | None:
        if not self._profiles or not needs_profile(case):
            return None
        return self._once(case, lambda: find_profile(self.root, case_id(case)))

    def parity_tolerance(self, case: Case) -> Tolerance | None:
        key = (parity_key(case, self.plan.numerics), case.train.steps)
        return self._once(key, lambda: parity_tolerance_for(case, self.root, self.plan.numerics))

    def tolerance(self, case: Case) -> Tolerance | None:
        key = ("loss", tolerance_key(case), case.train.steps, case.train.valid_tokens, case.checks.loss_tolerance)
        return self._once(key, lambda: tolerance_for(case, self.root))

    def _once(self, key: object, read: Callable[[], Evidence]) -> Evidence | None:
        """Return what `read` returned first under this key; None if nothing is stored."""
        if key not in self._kept:
            self._kept[key] = None
            with contextlib.suppress(Missing, ToleranceMissing):
                self._kept[key] = read()
        kept: Evidence | None = self._kept[key]
        return kept


def prepare_judge(
    project: Project,
    cases: Iterable[Case],
    plan: Plan,
    *,
    profiles: bool = True,
    excuses: bool = True,
    goldens: bool = True,
) -> CaseJudge:
    """Return the judge of these cases, run by this plan.

    `profiles`: it compares with those that are recorded. `excuses`: recorded faults explain failures, but for those
    whose fix the plan injects. `goldens`: as of `CaseJudge`. Raises `HarnessError` for a damaged golden or profile, an
    unfounded tolerance or an unreadable record of known faults.
    """
    cases, known = list(cases), known_here(project) if excuses else ()
    fixes = {fault.fix: parse_injection(fault.fix, folder=project.root) for fault in known if fault.fix is not None}
    injected = {injection.content for injection in plan.injections}
    known = tuple(fault for fault in known if fault.fix is None or fixes[fault.fix].content not in injected)
    judged_by: dict[str, JudgedBy] = {}
    for own, positions in plan.parts(cases):
        evidence = _EvidenceReader(project, own, profiles=profiles)
        judged_by |= {case_id(cases[at]): _judged_by(cases[at], evidence, known, fixes) for at in positions}
    return CaseJudge(judged_by, goldens=goldens)


def known_here(project: Project) -> tuple[KnownFault, ...]:
    """Return the `recorded_faults` of the versions that are installed.

    Raises HarnessError for a record that names a rule no check has.
    """
    installed = installed_versions(PACKAGES)
    faults = recorded_faults(project)
    require_rules(faults)
    return tuple(held for fault in faults if (held := fault.here(installed)) is not None)


def _judged_by(
    case: Case,
    evidence: _EvidenceReader,
    known: tuple[KnownFault, ...],
    fixes: Mapping[str, Injection],
) -> JudgedBy:
    expect = Expectations(case, numerics=evidence.plan.numerics, changes=evidence.changes)
    trains = expect.refusal is None
    stored = evidence.golden(case) if trains else None
    golden = stored if stored is not None and holds_for(evidence.installed, stored.provenance.software) else None
    witnesses = Witnesses(
        expect=expect,
        records=evidence.plan.records_of(case),
        golden=golden,
        profile=evidence.profile(case),
        update_profile=update_profile(case_id(case), root=evidence.root),
        tolerance=evidence.tolerance(case) if trains else None,
        parity_tolerance=evidence.parity_tolerance(case) if trains else None,
    )
    other = expect.relation.partner if expect.relation is not None else None
    faults = matching(known, case)
    return JudgedBy(
        family=family_id(case),
        witnesses=witnesses,
        known=faults,
        fixes=_fixes_of(faults, fixes),
        partner_fixes=() if other is None else _fixes_of(matching(known, other), fixes),
        golden_of_other_build=golden is not stored,
        doubts=evidence.doubts,
    )


def _hides_the_partner(fault: KnownFault, case: Case) -> bool:
    """Return True if a case with this fault cannot be compared with its counterpart before it runs with the fix."""
    is_seen_by_it = any(symptom.check == metamorphic.check_metamorphic.name for symptom in fault.requires)
    return fault.fix is not None and fault.must_show(case) and not is_seen_by_it


def _fixes_of(known: Iterable[KnownFault], fixes: Mapping[str, Injection]) -> tuple[Injection, ...]:
    return tuple(fixes[name] for name in dict.fromkeys(fault.fix for fault in known if fault.fix is not None))
