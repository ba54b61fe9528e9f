"""The page of a run, without a browser: what its data says, and that no text of a run is ever markup or script."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from harness.matrix.tier import coverage
from harness.report.html.page import html_report
from harness.report.run import coverage_section
from harness.report.sections import Section, Table
from harness.result import CaseResult, Curve, Measured, RunResult, Sent
from harness.verdict import Verdict
from tests.builders import a_finding, make_cast_range, make_failure, make_result, run_of, with_facts

Kind = TypeVar("Kind")
HOSTILE = "</script><img src=x onerror=alert(1)><!--\u2028\u2029&lt;"


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text: inside of each script and style, and outside."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.shown = ""
        self.text = content.decode()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside.append("")

    def handle_data(self, data: str) -> None:
        if self.elements[-1:] and self.elements[-1][0] in ("script", "style") and self.inside:
            self.inside[-1] += data
        else:
            self.shown += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self.elements.append(("end", {}))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def data(self) -> dict[str, Any]:
        """What the elements of data hold, by id."""
        held = [name for name in self.elements if name[0] in ("script", "style")]
        pairs = zip(held, self.inside, strict=True)
        return {str(attributes["id"]): json.loads(text) for (_, attributes), text in pairs if "id" in attributes}


def of_kind(kind: type[Kind], section: Section) -> list[Kind]:
    return [block for block in section.blocks if isinstance(block, kind)]


def document(*results: CaseResult, **facts: Any) -> RunResult:
    return with_facts(RunResult(results=results), wall_s=3.0, **facts)


def page(*results: CaseResult, **changes: Any) -> Page:
    return Page(html_report(document(*results, **changes)))


def bad(case_id: str = "tp2-rowwise-v2048-b16", message: str = "wrong", **changes: Any) -> CaseResult:
    findings = (
        a_finding(rule="scales/amax", message=message, step=1),
        a_finding(rule="parity/loss", message="far", step=2),
    )
    return make_result(case_id, Verdict.INVARIANT, **{"findings": findings, **changes})


def test_the_policy_allows_this_script_and_this_style_alone() -> None:
    html_page = page(bad())
    policy = next(
        meta["content"] for meta in html_page.of("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    style, script = html_page.inside[0], html_page.inside[-1]
    for kind, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert not html_page.of("link") and not any("src" in attributes for _, attributes in html_page.elements)
    assert "@import" not in style and "url(" not in style
    assert not re.search(
        r"\b(fetch|XMLHttpRequest|WebSocket|importScripts|eval|innerHTML|insertAdjacentHTML)\b", script
    )
    assert "</script" not in script and "<!--" not in script
    assert "Permission is hereby granted, free of charge" in script, "the licence of the library"


def test_the_worst_come_first_and_axes_are_those_that_differ() -> None:
    ids = ("fsdp4-tensorwise-v2048-b16", "single-bf16-v2048-b16", "tp2-rowwise-v2048-b16", "of a later version")
    verdicts = (Verdict.PASSED, Verdict.KNOWN, Verdict.CRASH, Verdict.NUMERIC)
    results = [make_result(name, verdict) for name, verdict in zip(ids, verdicts, strict=True)]
    index = page(*results).data()["index"]
    assert [row["id"] for row in index["cases"]] == [ids[2], ids[3], ids[1], ids[0]]
    axes = {axis["name"]: axis["values"] for axis in index["axes"]}
    assert axes == {
        "layout": ["single", "fsdp4", "tp2"],
        "dp_shard": ["1", "4"],
        "tp": ["1", "2"],
        "recipe": ["bf16", "tensorwise", "rowwise"],
    }
    at = index["cases"][0]["at"]
    assert [values[number] for values, number in zip(axes.values(), at, strict=True)] == ["tp2", "1", "2", "rowwise"]
    assert "at" not in index["cases"][1]


def test_findings_tell_the_cause_from_its_effects() -> None:
    detail = page(bad()).data()["detail-0"]
    assert [finding.get("effect", False) for finding in detail["findings"]] == [False, True]
    assert detail["findings"][0]["place"] == "step 1"


def test_casts_are_a_row_an_operand_the_worst_first() -> None:
    cast = functools.partial(make_cast_range, amax=1.23456, scale_min=2.0, scale_max=2.0, flushed=0.0)
    lost, wide = cast(1, "b", flushed=0.25), cast(2, "c", saturated=math.nan, scale_max=4.0)
    casts = (cast(1, "a"), cast(2, "a"), lost, wide)
    rows = page(bad(measured=Measured(casts=casts))).data()["detail-0"]["casts"]
    assert [row["fqn"] for row in rows] == ["c", "b", "a"]
    assert rows[0]["low"] == [None, 2.0] and rows[0]["high"] == [None, 4.0] and rows[0]["saturated"] == [None, "NaN"]
    assert rows[1]["flushed"] == [0.25, None] and "high" not in rows[1]
    assert rows[2]["amax"] == [1.23, 1.23] and not {"flushed", "saturated"} & rows[2].keys()


def test_wire_that_is_not_as_the_formula_says_comes_first() -> None:
    one, two = Sent(calls=1, payload_bytes=8), Sent(calls=2, payload_bytes=16)
    measured = Measured(
        wire={"a": one, "b": one, "d": one},
        expected_wire={"a": one, "b": two, "c": one},
        saved_bytes=5,
        expected_saved_bytes=6,
    )
    measured = replace(measured, wire={**measured.wire, "e": one}, limited_wire=("e",))
    once, twice = "1 calls, 8 B", "2 calls, 16 B"
    assert page(bad(measured=measured)).data()["detail-0"]["wire"] == [
        ["b", once, twice, True],
        ["c", "none", once, True],
        ["d", once, "none", True],
        ["saved for backward", "5 B", "6 B", True],
        ["a", once, once, False],
        ["e", once, "limits only", False],
    ]
    without = Measured(wire={"a": one}, saved_bytes=5)
    rows = page(bad(measured=without)).data()["detail-0"]["wire"]
    assert [row[2:] for row in rows] == [["not given", False]] * 2


def test_ranks_that_failed_alike_share_a_stack() -> None:
    failures = [make_failure(rank, "boom", traceback="here") for rank in (2, 0)]
    failures.append(make_failure(1, "waits", consequence=True))
    stacks = page(bad(run=run_of(*failures))).data()["detail-0"]["stacks"]
    assert [stack["head"] for stack in stacks] == [
        "ranks 0, 2 raised in step 1: boom",
        "rank 1 raised in step 1 (after another rank failed): waits",
    ]
    assert stacks[0]["text"] == "here"


def test_numbers_that_are_not_finite_are_kept() -> None:
    curve = Curve(losses=(1.0, math.nan), grad_norms=(math.inf, 1.0))
    detail = page(bad(measured=Measured(curves={"case": curve}))).data()["detail-0"]
    assert detail["curves"]["case"] == {"losses": [1.0, "NaN"], "grad_norms": ["Infinity", 1.0]}


def test_history_is_that_of_its_case() -> None:
    listing = Table(columns=("run", "verdict"), rows=(("first", "passed"),), verdict=1)
    run = document(bad("a"), bad("b"))
    data = Page(html_report(run, history={"b": listing})).data()
    assert "history" not in data["detail-0"]
    assert data["detail-1"]["history"] == {"columns": ["run", "verdict"], "rows": [["first", "passed"]], "verdict": 1}


@pytest.mark.parametrize(
    "changes, state", [({}, "1 of 1 case failed"), ({"interrupted": True}, "interrupted")], ids=["bad", "interrupted"]
)
def test_the_title_says_how_the_run_ended(changes: dict[str, Any], state: str) -> None:
    assert f"<title>{state}: fp8-harness release</title>" in page(bad(), name="release", **changes).text
    assert "<title>good: fp8-harness</title>" in page(make_result("a")).text
    assert "<title>nothing ran: fp8-harness</title>" in page().text


def test_coverage_lists_the_rules_that_exclude_with_their_reasons() -> None:
    from harness.matrix.casefile import parse_case_file
    from harness.matrix.tier import select

    text = '[[matrix]]\nname = "m"\n[matrix.axes]\ntp = [1, 3]\nrecipe = ["bf16", "rowwise"]\n'
    selection = select(parse_case_file(text, where="t.toml"))
    section = coverage_section([(selection, coverage(selection, 2))])
    fates, rules, excluded = of_kind(Table, section)
    assert {row[0]: row[1] for row in fates.rows} == {
        "covered": "2",
        "known": "0",
        "refused": "0",
        "skipped": "0",
        "excluded": "2",
    }
    assert rules.rows and all(reason for *_, reason in rules.rows)
    assert excluded.folded and len(excluded.rows) == 2
