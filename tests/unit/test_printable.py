"""What a foreign file brings is inert in every printer: terminal, Markdown, JUnit, annotations, page."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from harness.jsonform import to_json
from harness.report.case import shown_case
from harness.report.ci import annotation_lines, junit_report
from harness.report.html.page import html_report
from harness.report.run import run_markdown, run_sections
from harness.report.runs import runs_sections
from harness.report.sections import MOST, Block, Entry, Facts, Items, Section, Table, Verbatim, text_of
from harness.result import Environment, ReferenceRun, RunResult
from harness.running.stored import Stored
from harness.text import code_span, counted, in_markdown, printable
from harness.verdict import NotJudged, Verdict
from tests.builders import a_finding, make_failure, make_measured, make_result, make_results, make_trace, run_of
from tests.unit.test_html_report import HOSTILE as MARKUP
from tests.unit.test_html_report import Page

CASE, OTHER = "tp2-rowwise-v2048-s2-b16", "fsdp2-tensorwise-v2048-s2-b16"
PIECES = (
    "\x1b[31m", "\x1b]8;;http://e.vil\x07", "\x9b1m", "\x07", "\r", "\n", "\x85", "\u2028", "\u2029", "\u202e",
    "\u200b", "\u2066", "\ufeff", "\u00ad", "\u3164", "\ufe0f", "\U000e0041", "\n::add-mask::1", "::error file=a::b",
    " ::stop-commands::x", "##[group]", "##vso[task]", "section_start:1:a\r\x1b[0K", "section_end:1:a", "@user", "#12",
    "!34", "~5", "%6", "&7", "$8", "GH-9", "a/b#1", "http://e.vil", "www.e.vil", "mailto:a@b.c", "[x](//e.vil)",
    "![x](//e.vil/a.png)", "[x]: //e.vil", "<img src=//e.vil>", "<!--", "</details>", "]]>", "&#64;user",
    "`", "``", "\\", "|", "\n# GO", "\n---", "\n===", "\n```", "\n    ", "a", " ", "-",
)  # fmt: skip
HOSTILE = st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join)
_MENTIONED = re.compile(r"[@$]\w|://|\bwww\.|\bmailto:|[#!~%&]\w|\bGH-\d")


def texts_in(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a tree of plain values has texts."""
    children = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, child in children:
        yield from [(*path, key)] if isinstance(child, str) else texts_in(child, (*path, key))


@functools.cache
def free_texts() -> tuple[tuple[Any, ...], ...]:
    """Where `a_run` has a text that may be any."""
    return tuple(filter(_fits, texts_in(_plain(a_run()))))


def _fits(path: tuple[Any, ...]) -> bool:
    try:
        planted("x", path)
    except msgspec.ValidationError:
        return False
    return True


def _plain(run: RunResult) -> Any:
    return msgspec.json.decode(to_json(run))


def planted(text: str, *paths: tuple[Any, ...]) -> RunResult:
    """The run with this in place of these texts."""
    plain = _plain(a_run())
    for *above, last in paths:
        node = plain
        for key in above:
            node = node[key]
        node[last] = text
    return msgspec.convert(plain, RunResult, strict=False)


def elements(page: Page) -> set[tuple[str, tuple[str, ...]]]:
    return {(tag, tuple(attributes)) for tag, attributes in page.elements}


@functools.cache
def usual_elements() -> set[tuple[str, tuple[str, ...]]]:
    return elements(a_page("x", planted("x", *free_texts())))


def a_page(text: str, run: RunResult) -> Page:
    """The page of a run with the text in a section of its own and in a history, too."""
    listing = Table(columns=(text,), rows=((text,),), title=text)
    section = Section(name="other", title=text, blocks=(text, listing))
    return Page(html_report(run, sections=(section,), history={run.results[0].case_id: listing}))


def a_run(verdict: Verdict = Verdict.CRASH) -> RunResult:
    """A run in which every field that holds a text has one."""
    finding = a_finding(check="crash", message="x", verdict=verdict, found="1", expected="2", fix="x", module="wq")
    failed = make_result(
        CASE,
        verdict,
        findings=(finding, finding),
        measured=make_measured(),
        run=run_of(make_trace(), make_failure(1, traceback="x")),
        checks=("crash",),
        not_judged=(NotJudged(check="parity", reason="x", unverified=True),),
        quarantined="until: x",
        expectation="x",
    )
    run = make_results(
        failed,
        make_result(OTHER, measured=make_measured(), checks=("crash",)),
        environment=Environment(device="cpu", cpu="x", packages={"torch": "2.13.0"}, commit="x"),
        name="x",
        started="x",
        left_out=("x",),
        provenance={"torch": "x"},
        references=(ReferenceRun(kind="solo", name="x", cpu_s=1.0),),
    )
    return msgspec.structs.replace(run, results=tuple(msgspec.structs.replace(case, run=None) for case in run.results))


def assert_inert(text: str) -> None:
    """No terminal and no runner of CI does anything with it."""
    for line in text.split("\n"):
        assert line.replace("\t", "").isprintable(), ascii(line)
        assert not line.strip().startswith("::"), line
        assert not re.search(r"##\[|##vso\[|section_(start|end):", line), line


def inline(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from inline(token.children or [])


def assert_no_markup(text: str, *, details: int) -> None:
    """Markdown without a link, an image, a mention or an element but those of our own."""
    assert_inert(text)
    ends = 0
    for token in inline(MarkdownIt("commonmark").enable("table").parse(text)):
        assert token.type not in ("link_open", "image", "html_inline"), token
        if token.type == "text":
            assert not _MENTIONED.search(token.content), token.content
        if token.type == "html_block":
            tags = re.findall(r"<[^>]*>?", token.content.replace("<code>", "").replace("</code>", ""))
            assert tags in (["<details>", "<summary>", "</summary>"], ["</details>"]), token.content
            ends += tags == ["</details>"]
    assert ends == details


@settings(max_examples=12)
@given(HOSTILE)
@example(MARKUP)
def test_what_a_file_brings_is_inert_in_every_printer(text: str) -> None:
    run = planted(text, *free_texts())
    stored = Stored(path=Path("nowhere"), start=run.start, state="finished")
    reports: list[list[Block]] = [
        run_sections(run, rerun="x"),
        list(shown_case(run.results[0])),
        runs_sections([stored]),
    ]
    for blocks in reports:
        for width in (None, 60):
            assert_inert(text_of(blocks, where="--json", width=width))
    assert_no_markup(run_markdown(run), details=run_markdown(a_run()).count("<details>"))
    for element in ElementTree.fromstring(junit_report(run)).iter():
        for shown in (element.text or "", *element.attrib.values()):
            assert_inert(shown)
    for line in annotation_lines(run).splitlines():
        assert line.startswith("::error title=") and line.isprintable()
    page = a_page(text, run)
    assert elements(page) <= usual_elements() and page.data()["index"]["cases"][0]["id"] == printable(text)
    assert_inert(page.shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07", "red link"),
        ("a\u2028b\x85c\u200bd", r"a\u2028bc\u200bd"),
        ("::add-mask::x\n  ::error::y std::vector a ::b", "\\::add-mask::x\n  \\::error::y std::vector a \\::b"),
        ("##[group]a section_start:1:a", r"##\[group]a section_start\:1:a"),
        ("\x1b[31mred\x1b[0m\x07\x00 ok\ttab\r\nline\ud800", "red ok\ttab\nline"),
        ("Größe 日本 → ✓\tok", "Größe 日本 → ✓\tok"),
    ],
)
def test_what_is_shown_instead(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(HOSTILE)
def test_it_is_the_same_when_done_twice(text: str) -> None:
    assert printable(printable(text)) == printable(text)


def test_markdown_shows_what_would_be_live_as_code_and_the_rest_as_text() -> None:
    assert (
        in_markdown("ask @user in #12: [x](y) `code` <b> a*b") == r"ask `@user` in `#12:` \[x\](y) `code` &lt;b&gt; a*b"
    )
    assert in_markdown("\\`@user`") == "`` \\`@user` ``", "the first backtick is none for GitHub"
    assert code_span("a`b\nc") == "`` a`b c ``"


# The bound


def test_a_report_that_is_too_long_says_how_much_is_left_out() -> None:
    texts = tuple("x" * 1000 for _ in range(10_000))
    blocks: list[Block] = [
        Section(title="t", blocks=(Items(texts), Facts(tuple(("a", text) for text in texts)), "end of section")),
        Table(rows=tuple((text, "y") for text in texts)),
        Entry(title="e", lines=texts),
        Verbatim("v\n" * 3),
        "1 case: 1 crash",
    ]
    text = text_of(blocks, where="--json FILE")
    kept = text.count("x" * 1000)
    assert len(text) < MOST * 1.1 and text.endswith("\n\n1 case: 1 crash\n")
    assert f"left out here: {counted(40_005 - kept, 'line')}; --json FILE has all." in text
