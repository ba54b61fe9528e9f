"""How large the house may be, by the functions of `ci/house.py`; and that they see what is too much."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from ci.house import BUDGETS, Budget, arrows, circles, commands, import_share, option_slots, rooms
from harness.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Iterator

# Limits that the house has not come down to, each with what it must not grow beyond again.
NOT_YET = {"lines of the core": 44_775, "lines of all of harness/": 76_031, "lines of tests": 49_029}
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
HELP_LINES = 100  # two screens


@pytest.mark.plugin(*PROJECT["entry-points"]["fp8_harness"])  # another house has other shares
@pytest.mark.parametrize("name", sorted(BUDGETS.keys() - NOT_YET.keys()))
def test_a_limit_holds(name: str) -> None:
    assert BUDGETS[name].holds, f"{BUDGETS[name].measure():,} of {BUDGETS[name].limit:,}: see `python ci/house.py`"


@pytest.mark.plugin(*PROJECT["entry-points"]["fp8_harness"])  # a smaller house may be below a limit
@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_a_limit_that_holds_by_now_is_kept_from_now_on(name: str) -> None:
    assert not BUDGETS[name].holds, f"take {name!r} out of NOT_YET"
    assert BUDGETS[name].measure() <= NOT_YET[name], "the house grows: see `python ci/house.py`"


def test_the_limit_itself_holds_and_more_does_not() -> None:
    assert Budget(lambda: 2, 2).holds and not Budget(lambda: 2.1, 2).holds


def test_rooms_are_counted_apart() -> None:
    sizes = rooms()
    plugins = [size for name, size in sizes.items() if name.startswith("plug-in: ")]
    assert len(plugins) > 3 and all(size.lines and size.files for size in sizes.values())
    together = sizes["core"].lines + sum(size.lines for size in plugins)
    assert sizes["core: engine"].lines < sizes["core"].lines < together <= sizes["all of harness/"].lines


def test_imports_of_several_lines_count_whole() -> None:
    assert import_share(["import a\nfrom b import (\n    c,\n)\n\nx = 1\ny = 2\nz = 3\n"]) == 50


def test_circles_are_found_through_others_and_through_imported_files() -> None:
    texts = {
        "p": "",
        "p.a": "from p import b",
        "p.b": "def f():\n    import p.c",
        "p.c": "from p.a import x",
        "p.d": "import p.a",
    }
    assert circles(arrows(texts)) == {frozenset({"p.a", "p.b", "p.c"})}
    assert circles(arrows(texts | {"p.c": ""})) == set()


def test_an_option_counts_for_every_command_that_has_it() -> None:
    option = click.Option(["--one"])
    group = click.Group("g", params=[click.Option(["--of-the-group"])])
    group.add_command(click.Command("a", params=[option, click.Argument(["x"])]))
    group.add_command(click.Group("inner", commands=[click.Command("b", params=[option])]))
    assert option_slots(group) == 2


def helps() -> Iterator[tuple[str, str]]:
    """Every command with the text of its `--help` in a terminal of 80 columns."""
    for words, command in commands(app):
        path = " ".join(("fp8-harness", *words))
        context = click.Context(command, info_name=path, terminal_width=80, max_content_width=80)
        yield path, command.get_help(context)


@pytest.mark.parametrize(("path", "text"), [pytest.param(path, text, id=path) for path, text in helps()])
def test_help_has_examples_fits_two_screens_and_cuts_no_sentence(path: str, text: str) -> None:
    lines = text.splitlines()
    assert "Example" in text and len(lines) <= HELP_LINES
    assert max(map(len, lines)) <= 80
    usage = lines.index("")  # its words may end in "..."
    assert [line for line in lines[usage:] if line.endswith("...")] == []
