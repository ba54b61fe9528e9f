"""Is the model called with the tokens that `step` was given, and does a resumed run go on from what was saved?

The integer tensors of every forward of the whole model are looked at. A target that trains its single-rank reference on
wrong tokens too would show in no number. Steps that follow a resumption are checked as those of any run: nothing but
the state is handed on.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from harness.checks.check import Rule, Rules, Stage, Witnesses, about_ranks, finished
from harness.matrix.case import Case
from harness.matrix.caseid import layout_id, resumed_in
from harness.matrix.layout import batch_of, peers
from harness.promises import Limit
from harness.text import counted, format_ranks
from harness.trace import RankTrace, Run
from harness.trace.model import Resumed, StepInputs
from harness.verdict import Finding, Value

# A model may get its tokens in a form that is not recognized: packed, with special tokens, every tensor-parallel rank a
# piece. Their neighbors are still neighbors.
_COVERED = Limit("tokens.covered")


_OWN = (
    "train on all microbatches that step() gets: they are already the part of this rank, so add no data loader, "
    "sampler or slice."
)

_rule = Rules("tokens", Stage.DATA)
LABELS = _rule(
    "labels",
    "{who}: the model is called with the labels (tokens shifted by one)",
    fix="call the model with `batch[:, :-1]`, and compare its logits with `batch[:, 1:]`.",
)
OTHER_RANK = _rule("other-rank", "{who}: the model is called with tokens of another data-parallel rank", fix=_OWN)
SOME = _rule("some", "{who}: the model is called with {got} of {wanted} sequences only", fix=_OWN)
FOREIGN = _rule("foreign", "{who}: the model is called with tokens that are not in this step's batch", fix=_OWN)


_Wrong = tuple[Rule, str, str, int, int]  # what was expected and found, and the sequences that it got and wanted


@_rule.judged_by(
    blind="A model that is called in parts, or compiled whole; tokens in a form that is not recognized.",
    unasked="inputs",
    absent="the model is not called as a whole",
)
def check_tokens(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is the model called with the tokens that `step` was given, and every rank with its own part of them?"""
    solo = finished(witnesses.solo)
    whole = range(case.train.global_batch)
    of_reference = [] if solo is None else _of_ranks([(solo.traces[0], whole)], {}, "the single-rank reference")
    firsts = ((trace, batch_of(case.layout, trace.rank) * case.local_batch) for trace in run.by_rank)
    parts = [(trace, range(first, first + case.local_batch)) for trace, first in firsts]
    return [*_of_ranks(parts, _covered(case, run)), *of_reference]


def _covered(case: Case, run: Run) -> dict[tuple[int, int], float]:
    """By rank and step: how much of its tokens a rank gets together with its tensor-parallel peers."""
    own = {(trace.rank, given.step): given.covered for trace in run.traces for given in trace.inputs or ()}
    return {
        (rank, step): sum(own.get((peer, step), 0.0) for peer in peers(case.layout, rank, ("tp",)))
        for rank, step in own
    }


def _of_ranks(
    parts: Iterable[tuple[RankTrace, range]], covered: dict[tuple[int, int], float], who: str = ""
) -> list[Finding]:
    wrong: dict[tuple[int, _Wrong], list[int]] = {}
    for trace, part in parts:
        for step_inputs in trace.inputs or ():
            problem = _wrong(step_inputs, part, covered.get((trace.rank, step_inputs.step), step_inputs.covered))
            if problem is not None:
                wrong.setdefault((step_inputs.step, problem), []).append(trace.rank)
    if not wrong:
        return []
    first = min(step for step, _ in wrong)
    return [
        rule.finding(
            step=step,
            ranks=() if who else ranks,
            expected=expected,
            found=found,
            values={"who": who or format_ranks(ranks), "got": got, "wanted": wanted},
        )
        for (step, (rule, expected, found, got, wanted)), ranks in wrong.items()
        if step == first
    ]


def _wrong(step_inputs: StepInputs, part: range, covered: float) -> _Wrong | None:
    """Return what is wrong with the inputs of one rank in one step; None for a form that is not recognized, too."""
    missing, foreign = set(part) - set(step_inputs.inputs), sorted(set(step_inputs.inputs) - set(part))
    expected = f"sequences {_spelled(part)} of the global batch"
    counts = len(part) - len(missing), len(part)
    if missing and missing <= set(step_inputs.labels):
        return LABELS, expected, "labels", *counts
    if foreign:
        return OTHER_RANK, expected, f"sequences {_spelled(step_inputs.inputs)}", *counts
    if missing and len(missing) < len(part):
        return SOME, expected, f"sequences {_spelled(step_inputs.inputs)}", *counts
    if missing and covered < _COVERED:
        shapes = ", ".join(f"{list(shape)}" for shape in dict.fromkeys(step_inputs.shapes))
        return FOREIGN, expected, f"tokens of none of them, in tensors {shapes}", *counts
    return None


def _spelled(sequences: Iterable[int]) -> str:
    return format_ranks(sequences).removeprefix("ranks ").removeprefix("rank ")


_resume = Rules("resume", Stage.DATA, only={"a damaged trace": "not-loaded"})
NOT_LOADED = _resume("not-loaded", "no state was loaded by {layout}", key=("layout",))
OTHER_STATE = _resume(
    "state",
    "the state that {layout} loaded differs from the saved state: {parts}; first {what} of {module}",
    key=("what",),
)


@_resume.judged_by(
    blind="State outside of model and optimizer, such as a data loader's.",
    not_judged=lambda expect, device: "the run is not resumed" if expect.case.train.resume == "none" else "",
)
def check_resume(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is the state that was loaded the one that was saved, every bit of it, in every layout that loaded it?"""
    layouts = [layout_id(other.layout) for other in resumed_in(case)]
    traces = run.by_rank
    found = (_differences(run, traces, number, layout) for number, layout in enumerate(layouts))
    return list(itertools.islice(itertools.chain.from_iterable(found), 1))


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
        yield about_ranks(_other_state(loaded[rank], number, layout, wrong[rank]), of_ranks or wrong, run)


def _other_names(resumed: Resumed, number: int) -> list[str]:
    """Return what was saved and was loaded with another value, or in vain, or only loaded."""
    saved, loaded = resumed.saved, resumed.loaded[number]
    return [name for name in sorted(saved.keys() | loaded.keys()) if saved.get(name) != loaded.get(name)]


def _other_state(resumed: Resumed, number: int, layout: str, wrong: list[str]) -> Finding:
    first, parts = wrong[0], Counter(name.partition(" ")[2] or "the values" for name in wrong)
    words = ", ".join(f"{part} of {counted(count, 'parameter')}" for part, count in parts.items())
    fqn, _, part = first.partition(" ")
    values: dict[str, Value] = {"layout": layout, "parts": words, "what": part or "the values"}
    expected, found = (state.get(first, "nothing") for state in (resumed.saved, resumed.loaded[number]))
    return OTHER_STATE.finding(step=resumed.after_step + 1, module=fqn, expected=expected, found=found, values=values)
