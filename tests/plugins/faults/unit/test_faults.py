"""The list of injected faults: complete, well-formed, and reachable from the command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from harness.checks.catalogue import CHECKS, OF_NO_CASE, RULES
from harness.checks.check import Rule
from harness.errors import HarnessError
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.rules import exclusions, expected_refusal
from harness.matrix.selector import parse_selector
from harness.plugins.faults.faults import (
    FAULT_CLASSES,
    FaultClass,
    Headline,
    all_faults,
    all_hosts,
    fault_named,
    host_ids,
    host_kind,
)
from harness.plugins.faults.kills import catalogue, read_kills
from harness.plugins.faults.mutation import hosts_among
from harness.project import find_project
from harness.report.sections import text_of
from harness.running.plan import parse_injection
from harness.running.selection import Query
from tests.builders import a_finding

FAULTS = tuple(all_faults().values())


def test_every_class_has_faults_that_must_be_found():
    must = [fault for fault in FAULTS if fault.equivalent is None]
    assert len(must) >= 44
    for group in FAULT_CLASSES:
        assert sum(fault.group == group for fault in must) >= 4, group


def test_every_rule_is_broken_by_a_planted_fault_or_says_what_alone_breaks_it_and_has_a_test():
    recorded = read_kills(find_project().root)
    assert recorded is not None
    broken = {rule for cases in recorded.found.values() for kill in cases.values() for rule in kill.rules}
    of_cases = {name: rule for name, rule in RULES.items() if name not in OF_NO_CASE}  # the others have their own tests
    assert {name for name, rule in of_cases.items() if (name in broken) == bool(rule.only)} == set()
    for check in CHECKS:
        assert {f"{check.name}/{name}" for name in check.declares.only} <= RULES.keys()
    constants = [item for name, part in sys.modules.items() if "harness.checks." in name for item in vars(part).items()]
    words = [(rule.name, word) for word, rule in constants if isinstance(rule, Rule)]
    words += [(name, f'"{name}"') for name in RULES]
    words += [(name, f"RULES.{name.partition('/')[2].replace('-', '_')}") for name in RULES]
    text = "".join(path.read_text() for path in Path("tests").rglob("test_*.py"))
    told = set(re.findall(r'"[\w/-]+"|RULES\.\w+|\w+', text))
    named = {rule for rule, word in words if word in told}
    of_every_check = ("/no-record", "/no-reference")  # in `test_checks_judge.py`
    assert {name for name in RULES if RULES[name].only and not name.endswith(of_every_check)} <= named


def test_rules_allow_every_host_case():
    allowed = {case_id(case): [rule.name for rule in exclusions(case)] for case in all_hosts()}
    assert {name: rules for name, rules in allowed.items() if rules} == {}


def test_a_fault_is_well_formed_and_has_hosts():
    for fault in FAULTS:
        assert fault.title
        assert fault.link.startswith("https://"), fault.name
        assert all(parse_selector(text).terms for text in fault.where), fault.name
        assert fault.since_step >= 1, fault.name
        assert (fault.equivalent is not None) == (fault.shows == "nothing"), fault.name
        hosts = fault.hosts(at_most=2)
        assert 1 <= len(hosts) <= 2, fault.name
        assert all(fault.applies(case) for case in hosts), fault.name
        assert all(fault.since_step <= case.train.steps for case in hosts), fault.name


def test_faults_are_in_the_order_of_their_classes_and_argued():
    for fault in FAULTS:
        assert fault.equivalent is None or len(fault.equivalent.split()) > 8
    groups = [fault.group for fault in FAULTS]
    assert groups == sorted(groups)


def test_every_class_demands_a_headline_and_what_a_fault_does_without_has_a_reason():
    assert tuple(FAULT_CLASSES) == get_args(FaultClass)
    for group, demand in FAULT_CLASSES.items():
        assert "cause" in demand.names and demand.cause and demand.misleads, group
        assert not set(demand.cause) & set(demand.misleads), group
    for fault in FAULTS:
        headline = fault.headline
        assert set(headline.unnamed) < set(FAULT_CLASSES[fault.group].names), fault.name
        assert bool(headline.unnamed) == bool(headline.why), fault.name
        assert not any(getattr(headline, name) for name in headline.unnamed), fault.name
        assert fault.shows != "crash" or headline.cause, f"{fault.name}: which exception, or which collective?"


def test_carriers_train_but_for_the_one_that_must_be_refused_and_carry_something():
    refused = [name for name in host_ids() if expected_refusal(parse_case_id(name)) is not None]
    assert refused == [host_ids()[-1]]
    for fault in FAULTS:
        refusals = {expected_refusal(case) is not None for case in fault.hosts(at_most=9)}
        assert refusals == {fault.shows == "trains"}
    used = {case_id(case) for fault in FAULTS for case in fault.hosts(at_most=9)}
    assert used >= set(host_ids())


def test_carriers_are_of_different_kinds_and_start_with_both_dtypes_of_one_layout():
    for fault in FAULTS:
        kinds = [host_kind(case) for case in fault.hosts(at_most=9)]
        assert len(set(kinds)) == len(kinds)
    first = fault_named("amax_without_abs").hosts(at_most=3)
    assert [case_id(case) for case in first] == [
        "single-tensorwise-v2048-f64",
        "single-tensorwise-v2048-b16",
        "fsdp2-tensorwise-v2048-f64",
    ]


def test_the_carriers_of_a_foreign_target_are_the_usual_ones_trained_by_it():
    faults = [fault_named(name) for name in ("amax_without_abs", "rope_base_of_another_model")]
    hosts = hosts_among(find_project(), faults, Query(target="my_pkg.net"), at_most=2)
    ids = {name: [case_id(case) for case in cases] for name, cases in hosts.items()}
    usual = [case_id(case) for case in faults[0].hosts(at_most=2)]
    assert ids["amax_without_abs"] == [f"target.my_pkg.net-{name}" for name in usual]
    assert ids["rope_base_of_another_model"] == []  # only the reference target has what it changes


def test_a_fault_can_be_injected_by_name_and_a_mistyped_one_gets_a_suggestion():
    injection = parse_injection("fault:amax_without_abs")
    assert injection.text == injection.target == "fault:amax_without_abs"
    with pytest.raises(HarnessError, match="amax_without_abs"):
        fault_named("amax_without_ab")
    with pytest.raises(HarnessError, match="amax_without_abs"):
        parse_injection("fault:amax_without_ab")


@pytest.mark.parametrize(
    ("wanted", "misnamed"),
    [
        ({}, ()),
        ({"rule": "parity/*", "module": ("a", "layers.0.*"), "operand": "weight in forward", "rank": 1, "step": 2}, ()),
        ({"rank": "last"}, ()),
        ({"rank": "all"}, ("rank",)),
        ({"rank": 0}, ("rank",)),
        (
            {"rule": "scales/*", "module": "layers.0", "operand": "input*", "rank": 0, "step": 1},
            ("rule", "module", "operand", "rank", "step"),
        ),
    ],
)
def test_what_a_headline_misnames_is_told_by_field(wanted, misnamed):
    finding = replace(
        a_finding(rule="parity/gradients"), module="layers.0.wq", operand="weight in forward", rank=1, step=2
    )
    assert Headline(**wanted).misnamed(finding, world_size=2) == misnamed
    assert "rank" not in Headline(**wanted).misnamed(finding, world_size=1)


PLACE = {"module": "layers.0.attention.wq", "operand": "input in forward", "step": 1}


@pytest.mark.parametrize(
    ("message", "place", "misnamed"),
    [
        ("scale is off", PLACE, set()),
        ("rows are off by an upscale", PLACE | {"operand": ""}, {"operand", "cause"}),
        ("scale is off", PLACE | {"module": "layers.1.attention.wk"}, {"module", "misleading"}),
        ("the scale of labels", {}, {"module", "operand", "step", "misleading"}),
    ],
)
def test_a_class_demands_parts_of_the_place_and_a_word_of_the_cause(message, place, misnamed):
    fault, finding = fault_named("amax_without_abs"), a_finding(check="x", message=message, **place)
    assert set(fault.misnamed(finding, 2)) == misnamed
    if place.get("module"):  # in a target of one's own, a module has another name
        assert set(fault.misnamed(finding, 2, by_fqn=False)) == misnamed - {"module", "misleading"}


def test_a_crash_demands_its_exception_alone():
    crash = replace(fault_named("rowwise_axis_swapped"), headline=Headline(cause="valueerror"))
    for error, misnamed in (("ValueError", ()), ("KeyError", ("cause",))):
        assert crash.misnamed(a_finding(rule="engine/raised", message=f"rank 0: {error}: x"), 2) == misnamed


@pytest.mark.parametrize("named", [{"rank": None}, {"rank": 0, "ranks": (0, 1)}])
def test_a_number_of_all_ranks_names_none_or_every_one(named):
    assert Headline(rank="all").misnamed(replace(a_finding(rule="parity/loss"), **named), world_size=2) == ()
    assert Headline(rank="last").misnamed(replace(a_finding(rule="parity/loss"), **named), world_size=2) == ("rank",)


def test_the_catalogue_has_every_fault_by_the_check_that_finds_it_or_by_class() -> None:
    project = find_project(None)
    found = text_of(catalogue(project, ()))
    assert [name for name, fault in all_faults().items() if name not in found and not fault.equivalent] == []
    of_scales = text_of(catalogue(project, ("scales",)))
    assert "scales/amax" in of_scales and "traffic/volume" not in of_scales
    of_class = text_of(catalogue(project, ("I",)))
    assert all((name in of_class) == (fault.group == "I") for name, fault in all_faults().items())
    with pytest.raises(HarnessError, match="did you mean scales"):
        catalogue(project, ("scale",))
