"""History: how a case ended and what it measured, run after run, and what changed together with what.

On a CPU every number but the seconds repeats exactly, so a number that changes in one environment is a finding. Flaky
is what ended differently in one environment: retries say nothing about that, so they are not looked at.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from harness.checks.measuring import moved
from harness.result import CaseNumbers, Environment, Numbers
from harness.running.stored import Stored
from harness.store import RunStore
from harness.verdict import Verdict


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A case in one run. `moved` names the exact numbers that changed since the last run of the same environment."""

    run: Stored
    case: CaseNumbers
    changes: tuple[str, ...]  # of the environment since the run before
    moved: tuple[str, ...] = ()
    repeats: bool = False  # False: there is no such run, so since the run before


class History(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a case, the oldest first."""

    case_id: str
    moments: tuple[Moment, ...]

    @property
    def verdicts(self) -> Mapping[Verdict, int]:
        return Counter(moment.case.verdict for moment in self.moments)

    @property
    def is_flaky(self) -> bool:
        """True when two runs in one environment ended differently. A machine that fails says nothing of the case."""
        by_environment: dict[str, set[Verdict]] = defaultdict(set)
        for moment in self.moments:
            environment = moment.run.start.environment
            if environment is not None and moment.case.verdict is not Verdict.INFRA:
                by_environment[environment.fingerprint].add(moment.case.verdict)
        return any(len(verdicts) > 1 for verdicts in by_environment.values())

    @property
    def is_nondeterministic(self) -> bool:
        """True when an exact number changed between two runs in one environment."""
        return any(moment.moved and moment.repeats for moment in self.moments)

    @property
    def last_change(self) -> Moment | None:
        """The last run in which the verdict or an exact number was another than before; None where there is none."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        changed = [now for before, now in pairs if now.moved or now.case.verdict is not before.case.verdict]
        return changed[-1] if changed else None


def histories(runs: Sequence[Stored], wanted: Callable[[str], bool], *, most: int | None = None) -> tuple[History, ...]:
    """The history of every wanted case in these runs, which come oldest first; of each case `most` of the last runs."""
    by_case: dict[str, list[tuple[Stored, CaseNumbers]]] = defaultdict(list)
    for run in runs:
        for case_id, case in RunStore(run.path).numbers(wanted).items():
            by_case[case_id].append((run, case))
    last = slice(None if most is None else -most, None)
    return tuple(History(case_id=case_id, moments=tuple(_moments(pairs[last]))) for case_id, pairs in by_case.items())


def _moments(pairs: Iterable[tuple[Stored, CaseNumbers]]) -> Iterable[Moment]:
    last: dict[str, Numbers] = {}  # by fingerprint
    before: tuple[Environment, Numbers | None] | None = None
    for run, case in pairs:
        now = run.start.environment
        if now is None:
            yield Moment(run=run, case=case, changes=())
            continue
        same = last.get(now.fingerprint)
        earlier = same or (before[1] if before is not None else None)
        yield Moment(
            run=run,
            case=case,
            changes=before[0].differences(now) if before is not None else (),
            moved=moved(earlier, case.measured, counts_only=now.device != "cpu"),
            repeats=same is not None,
        )
        if case.measured is not None:
            last[now.fingerprint] = case.measured
        before = now, case.measured or (before[1] if before is not None else None)
