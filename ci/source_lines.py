"""The line of a project's sources to look at first, found without importing any of them."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', flags=re.MULTILINE)
_HUNK = re.compile(r"^(?:\+\+\+ b/(?P<file>.+)|@@ -\S+ \+(?P<line>\d+).*\n(?P<text>(?:[-+].*\n)*))", flags=re.MULTILINE)
_CODE = re.compile(r"^[-+](?!\s*(?:import|from|#|$))")  # a line that does something
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


def changed_at(base: str, files: Sequence[str], nearest: str = "") -> Place | None:
    """Where code of these files first differs from a commit, in `nearest` if it does there."""
    command = ["git", "diff", "--unified=0", "--relative", "--no-ext-diff", "--no-color", base, "HEAD", "--", *files]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    changed: list[Place] = []
    file = ""
    for match in _HUNK.finditer(text):
        file = match["file"] or file
        lines = (match["text"] or "").splitlines()
        added = [line for line in lines if line.startswith("+")]
        offsets = [offset for offset, line in enumerate(added) if _CODE.match(line)]
        if offsets or any(map(_CODE.match, lines)):  # else only comments and imports, or the name of a file
            changed.append(Place(file, max(int(match["line"]), 1) + (offsets[0] if offsets else 0)))
    return next((place for place in changed if place.file == nearest), changed[0] if changed else None)


def made_at(module: str, files: Sequence[str]) -> Place | None:
    """Where the module with this FQN is made, as far down as one class of the project does it: `self.NAME = …`."""
    made = [attribute for file in files for attribute in _made(file)]
    candidates: list[Made] = []
    for name in module.split("."):
        named = [attribute for attribute in made if attribute.name == name]
        mentioned = frozenset[str]().union(*(candidate.mentions for candidate in candidates))
        inside = [attribute for attribute in named if attribute.owner in mentioned]
        candidates = inside or ([] if name in _PARAMETERS else named) or candidates
    return (
        candidates[0].place if len({(candidate.place.file, candidate.owner) for candidate in candidates}) == 1 else None
    )


def built_at(target: str, files: Sequence[str]) -> Place | None:
    """`def build` of a target's module."""
    path = f"{target.replace('.', '/')}.py"
    for file in files:
        if file == path or file.endswith(f"/{path}"):
            tree = ast.parse(Path(file).read_bytes())
            functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "build")
            return next((Place(file, function.lineno) for function in functions), None)
    return None


def _made(file: str) -> Iterator[Made]:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except SyntaxError:
        return
    for owner in (definition for definition in ast.walk(tree) if isinstance(definition, ast.ClassDef)):
        for node in ast.walk(owner):
            if not isinstance(node, ast.Assign):
                continue
            words = [part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)]
            words += [part.attr for part in ast.walk(node.value) if isinstance(part, ast.Attribute)]
            for to in node.targets:
                held = to.value if isinstance(to, ast.Subscript) else to
                if isinstance(held, ast.Attribute) and isinstance(held.value, ast.Name) and held.value.id == "self":
                    yield Made(Place(file, node.lineno), owner.name, held.attr, frozenset(words))
