"""Resume: is the state that was loaded the one that was saved, every bit of it, in every layout that loaded it?

Steps that follow are judged as those of any run: nothing but the state is handed on.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial

from harness.checks.check import Check, Witnesses
from harness.checks.findings import traces_by_rank
from harness.checks.rule import Rules, Stage
from harness.matrix.case import Case
from harness.matrix.caseid import layout_id
from harness.matrix.resumed import resumed_in
from harness.plural import counted
from harness.trace import RankTrace, Run
from harness.trace.model import Resumed
from harness.verdict import Finding

_rule = Rules("resume", Stage.DATA)
NOT_LOADED = _rule("not-loaded", "no state was loaded by {layout}", key=("layout",))
OTHER_STATE = _rule(
    "state",
    "the state that {layout} loaded is not the one that was saved: {parts}; first {what} of {module}",
    key=("what",),
)


@partial(
    Check,
    declares=_rule,
    blind="State outside of model and optimizer, such as a data loader's.",
    not_judged=lambda expect, device: "the run is not resumed" if expect.case.train.resume == "none" else "",
)
def check_resume(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is the state that was loaded the one that was saved, every bit of it, in every layout that loaded it?"""
    layouts = [layout_id(other.layout) for other in resumed_in(case)]
    traces = traces_by_rank(run)
    found = (
        finding
        for number, layout in enumerate(layouts)
        for trace in traces
        for finding in _differences(trace, number, layout)
    )
    return list(itertools.islice(found, 1))


def _differences(trace: RankTrace, number: int, layout: str) -> Iterator[Finding]:
    resumed = trace.resumed
    if resumed is None or len(resumed.loaded) <= number:
        yield NOT_LOADED.finding(layout=layout, rank=trace.rank, expected="the state that was saved", found="none")
        return
    saved, loaded = resumed.saved, resumed.loaded[number]
    wrong = [name for name in sorted(saved.keys() | loaded.keys()) if saved.get(name) != loaded.get(name)]
    if wrong:
        yield _finding(trace.rank, resumed, number, layout, wrong)


def _finding(rank: int, resumed: Resumed, number: int, layout: str, wrong: list[str]) -> Finding:
    first = wrong[0]
    whats = Counter(name.partition(" ")[2] for name in wrong)
    words = ", ".join(
        f"{what} of {counted(count, 'parameter')}" if what else f"the values of {counted(count, 'parameter')}"
        for what, count in whats.items()
    )
    fqn, _, what = first.partition(" ")
    return OTHER_STATE.finding(
        layout=layout,
        parts=words,
        what=what or "the values",
        step=resumed.after_step + 1,
        rank=rank,
        module=fqn,
        expected=resumed.saved.get(first, "nothing"),
        found=resumed.loaded[number].get(first, "nothing"),
    )
