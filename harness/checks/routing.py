"""Does every token reach the experts that were chosen for it, and does it get back what these returned for it?

Digests of rows tell which token each of them is, on the rank that sends it and on the rank that holds the expert. So
tokens that are lost, swapped, or sent to another expert are named, in forward and for gradients in backward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.checks.check import Check, Witnesses
from harness.checks.findings import Mismatch, findings_by_rule, traces_by_rank
from harness.checks.rule import Rule, Rules, Stage
from harness.matrix.case import Case
from harness.matrix.layout import peers
from harness.matrix.linears import expert_fqns
from harness.trace import Run
from harness.trace.experts import ExpertCall, Rows
from harness.verdict import Finding

Digests = npt.NDArray[np.int64]

_rule = Rules("routing", Stage.COLLECTIVES, located=True)
CALLS = _rule("calls", "experts are called another number of times than the router chooses", stage=Stage.MODEL)
TOP_K = _rule("top-k", "tokens are not sent to {top_k} different experts each", stage=Stage.MODEL)
WEIGHTS = _rule("weights", "the weights of a token's experts are not those that the router is configured for")
COUNTS = _rule("counts", "experts are called with other numbers of tokens than were chosen for them")
SENT = _rule("sent", "the rows that a rank sends are not those of its tokens, by expert and then by token")
ARRIVED = _rule("arrived", "the tokens that experts get are not those that were sent to them")
RETURNED = _rule("returned", "what comes back for a token is not what its expert returned")
GRADIENT_ARRIVED = _rule("gradient-of-results", "the gradients that experts get are not those of what they returned")
GRADIENT_RETURNED = _rule(
    "gradient-of-tokens", "the gradients that come back for tokens are not those of their experts"
)
BIAS = _rule("bias", "the bias of the choice did not move by what the tokens of the step ask for", stage=Stage.STEP)


class _Place(NamedTuple):
    """What calls of all ranks have in common: those of one block that exchange tokens with each other."""

    step: int
    phase: str
    number: int
    fqn: str


@partial(
    Check,
    declares=_rule,
    blind="What experts compute: `parity` sees it. A wrong choice of experts that the single-rank reference makes too.",
    not_judged=lambda expect, device: "" if expect.case.model.experts else "no block has experts",
    records=("experts",),
)
def check_routing(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does every token reach the experts that were chosen for it, and does it get back what these returned for it?"""
    calls: defaultdict[_Place, dict[int, ExpertCall]] = defaultdict(dict)
    for trace in traces_by_rank(run):
        for call in trace.experts.calls if trace.experts is not None else ():
            calls[_Place(call.step, call.phase, call.number, call.fqn)][trace.rank] = call
    wrong = [each for order, place in enumerate(calls) for each in _of_calls(case, place, order, calls[place])]
    return findings_by_rule([*_numbers(case, run), *wrong, *_biases(case, run)])


def _numbers(case: Case, run: Run) -> Iterator[Mismatch]:
    """How often the experts of a block are called in a step: in forward, again where they are recomputed."""
    for trace in traces_by_rank(run):
        for step in range(1, case.train.steps + 1):
            found = Counter((call.fqn, call.phase) for call in trace.expert_calls(step))
            for fqn in expert_fqns(case.model):
                block, layer = fqn.rpartition(".")[0], int(fqn.split(".")[1])
                expected = {
                    "forward": case.train.accumulation,
                    "recompute": case.train.accumulation * case.checkpointing.wraps(layer),
                    "evaluation": int(case.train.evaluate),
                }
                for phase, times in expected.items():
                    if found[block, phase] != times:
                        yield Mismatch(
                            step, 0, trace.rank, block, CALLS, f"{times} in {phase}", str(found[block, phase])
                        )


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
            yield from (mismatch(*each) for each in _exchanges([calls[rank] for rank in group], group))


def _of_router(case: Case, call: ExpertCall) -> Iterator[tuple[Rule, str, str]]:
    """What is wrong with the choice of a rank and with the rows that it sends for it."""
    model, top_k = case.model, case.model.top_k
    chosen = np.frombuffer(call.chosen, np.int64).reshape(-1, top_k)
    weights = np.frombuffer(call.weights, np.float64).reshape(-1, top_k)
    tokens = _digests(call.tokens)
    again = [token for token, experts in enumerate(chosen) if len(set(experts.tolist())) < top_k]
    if again:
        yield TOP_K, f"{top_k} experts of token {again[0]}", f"experts {sorted(chosen[again[0]].tolist())}"
    yield from _of_weights(model.router, weights, all_chosen=top_k == model.experts)
    counts = tuple(np.bincount(chosen.ravel(), minlength=model.experts).tolist())
    if counts != call.counts:
        yield COUNTS, _spelled(counts), _spelled(call.counts)
    by_expert = np.argsort(chosen.ravel(), kind="stable")
    wrong = _difference(tokens[by_expert // top_k], _digests(call.values.sent))
    if wrong is not None:
        expert, token = chosen.ravel()[by_expert][wrong.row], by_expert[wrong.row] // top_k
        yield SENT, f"token {token} as row {wrong.row}, for expert {expert}", wrong.words


_ROUNDING = 1e-5  # of float32 numbers that add up to one


def _of_weights(score: str, weights: npt.NDArray[np.float64], *, all_chosen: bool) -> Iterator[tuple[Rule, str, str]]:
    sums = weights.sum(axis=1)
    is_share = score == "sigmoid" or all_chosen
    off = np.abs(sums - 1) > _ROUNDING if is_share else (sums > 1 + _ROUNDING) | (sums <= 0)
    off |= ~np.isfinite(sums)
    if off.any():
        token = int(off.argmax())
        expected = "1" if is_share else "a part of 1"
        yield WEIGHTS, f"a sum of {expected} for token {token}", f"{sums[token]:.6g}"


def _exchanges(
    calls: Sequence[ExpertCall], group: Sequence[int]
) -> Iterator[tuple[int, Rule, str, str] | tuple[int, Rule, str, str, str]]:
    """What is wrong with what the ranks of a group sent to each other. Every one holds equally many experts."""
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
            yield from _pairs(of_ranks, owner, rank, [*zip(*origins, strict=True)] or [(), (), ()], gradient)


def _pairs(
    of_ranks: Sequence[Rows], owner: int, rank: int, origins: Sequence[Sequence[int]], gradient: bool
) -> Iterator[tuple[int, Rule, str, str, str]]:
    """Rows at their sources against those at the owner of the experts. Digests that nobody has are not compared."""
    sources, experts, rows = origins
    rules = (GRADIENT_RETURNED, GRADIENT_ARRIVED) if gradient else (ARRIVED, RETURNED)
    for rule, outside, inside in ((rules[0], "sent", "arrived"), (rules[1], "returned", "computed")):
        at_sources = [_digests(getattr(each, outside)) for each in of_ranks]
        at_owner = _digests(getattr(of_ranks[owner], inside))
        if not len(at_owner) or not all(map(len, at_sources)):
            continue
        there = np.array([at_sources[source][row] for source, row in zip(sources, rows, strict=True)], np.int64)
        wrong = _difference(there, at_owner)
        if wrong is not None:
            row = wrong.row
            expected = f"row {row} is row {rows[row]} of rank {sources[row] + rank - owner}, for expert {experts[row]}"
            yield rank, rule, expected, wrong.words, "gradients in backward" if gradient else ""


class _Wrong(NamedTuple):
    row: int
    words: str


def _difference(expected: Digests, found: Digests) -> _Wrong | None:
    """The first row that differs, and what is there instead."""
    if len(expected) != len(found):
        return _Wrong(0, f"{len(found)} rows for {len(expected)}")
    rows = np.flatnonzero(expected != found)
    if not len(rows):
        return None
    places = np.flatnonzero(expected == found[rows[0]])
    other = f"that is row {places[0]}" if len(places) else "that is none of them"
    moved = "the same rows in another order" if sorted(expected) == sorted(found) else f"{len(rows)} rows differ"
    return _Wrong(int(rows[0]), f"{other}; {moved}")


def _digests(held: bytes) -> Digests:
    return np.frombuffer(held, np.int64)


def _spelled(counts: Sequence[int]) -> str:
    return f"{sum(counts)} rows: {', '.join(map(str, counts))}"


_COEFFICIENT = 1e-3  # of torchtitan 0.2.2, and of the reference target
_LAST_BIT = 1e-9  # of a bias of some hundred steps, in float32


def _biases(case: Case, run: Run) -> Iterator[Mismatch]:
    """The bias of every step follows from that of the step before and from the tokens of all ranks."""
    tokens: defaultdict[tuple[int, str], npt.NDArray[np.float64]] = defaultdict(lambda: np.zeros(case.model.experts))
    for trace in run.traces:
        for call in trace.experts.calls if trace.experts is not None else ():
            if call.phase == "forward":
                tokens[call.step, call.fqn] += np.array(call.counts)
    for trace in traces_by_rank(run):
        before: defaultdict[str, npt.NDArray[np.float64]] = defaultdict(lambda: np.zeros(case.model.experts))
        for found in trace.experts.biases if trace.experts is not None else ():
            of_step = tokens[found.step, found.fqn]
            move = _COEFFICIENT * np.sign(of_step.mean() - of_step) * case.model.balance
            expected, bias = before[found.fqn] + move - move.mean(), np.array(found.bias)
            before[found.fqn] = bias
            if not np.allclose(expected, bias, rtol=1e-6, atol=_LAST_BIT):
                expert = int(np.abs(expected - bias).argmax())
                yield Mismatch(
                    found.step,
                    0,
                    trace.rank,
                    found.fqn,
                    BIAS,
                    f"{expected[expert]:.6g} of expert {expert}",
                    f"{bias[expert]:.6g}",
                )
