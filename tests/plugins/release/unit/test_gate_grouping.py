"""What moved, by origin: named changes of torch, recorded faults, our own side, and what nothing accounts for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from harness.checks.catalogue import signature_of
from harness.jsonform import to_json
from harness.matrix.records import KnownFault, Symptom
from harness.plugins.release.causes import Group, Origin
from harness.plugins.release.commands import gate_front, gate_markdown, gate_sections
from harness.plugins.release.gate import Gate, gate
from harness.plugins.release.sides import Kind, Topic
from harness.report.sections import Entry, Section, Table, text_of
from harness.result import CaseResult, Curve, Environment, Sent
from harness.verdict import FailureSignature, Verdict
from tests.builders import a_finding, make_attempt, make_failure, make_known, make_measured, make_results
from tests.plugins.release.unit.test_gate import TERMS, result

HERE = Environment(device="cpu", cpu="a CPU", threads=2, platform="Linux x86_64", commit="c0ffee")
OLD, NEW = ({"torch": version, "torchao": "0.18.0"} for version in ("2.13.0+cpu", "2.15.0"))
UNDER_TP = "fsdp2-tp2-tensorwise-v2048-s2-b16"  # norms are reduced over TP in float32 from torch 2.15 on
COMPILED = "tp2-nosp-tensorwise-tpstyle.fp8-ac.op-graph-v2256-s3-f64"  # casts twice from torch 2.14 on
EXACT = "tp2-rowwise-v2048-s2-f64"  # no named change is about it
ROUNDS = make_known(
    name="rounds",
    where="dtype=bfloat16 compile=graph",
    requires=(Symptom(rule="parity/gradients"),),
    torch=">=2.15",
    reason="Compiled blocks round.",
)
LOSES = replace(ROUNDS, name="loses", torch="==2.13.0", reason="Gradients are lost.")
GRAPH = "single-bf16-graph-v2048-s2-b16"
SHOWN = (
    a_finding(check="judge", message="known issue rounds"),
    a_finding(rule="parity/gradients", message="4 gradients differ by 2 %", verdict=Verdict.NUMERIC),
)
OTHER_WIRE = {"all_reduce (sum) in float32 along tp": Sent(calls=4, payload_bytes=4096)}
OTHER_NORM = {"case": Curve(losses=(8.0, 7.5), grad_norms=(1.0, 0.900000002))}


def compared(
    before: Sequence[CaseResult], after: Sequence[CaseResult], *faults: KnownFault, words: Sequence[str] = ()
) -> Gate:
    """The gate of torch 2.13.0 against 2.15.0."""
    sides = (
        make_results(*results, environment=replace(HERE, packages=packages))
        for results, packages in ((before, OLD), (after, NEW))
    )
    return gate(*sides, replace(TERMS, faults=faults), names=("torch-2.13.0", "torch-2.15.0"), words=words)


def only(decision: Gate) -> Group:
    (group,) = decision.groups
    return group


def moved(case_id: str, **changes: Any) -> Group:
    """The one group of a case that is good on both sides, with these numbers on the second."""
    return only(compared([result(case_id)], [result(case_id, measured=make_measured(**changes))]))


def known(*faults: KnownFault, **changes: Any) -> CaseResult:
    expectation = ", ".join(fault.name for fault in faults)
    return result(GRAPH, Verdict.KNOWN, expectation=expectation, findings=SHOWN, **changes)


def test_traffic_is_a_named_change_where_its_formula_says_so_and_gone_on_the_way_back() -> None:
    group = moved(UNDER_TP, wire=OTHER_WIRE)
    assert (group.origin, group.name, group.side) == (Origin.TORCH, "gradients-in-reduce-dtype", "candidate")
    assert group.moved == {Topic.TRAFFIC: (UNDER_TP,)} and group.link.startswith("https://")
    assert group.first.startswith("bytes of all_gather in uint8 along dp_shard: 4,096 -> none")
    assert group.command == f"fp8-harness run {UNDER_TP}"
    group = moved(EXACT, wire=OTHER_WIRE)
    assert (group.origin, group.name, group.side) == (Origin.UNEXPLAINED, Kind.WIRE.value, "")
    before, after = result(UNDER_TP), result(UNDER_TP, measured=make_measured(wire=OTHER_WIRE))
    environments = (replace(HERE, packages=packages) for packages in (NEW, OLD))
    sides = (make_results(case, environment=of) for case, of in zip((before, after), environments, strict=True))
    assert only(gate(*sides, TERMS)).side == "baseline"


def between_nights(before: CaseResult, after: CaseResult, *faults: KnownFault, found: Sequence[str] = ()) -> Group:
    """The one group of a nightly against the one before, in which these named changes were found."""
    nights = [replace(HERE, packages={"torch": f"2.15.0.dev202608{day}+cpu"}, upstream=()) for day in ("01", "02")]
    nights[1] = replace(nights[1], upstream=tuple(found))
    sides = (make_results(case, environment=of) for case, of in zip((before, after), nights, strict=True))
    return only(gate(*sides, replace(TERMS, faults=faults)))


def test_what_came_overnight_is_named_by_what_the_runs_found_and_what_shows() -> None:
    sent = result(UNDER_TP, measured=make_measured(wire=OTHER_WIRE))
    group = between_nights(result(UNDER_TP), sent, found=["gradients-in-reduce-dtype"])
    assert (group.origin, group.name, group.side) == (Origin.TORCH, "gradients-in-reduce-dtype", "candidate")
    assert between_nights(result(UNDER_TP), sent).origin is Origin.UNEXPLAINED
    group = between_nights(result(GRAPH), known(ROUNDS), ROUNDS, LOSES)
    assert (group.origin, group.name, group.side) == (Origin.TORCH, "rounds", "candidate")
    assert "--with torch==2.15.0.dev20260802" in group.command
    moved_alone = result(GRAPH, measured=make_measured(curves=OTHER_NORM))
    assert between_nights(result(GRAPH), moved_alone, ROUNDS).name != "rounds"  # nothing shows it


def test_of_two_builds_of_one_version_none_has_a_name() -> None:
    builds = ((result(EXACT), "2.15.0+cpu"), (failed(Verdict.NUMERIC, FAILED), "2.15.0+cu132"))
    sides = (make_results(case, environment=replace(HERE, packages={"torch": build})) for case, build in builds)
    assert "--with" not in only(gate(*sides, TERMS)).command


@pytest.mark.parametrize(
    "changes",
    [
        {"saved_bytes": 1096},
        {"digests": {"casts": "c2", "gradients": "g1"}},
        {"wire": {"all_gather in uint8 along dp_shard": Sent(calls=6, payload_bytes=6144)}},
    ],
)
def test_limits_move_where_another_formula_of_the_change_says_so(changes: dict[str, Any]) -> None:
    assert moved(COMPILED, **changes).name == "separate-backward-casts"
    assert moved(EXACT, **changes).origin is Origin.UNEXPLAINED


def test_numbers_follow_a_change_that_rounds_otherwise() -> None:
    group = moved("fsdp4-rowwise-v2048-s2-b16", curves=OTHER_NORM)
    assert (group.name, group.moved) == ("gradients-in-reduce-dtype", {Topic.GRADIENTS: group.cases})
    assert group.first == "gradient norm, step 2: 0.9 -> 0.900000002", "as many digits as tell the numbers apart"
    exact = moved(EXACT, curves=OTHER_NORM)
    assert (exact.origin, exact.name, exact.what) == (Origin.UNEXPLAINED, "moved", "numbers moved, no BF16 to tell why")


def test_a_recorded_fault_of_one_side_is_named_and_reproduced_with_the_version_that_has_it() -> None:
    moved_too = make_measured(curves=OTHER_NORM)
    group = only(compared([result(GRAPH)], [known(ROUNDS, measured=moved_too)], ROUNDS, words=("--env", "2.15.0=new")))
    assert (group.origin, group.name, group.side) == (Origin.TORCH, "rounds", "candidate")
    assert group.moved == {Topic.VERDICT: (GRAPH,), Topic.GRADIENTS: (GRAPH,)}
    assert (group.verdicts, group.first, group.what) == (("passed", "known"), SHOWN[1].message, ROUNDS.reason)
    assert group.command == f"fp8-harness bug repro {GRAPH} --with torch==2.15.0 --env 2.15.0=new"
    gone = only(compared([known(LOSES)], [result(GRAPH)], LOSES))
    assert (gone.name, gone.side, gone.verdicts) == ("loses", "baseline", ("known", "passed"))
    assert gone.first == SHOWN[1].message and "--with torch==2.13.0" in gone.command


def test_a_fault_of_both_sides_that_shows_on_one_is_unexplained() -> None:
    both = replace(ROUNDS, torch=">=2.13")
    assert only(compared([result(GRAPH)], [known(both)], both)).origin is Origin.UNEXPLAINED


FAILED = FailureSignature(kind="parity/gradients")
IN_TORCH = FailureSignature(kind="crash", what="RuntimeError: sizes", where=("torch._ops:__call__",))
OUTSIDE = replace(IN_TORCH, where=())


def crashed(signature: FailureSignature, kind: str = "raised") -> CaseResult:
    failures = (make_failure(kind=kind), make_failure(rank=1, kind="killed", consequence=True))
    return replace(failed(Verdict.CRASH, signature), failures=failures)


def failed(verdict: Verdict, signature: FailureSignature | None, *, judged: bool = True) -> CaseResult:
    findings = (a_finding(check="parity", message="wrong", verdict=Verdict.NUMERIC, judged=judged),)
    return result(EXACT, verdict, findings=findings, failure_signature=signature)


@pytest.mark.parametrize(
    ("after", "origin", "name"),
    [
        (failed(Verdict.NUMERIC, FAILED), Origin.UNEXPLAINED, "parity/gradients"),
        (failed(Verdict.CHANGED, FAILED), Origin.UNEXPLAINED, "parity/gradients"),
        (crashed(IN_TORCH), Origin.UNEXPLAINED, "crash"),
        (crashed(OUTSIDE, "killed"), Origin.UNEXPLAINED, "crash"),
        (crashed(OUTSIDE), Origin.OURS, "new-failure"),
        (failed(Verdict.INVARIANT, None, judged=False), Origin.OURS, "new-failure"),
        (failed(Verdict.UNEXPECTED_PASS, None), Origin.OURS, "unexpected-pass"),
        (failed(Verdict.INFRA, None), Origin.OURS, "lost-coverage"),
        (result(EXACT, checks=("finite",)), Origin.OURS, "lost-check"),
        (result(EXACT, golden="run here"), Origin.OURS, "references"),
    ],
)
def test_whose_a_failure_is(after: CaseResult, origin: Origin, name: str) -> None:
    decision = compared([result(EXACT, golden="stored"), result(UNDER_TP)], [after, result(UNDER_TP)])
    group = next(group for group in decision.groups if group.name == name)
    assert group.origin is origin
    assert ("--with" in group.command) == (after.verdict not in (Verdict.INFRA, Verdict.PASSED))


def test_what_fails_alike_and_what_is_equal_did_not_move() -> None:
    same = failed(Verdict.NUMERIC, FAILED)
    assert compared([same], [same]).groups == ()
    decision = compared([result()], [result()])
    assert decision.groups == () and "what moved" not in text_of(gate_sections(decision)) + gate_markdown(decision)


def test_the_example_is_the_cheapest_case_with_another_verdict() -> None:
    ids = [f"{GRAPH.removesuffix('-b16')}-seed{seed}-b16" for seed in (1, 2, 3)]
    before = [result(name) for name in ids]
    showing = (known(ROUNDS, attempts=(make_attempt(cpu_s=cost),)) for cost in (9.0, 4.0, 6.0))
    after = [replace(case, case_id=name) for name, case in zip(ids, showing, strict=True)]
    group = only(compared(before, after, ROUNDS))
    assert group.cases == tuple(ids) and group.example == ids[1]


def test_a_case_that_fails_for_another_cause_is_the_last_example() -> None:
    other = UNDER_TP.replace("-b16", "-seed3-b16")
    before = [result(UNDER_TP), result(other)]
    cheap = {"attempts": (make_attempt(cpu_s=0.1),), "measured": make_measured(wire=OTHER_WIRE)}
    after = [
        result(UNDER_TP, Verdict.KNOWN, expectation="else", **cheap),
        result(other, measured=make_measured(wire=OTHER_WIRE)),
    ]
    group = next(group for group in compared(before, after).groups if group.origin is Origin.TORCH)
    assert group.cases == (UNDER_TP, other) and group.example == other
    assert group.command == f"fp8-harness run {other}", "its verdict did not move"


def several() -> Gate:
    after = [
        known(ROUNDS),
        result(UNDER_TP, measured=make_measured(wire=OTHER_WIRE)),
        result(EXACT, measured=make_measured(saved_bytes=7), checks=("finite",)),
    ]
    return compared([result(GRAPH), result(UNDER_TP), result(EXACT)], after, ROUNDS)


def test_it_is_the_end_of_the_text_in_60_columns() -> None:
    lines = text_of(gate_sections(several()), width=60).splitlines()
    at = lines.index("changes by cause (torch 2.13.0+cpu -> 2.15.0)")
    assert lines[at + 1 : at + 8] == [
        "           torch  ours  unexplained",
        "  causes       2     1            1",
        "  cases        2     1            1",
        "  verdict      1     0            0",
        "  traffic      1     0            0",
        "  memory       0     0            1",
        "  checks       0     1            0",
    ]
    end = lines[at + 8 :]
    assert [line for line in end if line.startswith("moved, ")] == [
        "moved, torch: a deliberate change, or a known issue (2)",
        "moved, ours: missing checks and references (1)",
        "moved, unexplained: no record accounts for it (1)",
    ]
    assert "  rounds, new: 1 case" in end and f"    {GRAPH}: passed -> known" in end
    assert all(len(line) <= 60 for line in lines if not line.startswith(("    $ ", "    http")))


def test_markdown_json_and_html_have_the_same() -> None:
    decision = several()
    text = gate_markdown(decision)
    assert "### changes by cause (torch 2.13.0+cpu -&gt; 2.15.0)\n\n|  | torch | ours | unexplained |" in text
    assert "| traffic | 1 | 0 | 0 |" in text and "- rounds, new: 1 case\n" in text
    plain = json.loads(to_json(decision))
    assert [(group["origin"], group["name"]) for group in plain["groups"]] == [
        ("torch", "gradients-in-reduce-dtype"),
        ("torch", "rounds"),
        ("ours", "lost-check"),
        ("unexplained", "saved-bytes"),
    ]
    assert plain["groups"][1]["moved"] == {"verdict": [GRAPH]}
    section = gate_front(decision, make_results(result(GRAPH))).section
    assert section is not None
    moved = next(
        block for block in section.blocks if isinstance(block, Section) and block.title.startswith("changes by ")
    )
    (table,) = moved.blocks
    assert isinstance(table, Table) and table.rows[0] == ("causes", "2", "1", "1")
    first = next(block for block in section.blocks if isinstance(block, Section) and block.title.startswith("moved, "))
    assert first.title == "moved, torch: a deliberate change, or a known issue (2)"
    entry = first.blocks[1]
    assert isinstance(entry, Entry) and (entry.case, entry.title) == (GRAPH, "rounds, new: 1 case")


def test_a_signature_does_not_say_which_version_differs() -> None:
    finding = a_finding(check="traffic", message="2 calls are missing", differs="torch 2.16.0 differs from what holds")
    variants = (finding, replace(finding, differs=""))
    one, other = (signature_of(Verdict.CHANGED, (variant,), None) for variant in variants)
    assert one == other is not None
