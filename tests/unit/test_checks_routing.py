"""Routing: tokens, results and gradients that are lost, swapped or miscounted are found where it happened."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness.checks.routing import check_routing
from harness.matrix.case import Case
from harness.trace.counts import ExpertBias, ExpertCall, ExpertTrace, GroupedMatmuls, Rows
from harness.verdict import Finding
from tests.builders import make_case, make_trace, make_witnesses, run_of

CASE = make_case(dp_shard=2, ep=2, experts=4, top_k=2, steps=1, dtype="bfloat16", recipe="bf16")
CHOSEN = (((0, 2), (0, 1), (3, 2)), ((0, 3), (2, 0), (0, 3)))  # by rank: experts of three tokens; 1 has one row
FQN = "layers.1.moe"


def packed(numbers: Sequence[float], kind: str = "q") -> bytes:
    return struct.pack(f"{len(numbers)}{kind}", *numbers)


def rows_by_expert(rank: int) -> list[tuple[int, int]]:
    """(expert, token) of the rows that a rank sends, in order."""
    return sorted((expert, token) for token, experts in enumerate(CHOSEN[rank]) for expert in experts)


def exchanged(values: int) -> list[Rows]:
    """What ranks send and get: a digest says which values, rank, token and expert it is of."""
    sent = [[values + 100 * rank + token for _, token in rows_by_expert(rank)] for rank in (0, 1)]
    returned = [[values + 50 + 100 * r + 10 * e + t for e, t in rows_by_expert(r)] for r in (0, 1)]
    rows_of_ranks = []
    for owner in (0, 1):
        origin = [
            (rank, row)
            for expert in (2 * owner, 2 * owner + 1)
            for rank in (0, 1)
            for row, (chosen, _) in enumerate(rows_by_expert(rank))
            if chosen == expert
        ]
        rows_of_ranks.append(
            Rows(
                sent=packed(sent[owner]),
                arrived=packed([sent[rank][row] for rank, row in origin]),
                computed=packed([returned[rank][row] for rank, row in origin]),
                returned=packed(returned[owner]),
            )
        )
    return rows_of_ranks


def matmuls(*, wgrad: bool, times: int, scaled: bool = False) -> GroupedMatmuls:
    return GroupedMatmuls(step=1, wgrad=wgrad, scaled=scaled, times=times)


def call_of(rank: int) -> ExpertCall:
    experts = [expert for expert, _ in rows_by_expert(rank)]
    everyone = [expert for sender in (0, 1) for expert, _ in rows_by_expert(sender)]
    values = exchanged(1000)[rank]
    return ExpertCall(
        step=1,
        fqn=FQN,
        phase="forward",
        number=0,
        tokens=packed([1000 + 100 * rank + token for token in range(3)]),
        chosen=packed([expert for experts_of_token in CHOSEN[rank] for expert in experts_of_token]),
        weights=packed([0.5, 0.25] * 3, "d"),
        counts=tuple(experts.count(expert) for expert in range(4)),
        local_counts=tuple(everyone.count(expert) for expert in (2 * rank, 2 * rank + 1)),
        values=values,
        gradients=exchanged(5000)[rank],
    )


MATMULS = (matmuls(wgrad=False, times=6), matmuls(wgrad=True, times=3))


def found_with(
    case: Case = CASE,
    biases: Sequence[float] = (0, 0, 0, 0),
    matmuls: tuple[GroupedMatmuls, ...] = MATMULS,
    solo: ExpertTrace | None = None,
    **changes: object,
) -> list[Finding]:
    """The findings where rank 1 has these `changes` of its call."""
    calls = [call_of(0), replace(call_of(1), **changes)]
    bias = (ExpertBias(step=1, fqn=FQN, bias=tuple(biases)),)
    traces = [
        make_trace(rank=rank, experts=ExpertTrace(calls=(call,), matmuls=matmuls, biases=bias))
        for rank, call in enumerate(calls)
    ]
    witnesses = make_witnesses(case, solo=None if solo is None else run_of(make_trace(experts=solo)))
    return check_routing(case, run_of(*traces), witnesses)


def rules(findings: Sequence[Finding]) -> set[str]:
    return {finding.rule.partition("/")[2] for finding in findings}


def swapped(held: bytes) -> bytes:
    return held[8:16] + held[:8] + held[16:]


@pytest.mark.parametrize(
    ("kind", "field", "rule", "rank"),
    [
        ("values", "sent", "sent", 1),
        ("values", "arrived", "arrived", 1),
        ("values", "computed", "returned", 1),
        ("values", "returned", "returned", 0),
        ("gradients", "arrived", "gradient-of-tokens", 1),
        ("gradients", "computed", "gradient-of-results", 1),
    ],
)
def test_swapped_rows_are_found_where_they_got_lost(kind: str, field: str, rule: str, rank: int) -> None:
    right = getattr(call_of(1), kind)
    findings = found_with(**{kind: replace(right, **{field: swapped(getattr(right, field))})})
    finding = next(one for one in findings if one.rule == f"routing/{rule}")
    assert (finding.module, finding.step, finding.rank) == (FQN, 1, rank)
    assert (finding.operand == "gradients in backward") is (kind == "gradients")
    assert kind == "values" or findings == [finding]
    assert "row" in str(finding.expected) and "that is" in str(finding.found)


def of_reference(**changes: object) -> ExpertTrace:
    """What one rank records of the batches of both ranks, one after the other."""
    calls = (replace(call_of(rank), number=rank, local_counts=call_of(rank).counts) for rank in (0, 1))
    return ExpertTrace(calls=tuple(replace(call, **changes) if call.number else call for call in calls), biases=())


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"values": replace(call_of(1).values, returned=packed([-1, *range(5)]))}, "experts"),
        ({"gradients": replace(call_of(1).gradients, sent=packed([-1, *range(5)]))}, "experts"),
        ({"gradients": replace(call_of(1).gradients, sent=b"", returned=b"")}, ""),
        ({"gradients": exchanged(7)[1]}, ""),  # other gradients of results: something before
        ({"tokens": packed([1, 2, 3])}, ""),
        ({"weights": packed([0.25, 0.25] * 3, "d")}, "router"),
    ],
)
def test_a_wrong_expert_is_named_with_its_owner_and_the_rank_that_sent_the_tokens(
    changes: dict[str, object], rule: str
) -> None:
    findings = found_with(solo=of_reference(**changes))
    assert rules(findings) == ({rule} if rule else set())
    if rule == "experts":
        (finding,) = findings
        assert str(finding.values["what"]).startswith("gradients" if "gradients" in changes else "results")
        assert (finding.rank, finding.operand) == (0, "expert 0")  # the first of rank 0, for tokens of rank 1
        assert finding.found == "6 rows of rank 1 differ"


def test_experts_are_not_blamed_where_the_exchange_was_wrong() -> None:
    values = call_of(1).values
    wrong = replace(values, returned=swapped(values.returned))
    assert rules(found_with(values=wrong, solo=of_reference())) == {"returned"}


def test_a_lost_row_is_told_by_its_number() -> None:
    values = call_of(1).values
    (finding,) = found_with(values=replace(values, arrived=values.arrived[:-8]))
    assert finding.rule == "routing/arrived" and finding.found is not None and finding.found.startswith("5 rows for 6")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"chosen": packed([0, 0, 2, 0, 0, 3])}, "top-k"),
        ({"weights": packed([0.75, 0.5] * 3, "d")}, "weights"),
        ({"weights": packed([float("nan"), 0.5] * 3, "d")}, "weights"),
        ({"counts": (2, 1, 1, 2)}, "counts"),
        ({"local_counts": (4, 2)}, "counts"),
    ],
)
def test_what_the_router_and_the_counts_must_be(changes: dict[str, object], rule: str) -> None:
    assert rule in rules(found_with(**changes))


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_with_gw_hp"])
def test_grouped_matmuls_are_those_of_the_recipe(recipe: str) -> None:
    converted = make_case(dp_shard=2, ep=2, experts=4, steps=1, dtype="bfloat16", recipe=recipe, grouped_mm=True)
    (of_forward, *of_wgrad) = found_with(converted)
    assert of_forward.rule == "routing/matmuls" and of_forward.ranks == (0, 1)
    assert (of_forward.expected, of_forward.found) == ("6 in float8", "6 in high precision")
    assert len(of_wgrad) == (recipe == "mxfp8")
    sound = (matmuls(wgrad=False, times=6, scaled=True), matmuls(wgrad=True, times=3, scaled=recipe == "mxfp8"))
    assert found_with(converted, matmuls=sound) == []


def test_a_sound_exchange_has_no_finding_but_with_sigmoid_weights_or_more_microbatches() -> None:
    sigmoid = replace(CASE, model=replace(CASE.model, router="sigmoid"))
    assert rules(found_with(sigmoid)) == {"weights"}
    twice = replace(CASE, train=replace(CASE.train, accumulation=2))
    assert "calls" in rules(found_with(twice))
    assert found_with() == []


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_the_bias_moves_by_what_the_tokens_ask_for_and_by_nothing_else(biases: list[float]) -> None:
    balanced = replace(CASE, model=replace(CASE.model, balance=True))
    tokens = [call_of(0).counts[expert] + call_of(1).counts[expert] for expert in range(4)]
    signs = [(count < 3) - (count > 3) for count in tokens]
    moved = [1e-3 * (sign - sum(signs) / 4) for sign in signs]
    assert found_with(balanced, moved) == []
    is_right = all(abs(one - other) <= 1e-7 for one, other in zip(biases, moved, strict=True))
    assert rules(found_with(balanced, biases)) == (set() if is_right else {"bias"})


def test_a_mixture_that_is_balanced_has_a_bias() -> None:
    balanced = replace(CASE, model=replace(CASE.model, balance=True))
    traces = (make_trace(rank=rank, experts=ExpertTrace(calls=(call_of(rank),), biases=())) for rank in (0, 1))
    findings = check_routing(balanced, run_of(*traces), make_witnesses(balanced))
    assert [finding.module for finding in findings if finding.rule == "routing/bias"] == [FQN]
