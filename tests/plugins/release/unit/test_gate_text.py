"""How a gate is told: the first lines decide, in 60 columns, and everything is in JSON."""

from __future__ import annotations

import datetime
import json

from hypothesis import example, given, settings
from msgspec.structs import replace

from harness.jsonform import to_json
from harness.plugins.release.commands import gate_front, gate_markdown, gate_sections
from harness.plugins.release.gate import Answer, Gate, GatePolicy, gate
from harness.report.html.page import html_report
from harness.report.sections import Entry, Section, Table, text_of
from harness.result import Environment, RunResult
from harness.text import printable
from harness.verdict import Verdict
from tests.builders import a_finding, make_measured, make_result, make_results, with_facts
from tests.plugins.release.unit.test_gate import SIGNATURE, TERMS, failed, result
from tests.unit.test_html_report import HOSTILE, Page, of_kind
from tests.unit.test_printable import HOSTILE as TEXTS
from tests.unit.test_printable import a_run, assert_inert, assert_no_markup, elements, free_texts, planted

IDS = [f"fsdp2-tp2-tensorwise-tpstyle.fp8-ac.op-v2048-s2-seed{seed}-b16" for seed in range(1, 41)]


def many() -> Gate:
    before = [result(name) for name in IDS]
    saved = [result(name, measured=make_measured(saved_bytes=2000)) for name in IDS[10:]]
    different = [replace(SIGNATURE, what=f"gradient {number} differs") for number in range(10)]
    broken = map(failed, IDS[:10], different)
    return gate(make_results(*before), make_results(*broken, *saved), TERMS, names=("v1", "v2"))


def gate_text(decision: Gate, *, width: int) -> str:
    return text_of(gate_sections(decision), width=width)


def test_the_first_lines_decide() -> None:
    text, _, causes = gate_text(many(), width=60).partition("changes by cause\n")
    lines = text.splitlines()
    assert all(len(line) <= 60 for line in causes.splitlines() if not any(name in line for name in IDS))
    assert lines[0] == "NO-GO: v2 against v1"
    head = "\n".join(lines[:12])
    assert lines[1] == "40 reasons gate"
    assert "30 of 40 cases good, 120 checks run (baseline: 40 of 40, 120)" in " ".join(head.split())
    assert "  10x  fails, and did not in the baseline  new-failure" in head
    assert "  30x  saved bytes changed                 saved-bytes" in head
    assert all(len(line) <= 60 for line in lines if not any(name in line for name in IDS))
    assert sum(line.startswith("    $ fp8-harness run") for line in lines) == 10, "five of each kind in full"
    assert all(any(name in line for line in lines) for name in IDS), "the others by id"


def test_failures_of_one_signature_are_told_once() -> None:
    before = make_results(*map(result, IDS[:3]))
    other = failed(IDS[2], replace(SIGNATURE, kind="finite/loss"))
    decision = gate(before, make_results(*map(failed, IDS[:2]), other), TERMS)
    text, _, causes = gate_text(decision, width=100).partition("changes by cause\n")
    assert "  parity/gradients: 2 cases\n" in causes and "  finite/loss: 1 case\n" in causes
    assert text.count("signature: parity/gradients") == 1 and text.count("signature: finite/loss") == 1
    assert f"    the same in {IDS[1]}\n" in text and text.count("    $ fp8-harness run") == 2


def test_go_says_what_was_compared_and_why_times_were_not() -> None:
    document = make_results(result())
    text = gate_text(gate(document, document, TERMS), width=200)
    compared = "1 of 1 case good, 3 checks run (baseline: 1 of 1, 3); numbers of 1 of 1 case compared"
    assert text.splitlines()[:3] == ["GO: candidate against baseline", "no reason gates", compared]
    document = make_results(result(measured=None, attempts=()))
    for before, after, why in (
        (document, make_results(failed()), "no case is good on both sides"),
        (document, document, "no case was good at its first attempt"),
        (document, with_facts(document, environment=None), "other hardware"),
    ):
        assert f"\ntimes: not compared, {why}\n" in gate_text(gate(before, after, TERMS), width=100)


def test_nothing_compared_is_said_everywhere() -> None:
    document = make_results(failed())
    decision = gate(document, document, TERMS)
    why = "no case is good in both results (baseline 0 good, candidate 0 good)"
    lines = [*gate_text(decision, width=200).splitlines(), *gate_markdown(decision).splitlines()]
    assert lines[0] == "NOT COMPARED: candidate against baseline" and lines[1].startswith(f"{why}: make the failing")
    assert "## NOT COMPARED: candidate against baseline" in lines
    assert any(line.startswith(f"- {why}: make the failing") for line in lines)
    assert "not compared: 1 not good in both" in lines and "- not compared: 1 not good in both" in lines
    front = gate_front(decision, document)
    assert (front.state, front.good) == ("NOT COMPARED", False) and front.line.startswith(why)
    plain = json.loads(to_json(decision))
    assert (plain["answer"], plain["not_compared"]) == ("NOT COMPARED", why) and plain["fix"].startswith("make the")


def test_markdown_has_a_table_and_no_markup_of_a_message() -> None:
    finding = a_finding(check="finite", message="``` <b>|</b>", verdict=Verdict.NUMERIC)
    bad = make_result(IDS[0], Verdict.NUMERIC, findings=(finding,))
    decision = gate(make_results(make_result(IDS[0])), make_results(bad), TERMS)
    text = gate_markdown(decision)
    assert text.startswith("## NO-GO: candidate against baseline\n")
    assert "| 1x | fails, and did not in the baseline | `new-failure` |" in text
    assert f"- `{IDS[0]}` passed -&gt; numeric\n  - finite/test: \\`\\`\\` &lt;b&gt;|&lt;/b&gt;\n" in text


def test_json_has_every_reason() -> None:
    decision = many()
    plain = json.loads(to_json(decision))
    assert (plain["answer"], plain["schema"], len(plain["reasons"])) == ("NO-GO", 2, 40)
    assert plain["reasons"][0]["kind"] == "new-failure" and plain["reasons"][0]["gates"] is True
    waived = replace(decision.reasons[0], gates=False, waiver="quarantined until 2027-03-01 by ana: flaky")
    text = gate_text(replace(decision, reasons=(waived,), answer=Answer.GO), width=80)
    assert "(1 of them waived)" in text and "    quarantined until 2027-03-01 by ana: flaky\n" in text


def a_gate() -> tuple[Gate, RunResult]:
    """A case fails, one saves other bytes, and one was lost."""
    ids = [f"tp2-rowwise-v2048-seed{seed}-b16" for seed in range(1, 4)]
    wrong = a_finding(check="parity", message="far", verdict=Verdict.NUMERIC)
    before = make_results(*(make_result(name, measured=make_measured()) for name in ids))
    after = make_results(
        make_result(ids[0], Verdict.NUMERIC, findings=(wrong,)),
        make_result(ids[1], measured=make_measured(saved_bytes=9)),
        environment=Environment(device="cpu", packages={"torch": "vfar"}),
    )
    now = datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC)
    return gate(before, after, GatePolicy(now=now), names=("v1", "v2")), after


def test_the_front_of_a_gate_has_every_reason_in_order() -> None:
    decision, after = a_gate()
    front = gate_front(decision, after)
    assert (front.title, front.state, front.good) == ("v2 against v1", "NO-GO", False)
    assert front.line == "3 reasons gate" and front.section is not None
    *groups, _, moved, ours, unexplained = of_kind(Section, front.section)
    assert [group.title.partition(":")[0] for group in (ours, unexplained)] == ["moved, ours", "moved, unexplained"]
    assert [group.title for group in groups] == [
        "gates: fails, and did not in the baseline (1) [new-failure]",
        "gates: case was lost (1) [lost-coverage]",
        "gates: saved bytes changed (1) [saved-bytes]",
    ]
    failed, lost, saved = (of_kind(Entry, group)[0] for group in groups)
    assert failed.case.endswith("seed1-b16") and failed.command == f"fp8-harness run {failed.case}"
    assert (failed.title, failed.lines) == ("passed -> numeric", ("parity/test: far",))
    lost_title = "tp2-rowwise-v2048-seed3-b16 passed -> not selected"
    assert (lost.case, lost.title) == ("", lost_title), "no such case to lead to"
    said = ("", ("bytes saved for backward: 1,000 -> 9",))
    assert (saved.title, saved.lines) == said, "values that the line has are not repeated"
    (summary,), (sides,) = of_kind(Table, moved), of_kind(Table, front.section)
    assert summary.rows[0] == ("causes", "0", "1", "2")
    assert ("name", "v1", "v2") in sides.rows and "torch none -> vfar" in " ".join(of_kind(str, front.section))


def test_what_does_not_gate_is_folded() -> None:
    decision, after = a_gate()
    reasons = tuple(replace(reason, gates=False, waiver="allowed: why") for reason in decision.reasons)
    front = gate_front(replace(decision, answer=Answer.GO, reasons=reasons), after)
    assert front.section is not None and front.state == "GO" and front.good
    groups = [group for group in of_kind(Section, front.section) if group.title.startswith("does not gate")]
    shown = [(group.folded, of_kind(Entry, group)[0].lines[0]) for group in groups]
    assert shown == [(True, "allowed: why")] * 3


@settings(max_examples=12)
@given(TEXTS)
@example(HOSTILE)
def test_what_a_file_brings_is_inert_in_every_printer(text: str) -> None:
    before = a_run()
    after = planted(text, *(path for path in free_texts() if path[-1] != "id"))  # ids pair the two sides of a gate
    bad = replace(before, results=before.results[1:])
    decision = gate(bad, after, TERMS, names=("a", printable(text)))
    for width in (None, 60):
        assert_inert(text_of(gate_sections(decision), where="--json", width=width))
    usual = gate(bad, before, TERMS, names=("a", "b"))
    assert_no_markup(gate_markdown(decision), details=gate_markdown(usual).count("<details>"))
    pairs = ((decision, after), (usual, before))
    page, plain = (Page(html_report(run, front=gate_front(by, run))) for by, run in pairs)
    assert elements(page) <= elements(plain)
    assert_inert(page.shown)
