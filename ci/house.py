"""Prints how large the house is beside what it may be: `python ci/house.py`. Exit code 1 where a limit is exceeded.

The core is what stays when every folder of `harness/plugins/` is removed. Lines are those of Python files, comments and
blank ones too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, PLUGINS = ROOT / "harness", ROOT / "harness" / "plugins"


class Size(NamedTuple):
    """How much Python there is."""

    lines: int
    files: int


class Budget(NamedTuple):
    """A measure of the house, and the most that it may be."""

    measure: Callable[[], float]
    limit: float

    @property
    def holds(self) -> bool:
        return self.measure() <= self.limit


@functools.cache
def sources(folder: Path) -> Mapping[Path, str]:
    """Return the text of every Python file below a folder."""
    return {path: path.read_text() for path in sorted(folder.rglob("*.py"))}


def size(folder: Path, *, without: Path | None = None) -> Size:
    """Return the size of a folder, except what is below another one."""
    texts = [text for path, text in sources(folder).items() if without is None or not path.is_relative_to(without)]
    return Size(sum(len(text.splitlines()) for text in texts), len(texts))


def rooms() -> dict[str, Size]:
    """Return the size of the core, of its engine, of every plug-in, of all of them, and of the tests."""
    plugins = sorted(path for path in PLUGINS.iterdir() if (path / "__init__.py").exists())
    return {
        "core": size(PACKAGE, without=PLUGINS),
        "core: engine": size(PACKAGE / "engine"),
        **{f"plug-in: {path.name}": size(path) for path in plugins},
        "all of harness/": size(PACKAGE),
        "tests": size(ROOT / "tests"),
    }


def import_share(texts: Iterable[str]) -> float:
    """Return how many percent of the lines are import statements."""
    lines, imports = 0, 0
    for text in texts:
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom))
        imports += sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)
        lines += len(text.splitlines())
    return 100 * imports / lines


def circles(to: Mapping[str, Collection[str]]) -> set[frozenset[str]]:
    """Return the sets of files of which each imports all others of its set, by itself or through them."""
    reached = {name: reachable(name, to) for name in to}
    return {
        frozenset(other for other in reached[name] if name in reached[other]) for name in to if name in reached[name]
    }


def reachable(name: str, to: Mapping[str, Collection[str]]) -> set[str]:
    """Return the files to which arrows lead from this one, in any number of steps."""
    found: set[str] = set()
    pending = [name]
    while pending:
        new = set(to[pending.pop()]) - found
        found |= new
        pending += new
    return found


def arrows(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Return which of these files each of them imports, where a name that is imported may be a file itself."""
    found: dict[str, set[str]] = {}
    for name, text in texts.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= (inner & texts.keys()) or {str(node.module)}
        found[name] = (named & texts.keys()) - {name}
    return found


def house_circles() -> set[frozenset[str]]:
    """Return the circles of all files of the package, those of ranks too."""
    return circles(arrows({module_name(path): text for path, text in sources(PACKAGE).items()}))


def module_name(path: Path) -> str:
    """Return the name with which a file of the package is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def arrows_up() -> list[str]:
    """Return the imports that `tests/house/test_imports.py` does not allow."""
    order = _order()
    return [
        f"{module.name} -> {name}"
        for module in order.modules()
        for name in module.imports
        if name.startswith("harness.") and not order.points_down(module, name)
    ]


def _order() -> Any:
    """Return the test which says what room may import what."""
    return importlib.import_module("tests.house.test_imports")


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield a command and those below it, each with its words."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, (*path, name))


def option_slots(command: click.Command) -> int:
    """Return how many options all commands have that do something, each counted for every command."""
    leaves = [leaf for _, leaf in commands(command) if not isinstance(leaf, click.Group)]
    return sum(isinstance(parameter, click.Option) for leaf in leaves for parameter in leaf.params)


def _app() -> click.Group:
    from harness.cli.main import app

    return app


BUDGETS: Mapping[str, Budget] = {
    "lines of the core": Budget(lambda: rooms()["core"].lines, 38_000),
    "files of the core": Budget(lambda: rooms()["core"].files, 260),
    "lines of all of harness/": Budget(lambda: rooms()["all of harness/"].lines, 59_000),
    "lines of tests": Budget(lambda: rooms()["tests"].lines, 38_000),
    "percent of lines that import": Budget(lambda: import_share(sources(PACKAGE).values()), 7),
    "circles of imports": Budget(lambda: len(house_circles()), 0),
    "arrows up": Budget(lambda: len(arrows_up()), 0),
    "option slots": Budget(lambda: option_slots(_app()), 281),
    "top-level commands": Budget(lambda: len(_app().list_commands(click.Context(_app()))), 16),
}


def main() -> int:
    """Print both tables, and what stands like those that are about imports."""
    for room, counted in rooms().items():
        print(f"{room:<30} {counted.lines:>8,} lines {counted.files:>5} files")
    print()
    for name, budget in BUDGETS.items():
        measured, mark = round(budget.measure(), 1), "" if budget.holds else "  EXCEEDED"
        print(f"{name:<30} {measured:>8,} of {budget.limit:>6,}{mark}")
    for circle in house_circles():
        print(f"circle: {', '.join(sorted(circle))}")
    for arrow in arrows_up():
        print(f"arrow up: {arrow}")
    return int(not all(budget.holds for budget in BUDGETS.values()))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
