"""The matrix: every possible combination is covered, nothing impossible is selected, and it is always the same.

And parts of a selection: what fits into a budget, and shards of equal cost.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.axes import axis_values
from harness.matrix.case import Case
from harness.matrix.casefile import AxisGroup, Block, CaseFile, Strength, parse_case_file, read_case_file
from harness.matrix.caseid import case_id
from harness.matrix.choice import Price, Pricing, Shard, cases_of_shard, parse_shard, shards, within_budget
from harness.matrix.rules import exclusions, expected_refusal
from harness.matrix.space import Row, Space, combinations_in, spaces_of
from harness.matrix.tier import Coverage, Selection, coverage, select
from harness.project import find_project
from harness.running.selection import Query, select_cases
from tests.builders import make_case

_VALUES: dict[str, list[object]] = {
    "tp": [1, 2, 4, 3],
    "dp_shard": [1, 2, 8],
    "recipe": ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"],
    "fp8_all_gather": [False, True],
    "output_layer": [False, True],
    "pad_inner_dim": [False, True],
    "vocab_size": [2048, 2256, 2050],
    "seq_len": [32, 40],
    "compile": ["none", "graph"],
    "loss_parallel": [True, False],
}


def make_file(axes: dict[str, list[object]], *, strength: Strength = 2, cases: tuple[Case, ...] = ()) -> CaseFile:
    groups = tuple(
        AxisGroup(name=name, values=tuple({name: value} for value in values)) for name, values in axes.items()
    )
    block = Block(name="block", base={}, groups=groups)
    return CaseFile(name="test", where="test.toml", strength=strength, max_world_size=8, blocks=(block,), cases=cases)


def all_rows(space: Space) -> list[Row]:
    return list(itertools.product(*map(range, space.sizes)))


def possible(space: Space, row: Row) -> bool:
    """Judged on the whole case, without the space's tables."""
    case = space.case(row)
    asked = {name: value for i, group in enumerate(space.block.groups) for name, value in group.values[row[i]].items()}
    kept = axis_values(case)
    meaningful = all(kept[name] == value for name, value in asked.items())
    return meaningful and case.world_size <= 8 and not exclusions(case)


@given(st.data(), st.sampled_from([2, 3]))
def test_the_cover_against_brute_force(data: st.DataObject, strength: Strength) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(_VALUES)), min_size=1, max_size=5, unique=True))
    file = make_file({name: _VALUES[name] for name in names}, strength=strength)
    (space,) = spaces_of(file.blocks, file.max_world_size)
    assert isinstance(strength, int)
    rows = [row for row in all_rows(space) if possible(space, row)]
    training = [row for row in rows if expected_refusal(space.case(row)) is None]
    selection = select(file)
    chosen = [row for case in selection.cases if (row := space.row_of(case)) is not None]
    assert len(chosen) == len(selection.cases)
    assert set(chosen) <= set(rows)
    trained = [row for row in chosen if row in set(training)]
    assert combinations_in(trained, strength) == combinations_in(training, strength)
    assert combinations_in(chosen, strength) == combinations_in(rows, strength)


def test_full_takes_every_possible_cell() -> None:
    file = make_file({"tp": [1, 2, 3], "recipe": ["bf16", "rowwise"], "output_layer": [False, True]}, strength="full")
    (space,) = spaces_of(file.blocks, file.max_world_size)
    assert [space.row_of(case) for case in select(file).cases] == [r for r in all_rows(space) if possible(space, r)]


def test_cells_are_counted_by_rule() -> None:
    selection = select(make_file({"tp": [1, 3], "recipe": ["bf16", "rowwise"], "fp8_all_gather": [False, True]}))
    assert selection.candidates == 8
    assert selection.excluded == {
        "all_gather_needs_fsdp": 2,
        "all_gather_needs_tensorwise": 2,
        "ffn_divides_tp": 4,
        "heads_divide_tp": 4,
        "ignored_option": 2,
        "sequence_divides_tp": 4,
    }
    assert [case_id(case) for case in selection.cases] == ["single-bf16-v2048-f32", "single-rowwise-v2048-f32"]


def test_must_run_cases_come_first_and_once() -> None:
    must = (Case(), *select(make_file({"recipe": ["rowwise"], "tp": [2]})).cases)
    selection = select(make_file({"tp": [1, 2], "recipe": ["rowwise", "bf16"]}, cases=must))
    assert selection.cases[: len(must)] == must
    assert len(set(map(case_id, selection.cases))) == len(selection.cases) == 4


def test_a_combination_that_is_always_refused_is_still_run() -> None:
    cases = select(
        make_file({"recipe": ["tensorwise"], "vocab_size": [2048, 2050], "output_layer": [False, True]})
    ).cases
    assert [case_id(case) for case in cases if expected_refusal(case)] == ["single-tensorwise-head.fp8-v2050-f32"]
    assert len(cases) == 4


def test_nothing_possible_is_an_empty_selection_and_sizes_that_do_not_fit_are_refused() -> None:
    assert select(make_file({"tp": [3]})).empty
    assert not select(make_file({"tp": [1]})).empty
    file = parse_case_file('[[matrix]]\nname = "m"\naxes = {heads = [3, 4], tp = [1, 2]}\n', where="f.toml")
    with pytest.raises(HarnessError, match=r"f.toml: matrix 'm': .*does not split into 3 heads"):
        select(file)


def account(axes: str, strength: int = 2, *, head: str = "") -> Coverage:
    file = parse_case_file(f'{head}\n[[matrix]]\nname = "m"\n[matrix.axes]\n{axes}\n', where="f.toml")
    return coverage(select(file), strength)


def test_a_case_is_found_where_a_value_of_its_group_is_part_of_another(tmp_path: Path) -> None:
    layouts = "[{}, {tp = 2}, {dp_shard = 2}, {dp_shard = 2, tp = 2}]"
    path = tmp_path / "m.toml"
    path.write_text(f'[[matrix]]\nname = "m"\n[matrix.axes]\nlayout = {layouts}\nrecipe = ["bf16", "tensorwise"]\n')
    file = read_case_file(path)
    selection = select(file)
    assert {case.world_size for case in selection.cases} == {1, 2, 4} and len(selection.cases) == 8
    assert coverage(selection, 2).counts["skipped"] == 0
    assert file.blocks[0].groups[0].label(0) == "{}"


def test_what_is_covered_refused_and_beyond_the_strength() -> None:
    file_coverage = account("tp = [1, 2]\nvocab_size = [2048, 2560]")
    assert file_coverage.counts == {"covered": 4, "known": 0, "refused": 0, "skipped": 0, "excluded": 0}
    file_coverage = account('tp = [1, 2]\ndp_shard = [1, 2]\ndtype = ["float32", "bfloat16"]', 3)
    assert file_coverage.counts["skipped"] > 0
    assert file_coverage.counts["covered"] + file_coverage.counts["skipped"] == 8
    file_coverage = account('recipe = ["tensorwise"]\noutput_layer = [false, true]\nvocab_size = [2048, 2050]')
    assert [combination.values for combination in file_coverage.of("refused")] == [
        ("output_layer=true", "vocab_size=2050")
    ]


def test_rules_are_named_alone_and_where_they_only_together_forbid() -> None:
    (excluded,) = account('recipe = ["rowwise"]\ndp_shard = [1]\nfp8_all_gather = [true]').of("excluded")[:1]
    assert excluded.rules == ("all_gather_needs_tensorwise",)
    file_coverage = account('tp = [1, 2]\nrecipe = ["bf16", "rowwise", "tensorwise"]\ntp_styles = ["plain", "float8"]')
    fates = {combination.values: combination for combination in file_coverage.tuples}
    at_tp_1 = fates["tp=1", "tp_styles=float8"]
    assert at_tp_1.fate == "excluded"
    assert set(at_tp_1.rules) == {"ignored_option", "tp_styles_need_tp"}
    assert fates["recipe=rowwise", "tp_styles=float8"].rules == ("tp_styles_need_tensorwise",)


ROOT = Path(__file__).parents[2]
FILE = parse_case_file(
    """
[select]
strength = 2
[[matrix]]
name = "layouts"
[matrix.axes]
tp = [1, 2, 4]
recipe = ["bf16", "tensorwise", "rowwise"]
checkpointing = ["none", "full"]
""",
    where="small.toml",
)
SELECTION: Selection = select(FILE)


def by_ranks(case: Case) -> Price:
    return Price(own_s=float(case.world_size), shared_s={case.float8.recipe: 1.0})


@given(st.floats(min_value=0, max_value=80))
def test_everything_is_kept_or_named_and_the_budget_holds(budget_cpu_s: float) -> None:
    budgeted = within_budget(SELECTION.cases, [SELECTION], by_ranks, faults=(), budget_cpu_s=budget_cpu_s)
    assert set(budgeted.cases) | set(budgeted.left_out) == set(SELECTION.cases)
    assert not set(budgeted.cases) & set(budgeted.left_out)
    shared = {name: cost_s for case in budgeted.cases for name, cost_s in by_ranks(case).shared_s.items()}
    assert budgeted.cost_cpu_s == pytest.approx(sum(case.world_size for case in budgeted.cases) + sum(shared.values()))
    assert budgeted.cost_cpu_s <= budget_cpu_s


def test_the_first_case_covers_most_per_second_and_a_large_budget_keeps_all_in_order() -> None:
    budgeted = within_budget(SELECTION.cases, [SELECTION], by_ranks, faults=(), budget_cpu_s=2)
    assert [case.world_size for case in budgeted.cases] == [1]
    budgeted = within_budget(SELECTION.cases, [SELECTION], by_ranks, faults=(), budget_cpu_s=1e6)
    assert budgeted.cases == SELECTION.cases and not budgeted.left_out


WITNESSES = st.dictionaries(st.sampled_from("abc"), st.floats(0, 50), max_size=2)
PRICES = st.lists(st.builds(Price, own_s=st.floats(0.1, 100), shared_s=WITNESSES), min_size=1, max_size=12)


def cases(count: int) -> list[Case]:
    return [make_case(seed=seed) for seed in range(count)]


def pricing(prices: list[Price]) -> Pricing:
    return lambda case: prices[case.train.seed]


@given(PRICES, st.integers(1, 15), st.randoms(use_true_random=False))
def test_every_case_is_in_one_shard_whatever_the_order(prices: list[Price], count: int, random: Random) -> None:
    given_cases, price = cases(len(prices)), pricing(prices)
    mixed = list(given_cases)
    random.shuffle(mixed)
    parts = shards(given_cases, count, price)
    assert sorted(name for part in parts for name in part) == sorted(map(case_id, given_cases))
    assert shards(mixed, count, price) == parts
    assert all(parts) or count > len(prices), "an empty shard, although there are cases enough"
    of_each = [cases_of_shard(given_cases, Shard(index=i + 1, count=count), price) for i in range(count)]
    assert [{case_id(case) for case in part} for part in of_each] == [set(part) for part in parts]


@given(PRICES, st.integers(1, 6))
def test_no_shard_has_more_to_do_than_its_share_and_one_case(prices: list[Price], count: int) -> None:
    price = pricing(prices)
    total_s = sum(case_price.extra_s(()) for case_price in prices)
    for part in shards(cases(len(prices)), count, price):
        own_s = sum(price(case).own_s for case in cases(len(prices)) if case_id(case) in part)
        assert own_s <= total_s / count + max(case_price.extra_s(()) for case_price in prices) + 1e-9


def test_dear_cases_and_witnesses_have_shards_of_their_own_and_an_empty_one_selects_nothing() -> None:
    price = pricing([Price(own_s=1.0)] * 6 + [Price(own_s=6.0)])
    assert sorted(map(len, shards(cases(7), 2, price))) == [1, 6]
    price = pricing([Price(own_s=1.0, shared_s={"ab"[seed % 2]: 50.0}) for seed in range(6)])
    even, odd = sorted(
        [case.train.seed % 2 for case in cases_of_shard(cases(6), Shard(index=index, count=2), price)]
        for index in (1, 2)
    )
    assert (even, odd) == ([0, 0, 0], [1, 1, 1])
    query = Query(sources=("single-bf16-v2048-b16",), shard=Shard(index=2, count=2))
    assert select_cases(find_project(ROOT), query) == ()


@pytest.mark.parametrize(
    "text", ["", "1", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b", "1 /2", "\u0661/\u0662", "1/2\n"]
)
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(HarnessError, match="1/4"):
        parse_shard(text)


def test_a_shard_is_written_as_it_is_read() -> None:
    assert parse_shard("2/4").text == "2/4"
