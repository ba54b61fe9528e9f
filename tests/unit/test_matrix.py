"""The matrix: every possible combination is covered, nothing impossible is selected, and it is always the same."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.matrix.axes import axis_values
from harness.matrix.case import Case
from harness.matrix.casefile import AxisGroup, Block, CaseFile, Strength, parse_case_file, read_case_file
from harness.matrix.caseid import case_id
from harness.matrix.rules import exclusions, expected_refusal
from harness.matrix.space import Row, Space, combinations_in, spaces_of
from harness.matrix.tier import Coverage, coverage, select

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
