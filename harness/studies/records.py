"""Records that are made of runs and stored with the cases: goldens, profiles, verified formulas, costs of cases.

Chooses the runs, and refuses unsound ones: a fault must not become what later runs are compared with. Stores nothing:
the caller does, with `evidence/`.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.checks.catalogue import BROKEN, CHECKS
from harness.checks.check import Witnesses
from harness.checks.fp8_on import check_alignment, check_fp8_on, check_matmuls
from harness.checks.judge import Judgement, judge
from harness.checks.reported import check_finite
from harness.engine.hardware import arithmetic_limits, cpu_extensions, cpu_name
from harness.engine.messages import JobStatus
from harness.errors import HarnessError
from harness.evidence.costs import Costs, case_features, solo_features
from harness.evidence.golden import Golden, make_golden, source_commit
from harness.evidence.profile import Profile, load_profile, make_profile
from harness.evidence.references import RunsByRole
from harness.evidence.sealed import stored_or_why
from harness.expect.expectations import FORMULAS, Expectations
from harness.hints import fit_costs as fit_costs_command
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, family_id, parse_case_id, reference_case
from harness.matrix.rules import expected_refusal
from harness.project import Project
from harness.result import CaseResult, RunResult
from harness.running.case_judge import prepare_judge
from harness.running.case_runner import NONE, Judge, Judged
from harness.running.identity import check_targets
from harness.running.plan import Injection, Plan
from harness.running.progress import Progress
from harness.running.stored import read_results
from harness.text import timestamp
from harness.trace import Run
from harness.verdict import Verdict
from harness.workflow import check_fits, run_cases

_SANITY = (check_finite, check_fp8_on, check_alignment, check_matmuls)
_FEWEST = 30  # runs below which no costs are fitted: there are more than a dozen features
_SOLO = "solo "


class References(msgspec.Struct, frozen=True, kw_only=True):
    """The new goldens, and the results of the references that failed."""

    goldens: tuple[Golden, ...] = ()
    failed: tuple[CaseResult, ...] = ()
    interrupted: bool = False

    def and_also(self, later: "References") -> "References":
        """Return these and those of another device."""
        goldens, failed = (*self.goldens, *later.goldens), (*self.failed, *later.failed)
        return References(goldens=goldens, failed=failed, interrupted=later.interrupted)


class SanityJudge(Judge):
    """Judges a run by itself, compared with nothing: complete, finite, FP8 exactly where requested."""

    def judge(
        self, case: Case, run: Run, status: JobStatus, have: RunsByRole = NONE, fixes: Sequence[Injection] = ()
    ) -> Judgement:
        """Pass runs that may become a golden or a noise sample."""
        return judge(case, run, status, Witnesses(expect=Expectations(case)), checks=_SANITY)


def needed_references(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return the reference cases of these cases, one per family. Cases with an expected refusal need none."""
    training = (case for case in cases if expected_refusal(case) is None)
    return tuple({family_id(case): reference_case(case) for case in training}.values())


def make_goldens(
    project: Project, references: Sequence[Case], plan: Plan, progress: Progress, *, reason: str, command: str
) -> References:
    """Run the reference cases and return their goldens. Stores nothing."""
    result = run_cases(project, references, plan, SanityJudge(), progress)
    commit = source_commit(project.root)
    passed = (of for of in result.results if of.verdict is Verdict.PASSED)
    failed = tuple(of for of in result.results if of.verdict is not Verdict.PASSED)
    goldens = tuple(_golden(of, reason=reason, command=command, commit=commit) for of in passed)
    return References(goldens=goldens, failed=failed, interrupted=result.end.interrupted)


def _golden(result: CaseResult, *, reason: str, command: str, commit: str) -> Golden:
    assert result.run is not None, "a case that passed has a run"
    family = family_id(parse_case_id(result.case_id))
    made = make_golden(result.run, family=family, case_id=result.case_id, command=command, reason=reason, commit=commit)
    on_cpu = {"cpu": cpu_extensions(), "limits": arithmetic_limits()} if made.provenance.device == "cpu" else {}
    return msgspec.structs.replace(made, provenance=msgspec.structs.replace(made.provenance, **on_cpu))


class ProfileChange(msgspec.Struct, frozen=True, kw_only=True):
    """A new profile and the one that it replaces. `old_error` says why an existing file could not be read."""

    new: Profile
    old: Profile | None
    old_error: str = ""


class Profiles(msgspec.Struct, frozen=True, kw_only=True):
    """The new profiles in the order of the cases, and the results of the cases of which none was made."""

    changes: tuple[ProfileChange, ...]
    failed: tuple[CaseResult, ...]
    interrupted: bool


def record_profiles(
    project: Project, cases: Sequence[Case], plan: Plan, progress: Progress, *, reason: str, command: str
) -> Profiles:
    """Run the cases and return their profiles with the stored ones.

    The verdict is invariant for a run that passes every other check and of which no profile can be made. Of a case
    with a recorded fault its run with the fix is recorded.
    """
    plan = plan.on_cpu
    check_fits(cases, plan)
    check_targets((case.target for case in cases), project.root)
    provenance = {"command": command, "reason": reason, "commit": source_commit(project.root)}
    made: dict[str, Profile] = {}

    def review(judged: Judged) -> Judgement:
        if judged.judgement.verdict is not Verdict.PASSED:
            return judged.judgement
        name = case_id(judged.case)
        try:
            made[name] = make_profile(judged.run, case_id=name, **provenance)
        except HarnessError as error:
            finding = BROKEN.finding(error=f"{error.what} Fix: {error.fix}")
            return msgspec.structs.replace(judged.judgement, verdict=finding.verdict, findings=(finding,))
        return judged.judgement

    judge = prepare_judge(project, cases, plan, profiles=False)
    result = run_cases(project, cases, plan, judge, progress, review=review)
    return Profiles(
        changes=tuple(_change(project, made[of.case_id]) for of in result.results if of.case_id in made),
        failed=tuple(of for of in result.results if of.case_id not in made),
        interrupted=result.end.interrupted,
    )


def _change(project: Project, new: Profile) -> ProfileChange:
    old, why = stored_or_why(lambda: load_profile(project.root, new.case_id))
    return ProfileChange(new=new, old=old, old_error=why)


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What clean runs said of the formulas. Cases that failed in another way say nothing of them."""

    compared: Mapping[str, int]  # by formula, in how many cases it was compared
    contradicted: Mapping[str, tuple[str, ...]]  # by formula, the ids of the cases that disagree with it
    failed: tuple[CaseResult, ...]  # not good, and not only changed

    @property
    def verified(self) -> dict[str, int]:
        """Return the formulas that were compared and never contradicted, each with the number of cases."""
        return {name: count for name, count in self.compared.items() if count and not self.contradicted[name]}

    @property
    def complete(self) -> bool:
        """Return True if every formula is verified and no case failed."""
        return not self.failed and set(self.verified) == set(FORMULAS)


def verification(run: RunResult) -> Verification:
    judged = [result for result in run.results if result.verdict is not Verdict.KNOWN]
    broken = {result.case_id: {finding.formula for finding in result.findings} for result in judged}
    return Verification(
        compared={formula: sum(_compares(result, formula) for result in run.results) for formula in FORMULAS},
        contradicted={of: tuple(name for name, formulas in broken.items() if of in formulas) for of in FORMULAS},
        failed=tuple(of for of in run.results if not of.verdict.good and of.verdict is not Verdict.CHANGED),
    )


def _compares(result: CaseResult, formula: str) -> bool:
    if result.verdict is Verdict.KNOWN:
        checks = result.with_fix.checks if result.with_fix is not None else ()
    else:
        checks = result.checks if result.verdict in (Verdict.PASSED, Verdict.CHANGED) else ()
    return any(check.formula == formula and check.name in checks for check in CHECKS)


def fit_costs(file: Path, *, command: str) -> Costs:
    """Return the costs that the results in a file show. HarnessError if it holds too few runs."""
    run = read_results(file)
    # a case that is known has run twice where its fault has a fix
    passed = [result for result in run.results if result.verdict is Verdict.PASSED]
    trained = ((parse_case_id(result.case_id), result.cpu_s) for result in passed)
    measured = [(case_features(case), cpu_s) for case, cpu_s in trained if expected_refusal(case) is None]
    solos = [
        (solo_features(parse_case_id(name)), witness.cpu_s)
        for witness in run.end.references
        if witness.ran and witness.name.startswith(_SOLO) and " " not in (name := witness.name.removeprefix(_SOLO))
    ]
    if len(measured) < _FEWEST or len(solos) < _FEWEST:
        what = f"holds {len(measured)} runs and {len(solos)} single-rank references; {_FEWEST} of each are needed."
        raise HarnessError(what, where=str(file), fix=f"run tier pr with an empty cache: `{fit_costs_command()}`.")
    weights, error = _fitted(measured)
    return Costs(
        case=weights,
        solo=_fitted(solos)[0],
        cases_fitted=len(measured),
        witnesses_fitted=len(solos),
        typical_error=round(error, 3),
        software={name: version for name, version in run.end.provenance.items() if name in ("torch", "torchao")},
        cpu=cpu_name(),
        command=command,
        created=timestamp(),
    )


def _fitted(samples: Sequence[tuple[Mapping[str, float], float]]) -> tuple[dict[str, float], float]:
    """Weights by feature, none negative, and the median relative error. Small costs count as much as large ones."""
    import numpy as np

    names = list(samples[0][0])
    table: Any = np.array([[features[name] for name in names] for features, _ in samples])
    measured: Any = np.array([cpu_s for _, cpu_s in samples])
    importance = 1 / np.sqrt(np.maximum(measured, 0.1))
    kept = list(range(len(names)))
    while True:
        weights, *_ = np.linalg.lstsq(table[:, kept] * importance[:, None], measured * importance, rcond=None)
        if (weights >= 0).all():
            break
        kept = [index for index, weight in zip(kept, weights, strict=True) if weight > 0]
    errors = np.abs(table[:, kept] @ weights / measured - 1)
    by_name = {names[index]: round(float(weight), 4) for index, weight in zip(kept, weights, strict=True)}
    return by_name, float(np.median(errors))
