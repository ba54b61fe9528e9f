"""Resume: is the state that was loaded the one that was saved, every bit of it, in every layout that loaded it?

Steps that follow are judged as those of any run: nothing but the state is handed on.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial

from harness.checks.check import Check, Witnesses
from harness.checks.findings import about_ranks, traces_by_rank
from harness.checks.rule import Rules, Stage
from harness.matrix.case import Case
from harness.matrix.caseid import layout_id, resumed_in
from harness.text import counted
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
    findings = (
        finding for number, layout in enumerate(layouts) for finding in _differences(run, traces, number, layout)
    )
    return list(itertools.islice(findings, 1))


def _differences(run: Run, traces: list[RankTrace], number: int, layout: str) -> Iterator[Finding]:
    resumed = {trace.rank: trace.resumed for trace in traces}
    loaded = {rank: record for rank, record in resumed.items() if record is not None and len(record.loaded) > number}
    if len(loaded) < len(traces):
        without = NOT_LOADED.finding(layout=layout, expected="the state that was saved", found="none")
        yield about_ranks(without, resumed.keys() - loaded.keys(), run)
        return
    wrong = {rank: names for rank, record in loaded.items() if (names := _other_names(record, number))}
    if wrong:
        rank = min(wrong)
        first = wrong[rank][0]
        of_ranks = [rank for rank, record in loaded.items() if first in {*itertools.chain(*record.wrong[number:][:1])}]
        yield about_ranks(_finding(loaded[rank], number, layout, wrong[rank]), of_ranks or wrong, run)


def _other_names(resumed: Resumed, number: int) -> list[str]:
    """What was saved and was loaded with another value, or in vain, or only loaded."""
    saved, loaded = resumed.saved, resumed.loaded[number]
    return [name for name in sorted(saved.keys() | loaded.keys()) if saved.get(name) != loaded.get(name)]


def _finding(resumed: Resumed, number: int, layout: str, wrong: list[str]) -> Finding:
    first = wrong[0]
    parts = Counter(name.partition(" ")[2] for name in wrong)
    words = ", ".join(
        f"{part} of {counted(count, 'parameter')}" if part else f"the values of {counted(count, 'parameter')}"
        for part, count in parts.items()
    )
    fqn, _, part = first.partition(" ")
    return OTHER_STATE.finding(
        layout=layout,
        parts=words,
        what=part or "the values",
        step=resumed.after_step + 1,
        module=fqn,
        expected=resumed.saved.get(first, "nothing"),
        found=resumed.loaded[number].get(first, "nothing"),
    )
