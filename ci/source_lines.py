"""The line of a project's sources to look at first, found without importing any of them."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', flags=re.MULTILINE)
_PARAMETERS = ("weight", "bias")  # every class has them: found only in the class that holds them


@dataclass(frozen=True)
class Place:
    """A line of a file, whose path is relative to the current folder."""

    file: str
    line: int


@dataclass(frozen=True)
class Made:
    """`self.name = …` in a class, and the names that its value mentions."""

    place: Place
    owner: str
    name: str
    mentions: frozenset[str]


def sources() -> list[str]:
    """The tracked Python files of the current folder."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if Path(name).is_file()]


def raised_at(traceback: str, files: Sequence[str]) -> Place | None:
    """The innermost frame in these files."""
    known = {str(Path(name).resolve()): name for name in files}
    frames = [(known.get(str(Path(path).resolve())), int(line)) for path, line in FRAME.findall(traceback)]
    ordered = frames if "most recent call first" in traceback else frames[::-1]
    return next((Place(name, line) for name, line in ordered if name), None)


def made_at(module: str, files: Sequence[str]) -> Place | None:
    """Where the module with this FQN is made, as far down as one class of the project does it: `self.NAME = …`."""
    made = [each for file in files for each in _made(file)]
    found: list[Made] = []
    for name in module.split("."):
        named = [each for each in made if each.name == name]
        mentioned = frozenset[str]().union(*(each.mentions for each in found))
        inside = [each for each in named if each.owner in mentioned]
        found = inside or ([] if name in _PARAMETERS else named) or found
    return found[0].place if len({(each.place.file, each.owner) for each in found}) == 1 else None


def built_at(target: str, files: Sequence[str]) -> Place | None:
    """`def build` of a target's module."""
    path = f"{target.replace('.', '/')}.py"
    for file in files:
        if file == path or file.endswith(f"/{path}"):
            tree = ast.parse(Path(file).read_bytes())
            functions = (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "build")
            return next((Place(file, each.lineno) for each in functions), None)
    return None


def _made(file: str) -> Iterator[Made]:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except SyntaxError:
        return
    for owner in (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)):
        for node in ast.walk(owner):
            if not isinstance(node, ast.Assign):
                continue
            words = [each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)]
            words += [each.attr for each in ast.walk(node.value) if isinstance(each, ast.Attribute)]
            for to in node.targets:
                held = to.value if isinstance(to, ast.Subscript) else to
                if isinstance(held, ast.Attribute) and isinstance(held.value, ast.Name) and held.value.id == "self":
                    yield Made(Place(file, node.lineno), owner.name, held.attr, frozenset(words))
