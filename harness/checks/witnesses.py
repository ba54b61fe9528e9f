"""The evidence that a check may use besides the case and its run: expectations, goldens, signatures, reference runs.

`running/` collects it before the ranks start.
"""

from __future__ import annotations

import msgspec

from harness.checks.rule import Rule
from harness.checks.stacks import innermost_calls
from harness.evidence.golden import Golden
from harness.evidence.signature import Signature
from harness.evidence.tolerance import Tolerance
from harness.expect.expectations import Expectations
from harness.sentence import format_ranks
from harness.trace import Run
from harness.verdict import Finding


class Witnesses(msgspec.Struct, frozen=True, kw_only=True):
    """What one case is judged by. None: not available, which is a finding of the check that needs it.

    A run that did not finish is kept with its failures, so that this finding says why.
    """

    expect: Expectations
    records: tuple[str, ...] = ()  # the fields of `RankTrace` that the ranks were asked to fill
    golden: Golden | None = None
    signature: Signature | None = None
    update_signature: str = ""  # the command that records one
    tolerance: Tolerance | None = None
    parity_tolerance: Tolerance | None = None
    reference: Run | None = None  # the BF16 reference that was run for want of a golden
    underived: Run | None = None  # the first BF16 run for a derived tolerance that did not finish
    solo: Run | None = None  # the run of the solo witness, the single-rank reference with the same recipe
    replay: Run | None = None  # this very run again, module by module on one rank
    partner: Run | None = None  # the run of `expect.relation.partner`
    partner_has_fix: bool = False  # partner and signature are of a run with the candidate fix, as the second run is


_CALLS = 3  # of the traceback of a witness that raised


def finished(run: Run | None) -> Run | None:
    """The run; None where it did not finish."""
    return run if run is not None and run.complete else None


def why_unfinished(run: Run | None) -> str:
    """Why a run did not finish, as the end of a sentence: ": TypeError: ..."; empty where nothing is known of it."""
    causes = () if run is None else run.causes or run.failures
    return f": {causes[0].message.partition(chr(10))[0]}" if causes else ""


def unfinished(rule: Rule, who: str, run: Run | None, case_run: Run) -> Finding:
    """The finding of a check that cannot compare `case_run` with a run of `who`, with the calls that it ended in."""
    return rule.finding(who=who, why=why_unfinished(run), expected=f"a run of {who}", found=_ending(run, case_run))


def _ending(run: Run | None, case_run: Run) -> str | None:
    """Which rank ended how, in which calls, and with which versions."""
    causes = () if run is None else run.causes or run.failures
    if not causes:
        return None
    first = causes[0]
    phase = f" in {first.phase}" if first.phase else ""
    calls = [f"  {'in' if not place else 'called from'} {call}" for place, call in enumerate(_calls(first.traceback))]
    software = case_run.traces[0].software if case_run.traces else {}
    versions = ", ".join(f"{name} {software[name]}" for name in ("torch", "torchao") if name in software)
    ended = f"{format_ranks([first.rank])} {first.kind}{phase}" + (f", with {versions}" if versions else "")
    return "\n".join([ended, *calls])


def _calls(traceback: str) -> tuple[str, ...]:
    return tuple(map(str, innermost_calls(traceback, _CALLS)))
