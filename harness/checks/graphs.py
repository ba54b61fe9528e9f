"""Were the blocks compiled as the case asks? Graphs, fused collectives, and the results of fused operators.

Async TP that fuses nothing is slow without an error, and a wrong fused operator is fast without an error. So executed
fusions are counted against `matrix/dims/tp.py`, and the probe compares every fused operator with its unfused form, and
all that inductor generates code for with the operators of the graph (`expect/module_replay.py` has the limits).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.checks.check import Rules, Stage, Witnesses, merge_ranks
from harness.checks.comparison import Compared, first_wrong
from harness.expect.expectations import FUSION, Expectations
from harness.expect.module_replay import allowed_in_code, allowed_row, reduced_distance
from harness.matrix.case import Case
from harness.matrix.dims.tp import fusion_candidates
from harness.matrix.layout import coordinates
from harness.matrix.numerics import gradients_are_followed
from harness.trace import RankTrace, Run
from harness.trace.graphs import Collective, FusedCall, FusedNode, GeneratedResult, GraphRecord, GraphTrace, Phase
from harness.verdict import Finding, Value

_rule = Rules("graphs", Stage.EXECUTION, only={"a damaged trace": "unpaired ranks scale-shape"})
NO_GRAPH = _rule("none", "the case asks for compiled blocks, but no graph was compiled", stage=Stage.MODEL)
UNPAIRED = _rule("unpaired", "forward and backward graphs do not pair up")
WRONG_RANKS = _rule("ranks", "{operator} communicates over the wrong ranks", key=("operator",))
SCALE_SHAPE = _rule("scale-shape", "{operator} gets a scale whose shape does not match its operand", key=("operator",))
NOTHING_FUSED = _rule("nothing-fused", "async TP is on, but nothing was fused", stage=Stage.MODEL)
NUMBER = _rule("number", "wrong number of {kind}", key=("kind",), formula=FUSION)
ROWS = _rule(
    "rows",
    "{operator} gives wrong rows: {rows} of {total} differ from its unfused form",
    numeric=True,
    key=("operator",),
)
CONSTANTS = _rule(
    "constants",
    "blocks are compiled with another constant than on rank {other}: {operator} in {phase}",
    key=("operator",),
)
GENERATED = _rule(
    "generated",
    "the {tensor} of {module} in generated code differs from its graph on the same operands: relative "
    "distance of all or of a row {distance:.2g}, tolerance {allowed:.2g} ({count} of {compared} tensors of this step)",
    located=True,
    numeric=True,
    key=("tensor",),
)
GRADIENT = _rule(
    "gradient",
    "the gradient of {module} is not the one that generated code returned for it: relative error {distance:.2g}, "
    "{allowed:.2g} allowed ({count} of {compared} gradients of this step)",
    located=True,
    numeric=True,
)


class FusionKind(NamedTuple):
    phase: Phase
    collective: Collective

    def __str__(self) -> str:
        return f"{self.collective.replace('_', '-')}s fused with matmuls in {self.phase}"


def _partly(expect: Expectations, device: str) -> str:
    case, missing, gathered = expect.case, [], expect.case.float8.fp8_all_gather
    if case.layout.async_tp and not expect.has_formulas:
        missing.append(f"the number of fused collectives: no formula for the model of {case.target}")
    if case.compile == "inductor" and not gradients_are_followed(case):
        why = "weights are given to the code in float8" if gathered else f"the model is {case.target}'s"
        missing.append(f"gradients between generated code and optimizer: {why}")
    return "; ".join(missing)


@_rule.judged_by(
    blind="What is wrong in a graph and right in the code that is generated for it; a fused operator that is slow and "
    "right.",
    partly=_partly,
    records=("graphs",),
    formula=FUSION,
)
def check_graphs(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Were the blocks compiled as the case asks, and do fused operators and generated code compute what they must?"""
    return [*merge_ranks(run, lambda trace: _findings(witnesses.expect, trace)), *_constants(case, run)]


def _constants(case: Case, run: Run) -> Iterator[Finding]:
    """Yield the first constant of each rank that the same blocks do not have on the first rank of its stage."""
    first: dict[int, RankTrace] = {}
    for trace in run.by_rank:
        reference = first.setdefault(coordinates(case.layout, trace.rank)["pp"], trace)
        others = zip(_graphs(trace), _graphs(reference), strict=False)
        pairs = ((graph, pair) for graph, one in others for pair in zip(graph.constants, one.constants, strict=False))
        graph, (found, expected) = next((other for other in pairs if len(set(other[1])) > 1), (None, ("", "")))
        if graph is not None:
            operator = found.partition(" ")[0]
            values: dict[str, Value] = {"other": reference.rank, "operator": operator, "phase": graph.phase}
            yield CONSTANTS.finding(ranks=[trace.rank], expected=expected, found=found, values=values)


def _graphs(trace: RankTrace) -> Sequence[GraphRecord]:
    return () if trace.graphs is None else trace.graphs.graphs


def expected_fusions(expect: Expectations) -> Counter[FusionKind]:
    """Return how many fused operators of each kind one rank executes in one step."""
    fused = (candidate for candidate in fusion_candidates(expect.case) if candidate.fuses)
    return Counter(FusionKind(candidate.phase, candidate.collective) for candidate in fused)


def _findings(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    recorded = trace.graphs
    if recorded is None or not recorded.graphs:
        yield NO_GRAPH.finding(expected="graphs of every block", found="none")
        return
    phases = Counter(graph.phase for graph in recorded.graphs)
    if phases["forward"] != phases["backward"]:
        found = f"{phases['forward']} forward, {phases['backward']} backward"
        yield UNPAIRED.finding(expected="a backward graph for every forward graph", found=found)
    yield from _nodes(recorded)
    yield from _fusions(expect, recorded)
    yield from _wrong_rows(recorded)
    yield from _generated(expect.case, recorded)
    yield from _gradients(expect.case, recorded)


def _nodes(recorded: GraphTrace) -> Iterator[Finding]:
    """Process groups and scale shapes of the fused operators in the graphs."""
    for node in dict.fromkeys(node for graph in recorded.graphs for node in graph.fused):
        if node.axis != "tp":
            yield WRONG_RANKS.finding(operator=node.operator, expected="the mesh axis tp", found=node.axis)
        if not _scale_fits(node):
            expected = "A_scale with the leading dims of A, or one scale for the tensor"
            found = f"A {list(node.a_shape)}, A_scale {list(node.a_scale_shape or ())}"
            yield SCALE_SHAPE.finding(operator=node.operator, expected=expected, found=found)


def _scale_fits(node: FusedNode) -> bool:
    scale = node.a_scale_shape
    if scale is None or all(size == 1 for size in scale):
        return True
    return scale[-1] == 1 and scale[:-1] == node.a_shape[:-1]


def _fusions(expect: Expectations, recorded: GraphTrace) -> Iterator[Finding]:
    """The expected number of fused operators in every step; one separate finding when nothing was fused at all."""
    expected = expected_fusions(expect)
    by_step = {step: Counter[FusionKind]() for step in range(1, expect.case.train.steps + 1)}
    for call in recorded.calls:
        if call.step in by_step:
            by_step[call.step][FusionKind(call.phase, call.collective)] += call.times
    if expect.case.layout.async_tp and not any(by_step.values()):
        wanted = f"{expected.total()} fused collectives a step" if expected else "fused collectives"
        yield NOTHING_FUSED.finding(step=1, expected=wanted, found=_reasons(recorded))
        return
    if not expect.has_formulas:
        return  # how many there must be follows from the model
    for kind in sorted({*expected, *(kind for counts in by_step.values() for kind in counts)}):
        step = next((step for step, counts in by_step.items() if counts[kind] != expected[kind]), None)
        if step is not None:
            found = by_step[step][kind]
            why = f"; not fused: {_reasons(recorded, kind)}" if found < expected[kind] else ""
            wanted = f"{expected[kind]} a step"
            yield NUMBER.finding(kind=str(kind), step=step, expected=wanted, found=f"{found}{why}")


def _reasons(recorded: GraphTrace, kind: FusionKind | None = None) -> str:
    """Return why collectives of the TP axis were not fused, with the number of collectives for each reason."""
    counts = Counter(
        f"{unfused.collective} of {unfused.dtype} {list(unfused.shape)}: {unfused.reason}"
        for graph in recorded.graphs
        for unfused in graph.unfused
        if unfused.axis == "tp" and (kind is None or (graph.phase, unfused.collective) == kind)
    )
    return "; ".join(f"{count} x {reason}" for reason, count in counts.items()) or "no such collective in the graphs"


def _wrong_rows(recorded: GraphTrace) -> Iterator[Finding]:
    """Yield rows of fused operators that differ from those of their unfused form."""
    wrong: dict[str, list[FusedCall]] = {}
    for call in recorded.calls:
        if call.wrong_rows:
            wrong.setdefault(call.operator, []).append(call)
    for operator, calls in wrong.items():
        rows, total = sum(call.wrong_rows for call in calls), sum(call.rows for call in calls)
        step, expected, found = calls[0].step, "the rows of its unfused form, up to rounding", _example(calls[0])
        values: dict[str, Value] = {"operator": operator, "rows": rows, "total": total}
        yield ROWS.finding(step=step, expected=expected, found=found, size=rows / total, values=values)


def _example(call: FusedCall) -> str:
    row = call.example
    assert row is not None, "a call with wrong rows has an example"
    where = f"in {call.phase}, row {list(row.index)} of this rank"
    if row.holds_index is None:
        return f"{where} has a relative error of {row.distance:.2g} and matches no other row"
    return f"{where} holds row {list(row.holds_index)} of TP rank {row.holds_rank}"


def _generated(case: Case, recorded: GraphTrace) -> Iterator[Finding]:
    """Yield the first tensor of generated code that is too far off, in execution order: no other is its reason."""
    compared: list[Compared] = []
    for result in recorded.generated:
        limit = allowed_in_code(case, result, emulated=recorded.emulates_roundings)
        whole = Compared(GENERATED, result.step, result.distance, limit, result.fqn, of=result)
        row = whole._replace(distance=result.farthest_row, allowed=allowed_row(case, result, limit))
        compared.append(whole if row.good or not whole.good else row)
    wrong = first_wrong(compared)
    if wrong is not None:
        first: GeneratedResult = wrong.told.of
        yield wrong.finding(tensor=first.tensor, operand=f"{first.tensor} in {first.phase}", size=wrong.told.distance)


def _gradients(case: Case, recorded: GraphTrace) -> Iterator[Finding]:
    """The gradient that changed most on the way from the code to the optimizer, in the first step where one did."""
    compared = [
        Compared(GRADIENT, gradient.step, gradient.distance, reduced_distance(case, gradient), gradient.fqn)
        for gradient in recorded.gradients
    ]
    wrong = first_wrong(compared, worst=True)
    if gradients_are_followed(case) and not recorded.gradients:
        yield GRADIENT.finding(module="the blocks", distance=math.nan, allowed=0.0, count=0, compared=0)
    if wrong is not None:
        yield wrong.finding()
