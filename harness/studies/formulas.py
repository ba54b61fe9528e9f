"""Verifies the formulas of `expect/` on this environment: clean runs, compared with every formula.

Does not store what it finds: the caller does, with `evidence/formulas.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness.checks.catalogue import CHECKS
from harness.evidence.formulas import VerifiedWith, base_version
from harness.evidence.golden import provenance_of
from harness.evidence.tree import source_commit
from harness.expect.expectations import FORMULAS
from harness.project import Project
from harness.result import CaseResult, RunResult
from harness.verdict import Finding, Verdict


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What clean runs said of the formulas. Cases that failed in another way say nothing of them."""

    compared: Mapping[str, int]  # by formula, in how many cases it was compared
    contradicted: Mapping[str, tuple[str, ...]]  # by formula, the ids of the cases that disagree with it
    failed: tuple[CaseResult, ...]  # not good, and not only changed

    @property
    def verified(self) -> dict[str, int]:
        """The formulas that were compared and never contradicted, each with the number of cases."""
        return {name: count for name, count in self.compared.items() if count and not self.contradicted[name]}

    @property
    def complete(self) -> bool:
        """True when every formula is verified and no case failed."""
        return not self.failed and set(self.verified) == set(FORMULAS)


def verification(run: RunResult) -> Verification:
    """What the results of a run say of every formula."""
    contradicted = {
        formula: tuple(
            result.case_id for result in run.results if any(each.formula == formula for each in _unexplained(result))
        )
        for formula in FORMULAS
    }
    return Verification(
        compared={formula: sum(_compares(result, formula) for result in run.results) for formula in FORMULAS},
        contradicted=contradicted,
        failed=tuple(each for each in run.results if not each.verdict.good and each.verdict is not Verdict.CHANGED),
    )


def _unexplained(result: CaseResult) -> tuple[Finding, ...]:
    """The findings of a case; none where a recorded fault explains them and its fix mends it."""
    return result.findings if result.verdict is not Verdict.KNOWN else ()


def _compares(result: CaseResult, formula: str) -> bool:
    """True when a formula was compared with a clean run of this case: of a recorded fault, with that of its fix."""
    if result.verdict is Verdict.KNOWN:
        checks = result.with_fix.checks if result.with_fix is not None else ()
    else:
        checks = result.checks if result.verdict in (Verdict.PASSED, Verdict.CHANGED) else ()
    return any(check.formula == formula and check.name in checks for check in CHECKS)


def verified_with(project: Project, run: RunResult, *, reason: str, command: str) -> VerifiedWith:
    """The record of what a run verified, with the versions that its ranks reported."""
    traces = (trace for result in run.results if result.run is not None for trace in result.run.traces)
    provenance = provenance_of(next(traces), command=command, reason=reason, commit=source_commit(project.root))
    return VerifiedWith(
        torch=base_version(provenance.software["torch"]),
        torchao=base_version(provenance.software["torchao"]),
        cases=verification(run).verified,
        provenance=provenance,
    )
