"""Does every token reach the experts that were chosen for it, and does it get back what these returned for it?

Digests of rows tell which token each of them is, on the rank that sends it and on the rank that holds the expert. So
tokens that are lost, swapped, or sent to another expert are named, in forward and for gradients in backward.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from harness.checks.check import Mismatch, Rule, Rules, Stage, Witnesses, findings_by_rule, finished
from harness.matrix.case import Case
from harness.matrix.dims.pp import expert_layers_of, held
from harness.matrix.layout import dp_rank, peers
from harness.matrix.linears import expert_fqns
from harness.matrix.model import BALANCE_COEFFICIENT
from harness.matrix.numerics import drifts
from harness.promises import Limit
from harness.text import counted
from harness.trace import Run
from harness.trace.counts import ExpertCall, Phase, Rows
from harness.verdict import Finding

_rule = Rules("routing", Stage.COLLECTIVES, located=True)
_MODULE = Stage.MODULE
CALLS = _rule("calls", "experts run more or fewer times than the router selects them", stage=Stage.MODEL)
MATMULS = _rule(
    "matmuls",
    "grouped matmuls of {what} do not follow the recipe at step {at} on {ranks}",
    stage=Stage.MODEL,
    located=False,
)
TOP_K = _rule("top-k", "tokens are not routed to {top_k} distinct experts each", stage=Stage.MODEL)
WEIGHTS = _rule("weights", "the routing weights of a token do not match the configured router")
COUNTS = _rule("counts", "experts get more or fewer tokens than the router assigned to them")
SENT = _rule("sent", "a rank does not send the rows of its tokens in order of expert, then token")
ARRIVED = _rule("arrived", "experts receive other tokens than ranks sent to them")
RETURNED = _rule("returned", "a token gets back another row than its expert returned")
GRADIENT_ARRIVED = _rule("gradient-of-results", "experts receive gradients of other rows than they returned")
GRADIENT_RETURNED = _rule("gradient-of-tokens", "tokens get back other gradients than their experts computed")
ROUTER = _rule("router", "routing weights differ from the single-rank reference for the same tokens", stage=_MODULE)
EXPERTS = _rule(
    "experts", "experts return different {what} than the single-rank reference", stage=_MODULE, key=("what",)
)
BIAS = _rule("bias", "expert_bias was not updated from the token counts of the step", stage=Stage.STEP)


class _Place(NamedTuple):
    """What calls of all ranks have in common: those of one block that exchange tokens with each other."""

    step: int
    phase: str
    number: int
    fqn: str

    @classmethod
    def of(cls, call: ExpertCall) -> "_Place":
        return cls(call.step, call.phase, call.number, call.fqn)


@_rule.judged_by(
    blind="A wrong choice of experts that the single-rank reference shares.",
    not_judged=lambda expect, device: "" if expect.case.model.experts else "no block has experts",
    records=("experts",),
)
def check_routing(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does every token reach the experts that were chosen for it, and does it get back what these returned for it?"""
    calls: defaultdict[_Place, dict[int, ExpertCall]] = defaultdict(dict)
    for trace in run.by_rank:
        for call in trace.experts.calls if trace.experts is not None else ():
            calls[_Place.of(call)][trace.rank] = call
    wrong = [mismatch for order, place in enumerate(calls) for mismatch in _of_calls(case, place, order, calls[place])]
    mismatches = [*_numbers(case, run), *wrong, *_otherwise(case, run, witnesses, wrong), *_biases(case, run)]
    return [*_matmuls(case, run), *findings_by_rule(mismatches)]


def _numbers(case: Case, run: Run) -> Iterator[Mismatch]:
    """Yield how often the experts of a block are called in a step: in forward, again where they are recomputed."""
    for trace in run.by_rank:
        for step in range(1, case.train.steps + 1):
            found = Counter((call.fqn, call.phase) for call in trace.expert_calls(step))
            for fqn in held(case, trace.rank, expert_fqns(case.model)):
                block, layer = fqn.rpartition(".")[0], int(fqn.split(".")[1])
                expected: dict[Phase, int] = {
                    "forward": case.train.accumulation,
                    "recompute": case.train.accumulation * case.checkpointing.wraps(layer),
                    "evaluation": case.train.accumulation * case.train.evaluate,
                }
                for phase, times in expected.items():
                    if found[block, phase] != times:
                        yield Mismatch(
                            step, 0, trace.rank, block, CALLS, f"{times} in {phase}", str(found[block, phase])
                        )


_PRODUCTS = 3  # grouped matmuls: gate, up and down projection


def _matmuls(case: Case, run: Run) -> Iterator[Finding]:
    """Yield how many grouped matmuls a step has, and in which precision; of the first step that is off."""
    wrong: dict[tuple[int, bool, str, str], list[int]] = {}
    for trace in run.by_rank:
        records = trace.experts.matmuls if trace.experts is not None else ()
        for step in range(1, case.train.steps + 1):
            for wgrad, expected in _times(case, trace.rank).items():
                scaled = case.float8.grouped_traits.multiplies("wgrad" if wgrad else "forward")
                found = {
                    record.scaled: record.times for record in records if (record.step, record.wgrad) == (step, wgrad)
                }
                if found != ({scaled: expected} if expected else {}):
                    key = (step, wgrad, _counted({scaled: expected}), _counted(found))
                    wrong.setdefault(key, []).append(trace.rank)
    for (step, wgrad, wanted, got), ranks in sorted(wrong.items()):
        purpose = "weight gradients" if wgrad else "forward and of gradients of tokens"
        yield MATMULS.finding(step=step, ranks=ranks, expected=wanted, found=got, what=purpose, at=step)


def _times(case: Case, rank: int) -> dict[bool, int]:
    """Of a step: of weight gradients, and of forward and gradients of tokens."""
    layers, train = expert_layers_of(case, rank), case.train
    again = sum(map(case.checkpointing.wraps, layers))
    trained = _PRODUCTS * len(layers) * train.accumulation
    return {False: 2 * trained + _PRODUCTS * (again + len(layers) * train.evaluate) * train.accumulation, True: trained}


def _counted(times: Mapping[bool, int]) -> str:
    return ", ".join(f"{times[scaled]} {_PRECISION[scaled]}" for scaled in sorted(times)) or "none"


_PRECISION = {False: "in high precision", True: "in float8"}


def _of_calls(case: Case, place: _Place, order: int, calls: Mapping[int, ExpertCall]) -> Iterator[Mismatch]:
    def mismatch(rank: int, rule: Rule, expected: str, found: str, operand: str = "") -> Mismatch:
        values = (("top_k", case.model.top_k),) if rule is TOP_K else ()
        return Mismatch(place.step, order, rank, place.fqn, rule, expected, found, operand or place.phase, values)

    for rank, call in calls.items():
        wrong = next(_of_router(case, call), None)
        if wrong is not None:
            yield mismatch(rank, *wrong)
    for group in {peers(case.layout, rank, ("ep",)) for rank in calls}:
        if group[0] in calls and set(group) <= calls.keys():
            yield from (mismatch(*broken) for broken in _exchanges([calls[rank] for rank in group], group))


def _otherwise(case: Case, run: Run, witnesses: Witnesses, wrong: Sequence[Mismatch]) -> Iterator[Mismatch]:
    """Yield where ranks have the bits of one: what is another, although the tokens before it are the same.

    Nothing is said of the experts of a block where what ranks sent each other was `wrong`.
    """
    solo, expect = finished(witnesses.solo), witnesses.expect
    if solo is None or solo.traces[0].experts is None or drifts(case, expect.numerics):
        return
    calls = {_Place.of(call): call for call in solo.traces[0].experts.calls if call.phase == "forward"}
    lost = {(mismatch.step, mismatch.module) for mismatch in wrong}
    for trace in run.by_rank:
        for order, call in enumerate(trace.experts.calls if trace.experts is not None else ()):
            number = dp_rank(case.layout, trace.rank) * case.train.accumulation + call.number
            reference = calls.get(_Place.of(call)._replace(number=number))
            if reference is None or call.tokens != reference.tokens:
                continue  # something before
            if (call.chosen, call.weights) != (reference.chosen, reference.weights):
                words = ("the choice of the single-rank reference", "something else")
                yield Mismatch(call.step, order, trace.rank, call.fqn, ROUTER, *words)
            elif (call.step, call.fqn) not in lost:
                yield from _of_experts(case, trace.rank, order, call, reference)


def _of_experts(case: Case, rank: int, order: int, call: ExpertCall, reference: ExpertCall) -> Iterator[Mismatch]:
    """Yield the first expert with other results, or else other gradients, on the rank that holds it."""
    found, expected, what = call.values.returned, reference.values.returned, "results for equal tokens"
    if found == expected and call.gradients.returned == reference.gradients.returned:
        found, expected, order = call.gradients.sent, reference.gradients.sent, -order
        what = "gradients of tokens for equal gradients of results"
    rows = [
        row for row, pair in enumerate(zip(_integers(found), _integers(expected), strict=False)) if pair[0] != pair[1]
    ]
    if rows:
        expert = next(expert for expert in range(len(call.counts)) if rows[0] < sum(call.counts[: expert + 1]))
        group = peers(case.layout, rank, ("ep",))
        owner = group[expert * len(group) // len(call.counts)]
        words = ("the rows of the single-rank reference", f"{counted(len(rows), 'row')} of rank {rank} differ")
        yield Mismatch(call.step, order, owner, call.fqn, EXPERTS, *words, f"expert {expert}", (("what", what),))


def _of_router(case: Case, call: ExpertCall) -> Iterator[tuple[Rule, str, str]]:
    """Yield what is wrong with the choice of a rank and with the rows that it sends for it."""
    model, top_k = case.model, case.model.top_k
    flat, tokens = _integers(call.chosen), _integers(call.tokens)
    chosen = [tuple(flat[at : at + top_k]) for at in range(0, len(flat), top_k)]
    again = next((token for token, experts in enumerate(chosen) if len(set(experts)) < top_k), None)
    if again is not None:
        yield TOP_K, f"{top_k} experts of token {again}", f"experts {sorted(chosen[again])}"
    yield from _of_weights(model.router, call, top_k, all_chosen=top_k == model.experts)
    by_expert = sorted(range(len(flat)), key=flat.__getitem__)
    numbers = Counter(flat)
    counts = tuple(numbers[expert] for expert in range(model.experts))
    if counts != call.counts:
        yield COUNTS, _spelled(counts), _spelled(call.counts)
    wrong = _difference([tokens[place // top_k] for place in by_expert], _integers(call.values.sent))
    if wrong is not None:
        row, words = wrong
        place = by_expert[row]
        yield SENT, f"token {place // top_k} as row {row}, for expert {flat[place]}", words


_ROUNDING = Limit("experts.weights")


def _of_weights(score: str, call: ExpertCall, top_k: int, *, all_chosen: bool) -> Iterator[tuple[Rule, str, str]]:
    weights = memoryview(call.weights).cast("d")
    is_share = score == "sigmoid" or all_chosen
    for token, at in enumerate(range(0, len(weights), top_k)):
        total = math.fsum(weights[at : at + top_k])
        if not (abs(total - 1) <= _ROUNDING if is_share else 0 < total <= 1 + _ROUNDING):
            yield WEIGHTS, f"a sum of {'1' if is_share else 'a part of 1'} for token {token}", f"{total:.6g}"
            return


def _exchanges(
    calls: Sequence[ExpertCall], group: Sequence[int]
) -> Iterator[tuple[int, Rule, str, str] | tuple[int, Rule, str, str, str]]:
    """Yield what is wrong with what the ranks of a group sent to each other. Every one holds equally many experts."""
    local = len(calls[0].counts) // len(group)
    for owner, rank in enumerate(group):
        mine = range(owner * local, (owner + 1) * local)
        counts = tuple(sum(call.counts[expert] for call in calls) for expert in mine)
        if counts != calls[owner].local_counts:
            yield rank, COUNTS, _spelled(counts), _spelled(calls[owner].local_counts)
            continue
        origins = [
            (source, expert, row)
            for expert in mine
            for source, call in enumerate(calls)
            for row in range(sum(call.counts[:expert]), sum(call.counts[: expert + 1]))
        ]
        for kind, gradient in (("values", False), ("gradients", True)):
            of_ranks: list[Rows] = [getattr(call, kind) for call in calls]
            yield from _pairs(of_ranks, owner, rank, origins, gradient)


def _pairs(
    of_ranks: Sequence[Rows], owner: int, rank: int, origins: Sequence[tuple[int, int, int]], gradient: bool
) -> Iterator[tuple[int, Rule, str, str, str]]:
    """Rows at their sources against those at the owner of the experts. Digests that nobody has are not compared."""
    rules = (GRADIENT_RETURNED, GRADIENT_ARRIVED) if gradient else (ARRIVED, RETURNED)
    for rule, outside, inside in ((rules[0], "sent", "arrived"), (rules[1], "returned", "computed")):
        at_sources = [_integers(getattr(rows, outside)) for rows in of_ranks]
        at_owner = _integers(getattr(of_ranks[owner], inside))
        if not len(at_owner) or not all(map(len, at_sources)):
            continue
        wrong = _difference([at_sources[source][row] for source, _, row in origins], at_owner)
        if wrong is not None:
            first, words = wrong
            source, expert, row = origins[first]
            expected = f"row {first} is row {row} of rank {rank + source - owner}, for expert {expert}"
            yield rank, rule, expected, words, "gradients in backward" if gradient else ""


def _difference(expected: Sequence[int], found: Sequence[int]) -> tuple[int, str] | None:
    """Return the first row that differs, and what is there instead."""
    if len(expected) != len(found):
        return 0, f"{len(found)} rows for {len(expected)}"
    rows = [row for row, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other]
    if not rows:
        return None
    place = next((row for row, digest in enumerate(expected) if digest == found[rows[0]]), None)
    other = "that is none of them" if place is None else f"that is row {place}"
    moved = "the same rows in another order" if sorted(expected) == sorted(found) else f"{len(rows)} rows differ"
    return rows[0], f"{other}; {moved}"


def _integers(held: bytes) -> Sequence[int]:
    return memoryview(held).cast("q") if held else ()


def _spelled(counts: Sequence[int]) -> str:
    return f"{sum(counts)} rows: {', '.join(map(str, counts))}"


_LAST_BIT = Limit("experts.bias")


def _biases(case: Case, run: Run) -> Iterator[Mismatch]:
    """Yield the bias of every step follows from the bias of the step before and the tokens of all ranks."""
    tokens: defaultdict[tuple[int, str, int], int] = defaultdict(int)
    for trace in run.traces:
        for call in trace.experts.calls if trace.experts is not None else ():
            for expert, count in enumerate(call.counts if call.phase == "forward" else ()):
                tokens[call.step, call.fqn, expert] += count
    experts = range(case.model.experts)
    for trace in run.by_rank:
        before: dict[str, Sequence[float]] = {}
        for record in trace.experts.biases if trace.experts is not None else ():
            of_step = [tokens[record.step, record.fqn, expert] for expert in experts]
            old = before.get(record.fqn, [0.0] * len(experts))
            expected = [was + move for was, move in zip(old, _moves(of_step, case), strict=True)]
            before[record.fqn] = record.bias
            off = [abs(one - other) for one, other in zip(expected, record.bias, strict=True)]
            worst = max(experts, key=off.__getitem__)
            if not off[worst] <= _LAST_BIT:
                wanted, got = f"{expected[worst]:.6g} of expert {worst}", f"{record.bias[worst]:.6g}"
                yield Mismatch(record.step, 0, trace.rank, record.fqn, BIAS, wanted, got)
        blocks = {fqn.rpartition(".")[0] for fqn in held(case, trace.rank, expert_fqns(case.model))}
        for fqn in sorted(blocks - before.keys()) if case.model.balance else ():
            yield Mismatch(1, 0, trace.rank, fqn, BIAS, "a bias of every expert", "a mixture without one")


def _moves(tokens: Sequence[int], case: Case) -> list[float]:
    """Towards experts with fewer tokens than the mean, by one coefficient; all moves add up to zero."""
    mean = sum(tokens) / len(tokens)
    signs = [(mean > count) - (mean < count) for count in tokens]
    center = sum(signs) / len(signs)
    return [BALANCE_COEFFICIENT * (sign - center) * case.model.balance for sign in signs]
