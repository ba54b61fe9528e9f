"""Did the compiler make of the blocks what the case asks for? Graphs, fused collectives, and what fused operators did.

Async TP that fuses nothing is slow and silent, and a fused operator that is wrong is fast and silent. So the executed
fusions are counted against `spec/fusion.py`, and every fused operator was repeated in its unfused form while it ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from harness.checks.ranks import by_value, rank_names
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.spec.fusion import joints
from harness.trace import RankTrace, Run
from harness.trace.graphs import Collective, FusedCall, FusedNode, GraphTrace, Phase
from harness.verdict import Finding, Verdict

NAME = "graphs"


class Kind(NamedTuple):
    """What fused operators are counted by."""

    phase: Phase
    collective: Collective

    def __str__(self) -> str:
        return f"{self.collective.replace('_', '-')}s fused with matmuls in {self.phase}"


class _Words(NamedTuple):
    message: str
    expected: str
    found: str
    step: int | None = None
    verdict: Verdict = Verdict.INVARIANT


def check_graphs(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """One finding for every rule that is broken; ranks on which it is broken alike share it."""
    del witnesses  # the rules follow from the case alone
    return [
        Finding(
            check=NAME,
            message=f"{words.message} on {rank_names(ranks)}",
            verdict=words.verdict,
            step=words.step,
            rank=ranks[0],
            expected=words.expected,
            found=words.found,
        )
        for group, ranks in by_value(run, lambda trace: tuple(_broken(case, trace))).items()
        for words in group
    ]


def expected_fusions(case: Case) -> Counter[Kind]:
    """How often one rank executes fused operators in one step."""
    return Counter(Kind(joint.phase, joint.collective) for joint in joints(case) if joint.fuses)


def _broken(case: Case, trace: RankTrace) -> Iterator[_Words]:
    recorded = trace.graphs
    if recorded is None or not recorded.graphs:
        yield _Words("the case asks for compiled blocks and no graph was compiled", "graphs of every block", "none")
        return
    yield from _phases(recorded)
    yield from _nodes(recorded)
    yield from _fusions(case, recorded)
    yield from _rows(recorded)


def _phases(recorded: GraphTrace) -> Iterator[_Words]:
    phases = Counter(graph.phase for graph in recorded.graphs)
    if phases["forward"] != phases["backward"]:
        counts = f"{phases['forward']} forward, {phases['backward']} backward"
        yield _Words("forward and backward graphs do not pair up", "a backward graph for every forward graph", counts)


def _nodes(recorded: GraphTrace) -> Iterator[_Words]:
    """Shapes and groups of fused operators, as they stand in the graphs."""
    for node in dict.fromkeys(node for graph in recorded.graphs for node in graph.fused):
        if node.axis != "tp":
            yield _Words(f"{node.operator} works on the wrong ranks", "the axis tp", node.axis)
        if not _scale_fits(node):
            shapes = f"A {list(node.a_shape)}, A_scale {list(node.a_scale_shape or ())}"
            yield _Words(
                f"{node.operator} gets a scale that does not belong to the shape of its operand",
                "leading dims of A_scale are those of A, or one scale for all",
                shapes,
            )


def _scale_fits(node: FusedNode) -> bool:
    """A scale for the tensor, or one for every row of A."""
    scale = node.a_scale_shape
    if scale is None or all(size == 1 for size in scale):
        return True
    return scale[-1] == 1 and scale[:-1] == node.a_shape[:-1]


def _fusions(case: Case, recorded: GraphTrace) -> Iterator[_Words]:
    """As many fused operators as the case must have, in every step. Nothing at all is said in plain words."""
    expected = expected_fusions(case)
    by_step = {step: _executed(recorded, step) for step in range(1, case.train.steps + 1)}
    if case.layout.async_tp and not any(by_step.values()):
        wanted = f"{expected.total()} fused collectives a step" if expected else "fused collectives"
        yield _Words("async TP was asked for and nothing was fused", wanted, _reasons(recorded), step=1)
        return
    for kind in sorted({*expected, *(kind for found in by_step.values() for kind in found)}):
        step = next((step for step, found in by_step.items() if found[kind] != expected[kind]), None)
        if step is not None:
            less = by_step[step][kind] < expected[kind]
            why = f"; left alone: {_reasons(recorded, kind)}" if less else ""
            yield _Words(
                f"wrong number of {kind}", f"{expected[kind]} a step", f"{by_step[step][kind]}{why}", step=step
            )


def _executed(recorded: GraphTrace, step: int) -> Counter[Kind]:
    counts: Counter[Kind] = Counter()
    for call in recorded.calls:
        if call.step == step:
            counts[Kind(call.phase, call.collective)] += call.times
    return counts


def _reasons(recorded: GraphTrace, kind: Kind | None = None) -> str:
    """Why collectives of the TP axis were not fused, with how many of each reason."""
    counts = Counter(
        f"{left.collective} of {left.dtype} {list(left.shape)}: {left.reason}"
        for graph in recorded.graphs
        for left in graph.unfused
        if left.axis == "tp" and (kind is None or (graph.phase, left.collective) == kind)
    )
    return "; ".join(f"{count} x {reason}" for reason, count in counts.items()) or "the graphs hold no such collective"


def _rows(recorded: GraphTrace) -> Iterator[_Words]:
    """Every row that a fused operator gave must be the one that its unfused form gives."""
    wrong: dict[str, list[FusedCall]] = {}
    for call in recorded.calls:
        if call.wrong_rows:
            wrong.setdefault(call.operator, []).append(call)
    for operator, calls in wrong.items():
        rows, of = sum(call.wrong_rows for call in calls), sum(call.rows for call in calls)
        yield _Words(
            f"{operator} gives other rows than a matmul and a collective do: {rows} of {of}",
            "the rows of its unfused form, up to rounding",
            _example(calls[0]),
            step=calls[0].step,
            verdict=Verdict.NUMERIC,
        )


def _example(call: FusedCall) -> str:
    row = call.example
    assert row is not None, "a call with wrong rows has an example"
    where = f"in {call.phase}, row {list(row.index)} of this rank"
    if row.holds_index is None:
        return f"{where} is {row.distance:.2g} of its norm away, and is no other row either"
    return f"{where} holds what belongs into row {list(row.holds_index)} of TP rank {row.holds_rank}"
