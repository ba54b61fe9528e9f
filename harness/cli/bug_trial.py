"""The one run of a case that commands about a bug begin with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.matrix.case import Case
    from harness.project import Project
    from harness.result import CaseResult
    from harness.running.injection import Injection
    from harness.running.plan import Plan


def run_once(project: Project, case: Case, plan: Plan, injections: Sequence[Injection], *, quiet: bool) -> CaseResult:
    """The result of the case with these injections, without what recorded faults explain."""
    from harness.bugs.trials import open_trials
    from harness.running.progress import open_progress

    with (
        open_progress(quiet=quiet) as progress,
        open_trials(project, plan, progress, case, injections) as trials,
    ):
        (result,) = trials.run([case])
    return result
