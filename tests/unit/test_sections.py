"""Sections of reports, as a terminal and as Markdown show them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.report.sections import (
    Block,
    Entry,
    Facts,
    Items,
    Section,
    Table,
    Verbatim,
    markdown,
    terminal,
    text_of,
    wrapped,
)

TABLE = Table(
    columns=("case", "verdict", "ranks", "note"),
    rows=(("tp2-rowwise", "numeric", "2", "loss differs by a lot, and more words than fit"), ("x", "passed", "16", "")),
    right=(2,),
    code=(0,),
    verdict=1,
)


def lines(*blocks: Block, width: int | None = None, title: str = "") -> list[str]:
    return text_of([Section(title=title, blocks=blocks)], width=width).splitlines()


def test_blocks_stand_below_their_title_and_sections_apart() -> None:
    text = text_of(
        [
            Section(blocks=("2 cases",)),
            Section(
                title="needs",
                blocks=(Facts((("tp", "2 or more"), ("dtype", "float64"), ("empty", ""))),),
            ),
            Section(title="left out", blocks=(Items(()), Table(rows=()), Section(title="inside"))),
            Section(title="says", blocks=(Section(title="rank 0", blocks=(Verbatim("Traceback\n  boom"),)),)),
        ]
    )
    assert (
        text == "2 cases\n\nneeds\n  tp     2 or more\n  dtype  float64\n\nsays\n  rank 0\n    Traceback\n      boom\n"
    )


def test_long_lines_are_wrapped_and_ids_and_commands_are_not() -> None:
    entry = Entry(case="tp2-an-id-that-is-long", title="fails", lines=("one two three four",), command="run " * 9 + "x")
    assert lines(entry, "five six seven eight", Items(("one two three four five",)), width=20) == [
        "tp2-an-id-that-is-long",
        "  fails",
        "  one two three four",
        f"  $ {'run ' * 9}x",
        "five six seven eight",
        "one two three four",
        "  five",
    ]
    assert lines(Facts((("was", "one two three four five"),)), width=20) == ["was  one two three", "     four five"]
    assert lines("word " * 50) == [("word " * 50).strip()]


def test_a_table_is_aligned_and_rows_are_blocks_where_columns_do_not_fit() -> None:
    assert lines(TABLE, width=62, title="cases") == [
        "cases",
        "  case         verdict  ranks  note",
        "  tp2-rowwise  numeric      2  loss differs by a lot, and more",
        "                               words than fit",
        "  x            passed      16",
    ]
    assert lines(TABLE, width=50) == [
        "case         verdict  ranks",
        "tp2-rowwise  numeric      2",
        "    loss differs by a lot, and more words than fit",
        "x            passed      16",
    ]
    assert lines(TABLE, width=24) == [
        "tp2-rowwise",
        "  verdict numeric, ranks",
        "    2",
        "  loss differs by a lot,",
        "  and more words than",
        "  fit",
        "x",
        "  verdict passed, ranks",
        "    16",
    ]


@pytest.mark.parametrize("width", [20, 40, 100])
def test_a_terminal_shows_verdicts_in_colors(width: int) -> None:
    text = terminal([Section(blocks=(TABLE,))], width=width)
    colors = {text.plain[span.start : span.end]: span.style for span in text.spans if span.style}
    assert {word: color for word, color in colors.items() if word.strip() in ("numeric", "passed")}
    assert sorted(map(str, colors.values())) == ["green", "red"]


def test_markdown() -> None:
    text = markdown(
        [
            Section(title="A < B", blocks=("of `<x>` & <y>", Items(("one\ntwo",)), Facts((("a", "1"), ("b", ""))))),
            Section(title="more", blocks=(Section(title="inside", blocks=(Verbatim("a\n```", "text"),)),)),
            Section(title="all", folded=True, blocks=(Entry(case="x|y", title="fails", lines=("<",), command="run"),)),
        ]
    )
    assert text.split("\n\n") == [
        "## A &lt; B",
        "of `<x>` &amp; &lt;y&gt;",
        "- one two",
        "- a: 1",
        "## more",
        "### inside",
        "````text\na\n```\n````",
        "<details><summary>all</summary>",
        "- `x|y` fails\n  - &lt;\n  - `run`",
        "</details>\n",
    ]


def test_a_table_in_markdown() -> None:
    rows = (("a|b", "1", "<b>|"), ("", "2", "x\ny"))
    text = markdown([Section(blocks=(Table(columns=("id", "n", ""), rows=rows, right=(1,), code=(0,)),))])
    assert text.splitlines() == [
        "| id | n |  |",
        "|---|---:|---|",
        r"| `a\|b` | 1 | &lt;b&gt;\| |",
        "|  | 2 | x y |",
    ]


def test_control_characters_do_not_reach_a_terminal() -> None:
    blocks = ("\x1b[1m", Items(("\x07",)), Facts((("a", "\x00"),)), Verbatim("\x1b[1mx"), Table(rows=(("\x07x", "y"),)))
    section = Section(title="\x07t", blocks=(*blocks, Entry(title="\x07", lines=("\x07",), command="\x07")))
    assert not {"\x1b", "\x07", "\x00"} & set(text_of([section]) + markdown([section]))


@given(st.lists(st.text("ab \n", max_size=200)).map(" ".join), st.integers(60, 100))
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(text: str, width: int) -> None:
    short = " ".join(word[:20] for word in text.split(" "))
    assert all(len(line) <= width for line in wrapped(short, width, "  ", "    "))
    shown = lines(short, Items((short,)), Facts((("name", short),)), width=width)
    assert all(len(line) <= width for line in shown)
    assert " ".join(shown).split().count("a") == 3 * short.split().count("a")
