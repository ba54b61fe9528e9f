"""The coverage account: every combination has one fate, and impossible ones name their rules."""

from __future__ import annotations

from pathlib import Path

from harness.matrix.casefile import parse_case_file, read_case_file
from harness.matrix.coverage import FATES, Coverage, coverage
from harness.matrix.tier import select

CASES = Path(__file__).parents[2] / "cases"


def account(axes: str, strength: int = 2, *, head: str = "") -> Coverage:
    file = parse_case_file(f'{head}\n[[matrix]]\nname = "m"\n[matrix.axes]\n{axes}\n', where="f.toml")
    return coverage(select(file), strength)


def test_everything_possible_is_covered_at_the_strength_of_the_file() -> None:
    found = account("tp = [1, 2]\nvocab_size = [2048, 2560]")
    assert found.counts == {"covered": 4, "known": 0, "refused": 0, "skipped": 0, "excluded": 0}


def test_a_single_rule_is_named() -> None:
    (excluded,) = account('recipe = ["rowwise"]\ndp_shard = [1]\nfp8_all_gather = [true]').of("excluded")[:1]
    assert excluded.rules == ("all_gather_needs_tensorwise",)


def test_rules_that_only_together_forbid_are_all_named() -> None:
    found = account('tp = [1, 2]\nrecipe = ["bf16", "rowwise", "tensorwise"]\ntp_styles = ["plain", "float8"]')
    fates = {combination.values: combination for combination in found.tuples}
    at_tp_1 = fates["tp=1", "tp_styles=float8"]
    assert at_tp_1.fate == "excluded"
    assert set(at_tp_1.rules) == {"ignored_option", "tp_styles_need_tp"}
    assert fates["recipe=rowwise", "tp_styles=float8"].rules == ("tp_styles_need_tensorwise",)


def test_refused_means_that_no_case_can_train() -> None:
    found = account('recipe = ["tensorwise"]\noutput_layer = [false, true]\nvocab_size = [2048, 2050]')
    assert [combination.values for combination in found.of("refused")] == [("output_layer=true", "vocab_size=2050")]


def test_triples_beyond_the_strength_are_skipped() -> None:
    found = account('tp = [1, 2]\ndp_shard = [1, 2]\ndtype = ["float32", "bfloat16"]', 3)
    assert found.counts["skipped"] > 0
    assert found.counts["covered"] + found.counts["skipped"] == 8


def test_the_pr_tier_covers_every_pair() -> None:
    found = coverage(select(read_case_file(CASES / "pr.toml")), 2)
    assert found.counts["skipped"] == 0
    assert sum(found.counts[fate] for fate in FATES) == len(found.tuples)
    assert all(combination.rules for combination in found.of("excluded"))
    assert set(found.by_rule) == {name for combination in found.tuples for name in combination.rules}
