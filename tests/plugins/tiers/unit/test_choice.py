"""The choice of a tier: it covers everything, carries every planted fault, costs less, and is always the same."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.casefile import CaseFile, parse_case_file
from harness.matrix.caseid import case_id
from harness.matrix.choice import Price, carried, read_chosen
from harness.matrix.rules import exclusions, expected_refusal
from harness.matrix.tier import coverage, select, tier_spaces
from harness.plugins.faults.faults import all_faults
from harness.plugins.tiers.choose import CheapCover, choose, chosen_file
from tests.builders import make_known

SMALL = """
[select]
strength = 2
max_world_size = 8
[base]
dtype = "float64"
[[matrix]]
name = "layouts"
[matrix.axes]
dp_shard = [1, 2, 4]
tp = [1, 2, 8]
recipe = ["bf16", "tensorwise", "rowwise"]
checkpointing = ["none", "full"]
"""


def small() -> CaseFile:
    return parse_case_file(SMALL, where="small.toml")


def by_ranks(case: Case) -> Price:
    """A rank costs one second, and cases of one recipe share a witness of three seconds."""
    return Price(own_s=float(case.world_size), shared_s={case.float8.recipe: 3.0})


def cost_s(cases: list[Case]) -> float:
    shared: dict[str, float] = {}
    for case in cases:
        shared |= by_ranks(case).shared_s
    return sum(by_ranks(case).own_s for case in cases) + sum(shared.values())


def test_a_choice_covers_what_a_covering_array_covers_and_costs_less() -> None:
    file = small()
    array = select(file)
    chosen = choose(file, by_ranks, known=(), faults=(), rounds=100)
    cases = [chosen_case.case for chosen_case in chosen]
    selection = select(file, chosen=cases)
    assert coverage(selection, 2).counts == coverage(array, 2).counts
    assert cost_s(cases) < cost_s(list(array.cases))


def test_more_rounds_never_cost_more_and_a_choice_is_always_the_same() -> None:
    chosen = (choose(small(), by_ranks, known=(), faults=(), rounds=rounds) for rounds in (0, 10, 100))
    costs = [cost_s([chosen_case.case for chosen_case in cases]) for cases in chosen]
    assert costs == sorted(costs, reverse=True)
    first, second = (choose(small(), by_ranks, known=(), faults=(), rounds=30) for _ in range(2))
    assert chosen_file("small", first) == chosen_file("small", second)


def test_what_is_given_is_not_paid_for_again() -> None:
    spaces = tier_spaces(small(), ())
    everything = list(filter(_trains, map(spaces[0].case, itertools.product(*map(range, spaces[0].sizes)))))
    assert CheapCover(spaces, 2, everything, by_ranks).choose(0) == []


def _trains(case: Case) -> bool:
    return not exclusions(case) and expected_refusal(case) is None and case.world_size <= 8


def test_a_case_with_a_recorded_fault_that_has_a_fix_covers_and_costs_twice() -> None:
    file = small()
    fault = make_known(where="tp=8 recipe=rowwise", fix="x.py:apply")
    chosen = [chosen_case.case for chosen_case in choose(file, by_ranks, known=[fault], faults=(), rounds=20)]
    assert coverage(select(file, known=[fault], chosen=chosen), 2).counts["known"] == 0
    for chosen_case in choose(file, by_ranks, known=[fault], faults=(), rounds=0):
        case = chosen_case.case
        twice = case.layout.tp == 8 and case.float8.recipe == "rowwise"
        assert chosen_case.cost_cpu_s == by_ranks(case).own_s * (2 if twice else 1)


def test_a_case_with_a_recorded_fault_covers_nothing_that_another_can() -> None:
    file, fault = small(), make_known(where="tp=8 recipe=rowwise")
    chosen = choose(file, by_ranks, known=[fault], faults=(), rounds=20)
    selection = select(file, known=[fault], chosen=[chosen_case.case for chosen_case in chosen])
    account = coverage(selection, 2)
    assert account.counts["known"] == 1, "tp=8 with rowwise exists in no other case"
    assert account.counts["skipped"] == 0
    assert [chosen_case.reason for chosen_case in chosen if case_id(chosen_case.case).startswith("tp8-rowwise")] == [
        "has a known issue: no other case can cover this"
    ]


def test_a_choice_that_leaves_something_out_is_refused() -> None:
    file = small()
    chosen = [chosen_case.case for chosen_case in choose(file, by_ranks, known=(), faults=(), rounds=0)]
    expensive = max(chosen, key=lambda case: case.world_size)
    with pytest.raises(HarnessError, match=r"leave \d+ combinations of 'layouts' uncovered.*dev tier small"):
        select(file, chosen=[case for case in chosen if case != expensive])


@pytest.mark.plugin("faults")
def test_every_fault_is_carried() -> None:

    faults = list(all_faults().values())
    chosen = choose(small(), by_ranks, known=(), faults=faults, rounds=0)
    shown = {fault.name for picked in chosen for fault in carried(picked.case, faults, ())}
    assert shown == {fault.name for fault in faults if fault.since_step <= 5}, "a late step is for longer tiers"


def test_a_chosen_file_comes_back_and_a_damaged_one_names_its_line(tmp_path: Path) -> None:
    chosen = choose(small(), by_ranks, known=(), faults=(), rounds=0)
    path = tmp_path / "chosen.toml"
    path.write_bytes(chosen_file("small", chosen))
    read, wrote = ([(one.case, one.reason) for one in cases] for cases in (read_chosen(path), chosen))
    assert read == wrote
    path.write_text('[[case]]\nid = "tp2-nonsense-v2048-f64"\n')
    with pytest.raises(HarnessError, match=r"chosen.toml:1: unknown token 'nonsense'"):
        read_chosen(path)


def test_a_block_may_ask_for_smaller_worlds_and_for_pairs_that_are_not_combined() -> None:
    text = SMALL.replace("[matrix.axes]", 'pair_only = {tp = ["recipe"]}\n[matrix.axes]')
    file = parse_case_file(text, where="small.toml")
    pairs = [{word.partition("=")[0] for word in entry.values} for entry in coverage(select(file), 2).tuples]
    assert {"tp", "dp_shard"} not in pairs and {"tp", "recipe"} in pairs
    file = parse_case_file(SMALL.replace("[matrix.axes]", "max_world_size = 2\n[matrix.axes]"), where="small.toml")
    assert max(case.world_size for case in select(file).cases) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('pair_only = {tp = "recipe"}', "'tp' needs a list of axes"),
        ('pair_only = {tp = ["recipes"]}', "unknown axis 'recipes'.*did you mean recipe"),
        ('pair_only = {pt = ["recipe"]}', "unknown key 'pt'"),
        ("max_world_size = 0", "use a number from 1"),
    ],
)
def test_bad_blocks_are_refused(line: str, message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        parse_case_file(SMALL.replace("[matrix.axes]", f"{line}\n[matrix.axes]"), where="small.toml")
