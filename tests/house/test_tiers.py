"""The tiers of this repository: their sizes, what they cover and carry, what they cost and how they are divided."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.evidence.costs import read_costs
from harness.matrix.case import Case
from harness.matrix.casefile import read_case_file
from harness.matrix.caseid import case_id, family_id, parse_case_id
from harness.matrix.choice import Shard, carried, chosen_path, contained, read_chosen
from harness.matrix.records import read_known, read_quarantine, read_required
from harness.matrix.rules import exclusions
from harness.matrix.tier import FATES, Selection, coverage, select, tier_spaces
from harness.plugins.faults.faults import all_faults
from harness.project import find_project
from harness.running.selection import (
    START_S,
    NothingSelected,
    Query,
    cases_within,
    in_shard,
    select_cases,
    select_sources,
)

ROOT = Path(__file__).parents[2]
CASES = ROOT / "cases"
PR = CASES / "pr.toml"
PROJECT = find_project(ROOT)
KNOWN = read_known(CASES / "known.toml")
CHOSEN = read_chosen(chosen_path(PR))
NIGHTLY = pytest.param("nightly", marks=pytest.mark.sweep)  # choosing its cases takes as long as 40 tests


@functools.cache
def tier_selection(tier: str) -> Selection:
    """As it is without the stored choice."""
    return select(read_case_file(CASES / f"{tier}.toml"))


@functools.cache
def cases_of_pr() -> tuple[Case, ...]:
    return select_cases(PROJECT, Query(sources=("pr",)))


@pytest.mark.parametrize("tier", ["smoke", "pr", NIGHTLY])
def test_tiers(tier: str) -> None:
    selection = tier_selection(tier)
    ids = [case_id(case) for case in selection.cases]
    assert len(set(ids)) == len(ids)
    assert selection.cases[: len(selection.file.cases)] == selection.file.cases
    assert not any(exclusions(case) for case in selection.cases)
    assert max(case.world_size for case in selection.cases) <= 8
    sizes = {"smoke": (6, 10), "pr": (60, 123), "nightly": (400, 1035)}
    low, high = sizes[tier]
    assert low <= len(ids) <= high
    assert len({family_id(case) for case in selection.cases}) <= 53


@pytest.mark.parametrize("tier", ["pr", NIGHTLY])
def test_the_matrix_tiers_hold_every_layout_of_the_project(tier: str) -> None:
    layouts = {
        *((1, 1, tp) for tp in (1, 2, 4, 8)),
        *((1, shard, 1) for shard in (2, 3, 4, 5, 6, 8)),
        *((2, 1, 1), (4, 1, 1)),
        *((2, 2, 1), (2, 4, 1), (4, 2, 1)),
        *((1, 2, 2), (1, 2, 4), (1, 4, 2), (2, 2, 2)),
    }
    if tier == "pr":  # nightly has these
        layouts -= {(1, 5, 1), (1, 6, 1), (4, 2, 1), (1, 2, 4), (1, 4, 2)}
    cases = [case.layout for case in tier_selection(tier).cases]
    assert {(layout.dp_replicate, layout.dp_shard, layout.tp) for layout in cases} == layouts


def test_the_selection_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "import sys, pathlib; from harness.matrix.casefile import read_case_file;"
        "from harness.matrix.tier import select;"
        "from harness.matrix.caseid import case_id; assert 'torch' not in sys.modules and 'numpy' not in sys.modules;"
        "print(*map(case_id, select(read_case_file(pathlib.Path(sys.argv[1]))).cases))"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", code, str(CASES / "pr.toml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    here = [case_id(case) for case in tier_selection("pr").cases]
    assert done.stdout.split() == here
    assert len(here) > 30


def test_the_pr_tier_and_its_chosen_cases_cover_every_pair() -> None:
    account = coverage(tier_selection("pr"), 2)
    assert account.counts["skipped"] == 0
    assert sum(account.counts[fate] for fate in FATES) == len(account.tuples)
    assert all(combination.rules for combination in account.of("excluded"))
    assert set(account.by_rule) == {name for combination in account.tuples for name in combination.rules}
    cases = [chosen.case for chosen in CHOSEN]
    account = coverage(select(read_case_file(PR), known=KNOWN, chosen=cases), 2)
    assert account.counts["skipped"] == 0
    assert account.counts["covered"] > 500


@pytest.mark.plugin("faults")
def test_every_planted_fault_can_show_in_a_case_of_pr() -> None:

    faults = list(all_faults().values())
    carries = {fault.name for chosen in CHOSEN for fault in carried(chosen.case, faults, KNOWN)}
    slow = {fault.name for fault in faults if all("steps>=12" in scope for scope in fault.where)}  # pr has no such case
    assert carries | slow == set(all_faults())


def test_every_chosen_case_of_pr_has_a_reason_and_is_needed() -> None:
    file = read_case_file(PR)
    assert all(chosen.reason and chosen.cost_cpu_s > 0 for chosen in CHOSEN)
    must = {case_id(case) for case in file.cases}
    spaces = tier_spaces(file, KNOWN)
    assert file.strength != "full"
    goals = {case_id(chosen.case): contained(chosen.case, spaces, file.strength) for chosen in CHOSEN}
    for chosen in CHOSEN:
        name = case_id(chosen.case)
        others = set().union(*(other_goals for other, other_goals in goals.items() if other != name))
        assert name in must or goals[name] - others or "fault" in chosen.reason or "refused" in chosen.reason, name


def test_the_costs_of_the_project_are_plausible() -> None:
    costs = read_costs(ROOT)
    assert costs.typical_error < 0.15
    small, large = (costs.case_s(parse_case_id(f"tp{tp}-rowwise-v2048-f64")) for tp in (2, 8))
    assert 3 < large / small < 5, "a rank costs what a rank costs"
    eager, compiled = (costs.case_s(parse_case_id(f"tp2-rowwise{word}-v2048-f64")) for word in ("", "-graph"))
    assert compiled > 2 * eager
    refused = costs.price(parse_case_id("tp2-tensorwise-head.fp8-v2256-f64"))
    assert not refused.shared_s and refused.own_s < small


def test_seconds_of_this_machine_choose_from_the_pr_tier() -> None:
    cases, selections = cases_of_pr(), select_sources(PROJECT, Query(sources=("pr",)))
    minute, hour = (cases_within(PROJECT, cases, selections, seconds) for seconds in (60, 3600 * 10))
    assert 0 < len(minute.cases) < len(cases)
    assert not hour.left_out
    with pytest.raises(NothingSelected, match="no case fits"):
        cases_within(PROJECT, cases, selections, START_S)


def test_a_tier_is_divided_evenly_and_by_stored_costs_alone() -> None:
    price = read_costs(ROOT).price
    chosen = cases_of_pr()
    parts = [in_shard(PROJECT, chosen, Shard(index=i, count=4)) for i in range(1, 5)]
    together = [case for part in parts for case in part]
    assert sorted(map(case_id, together)) == sorted(map(case_id, chosen))
    own_s = [sum(price(case).own_s for case in part) for part in parts]
    assert max(own_s) < 1.25 * min(own_s)


def test_tier_pr_has_what_our_releases_require() -> None:
    entries = read_required(CASES / "required.toml")
    assert entries and [e.name for e in entries if sum(map(e.covers, cases_of_pr())) < e.at_least] == []
    assert read_quarantine(PROJECT.quarantine) == ()
