"""Prints the messages of the harness, one a line, for codespell; with --regex, what it must take for a word.

codespell knows words. The phrases of `ci/words.txt` are words too, if its regular expression says so.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def of_python(text: str) -> Iterator[str]:
    """Yield string literals with a space that are no docstrings, f-strings with {} for each value."""
    tree = ast.parse(text)
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def of_toml(value: object) -> Iterator[str]:
    """Yield every string of a TOML document."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from of_toml(part)
    elif isinstance(value, str):
        yield value


def words() -> str:
    """Return the regular expression of a word: a phrase of `ci/words.txt`, or what codespell takes for one."""
    keys = (line.partition("->")[0] for line in (ROOT / "ci/words.txt").read_text().splitlines())
    return "|".join([*(rf"\b{key}\b" for key in keys if " " in key), r"[\w'-]+"])


def main() -> None:
    if "--regex" in sys.argv:
        print(words())
        return
    for path in sorted(path for folder in ("harness", "fp8_harness") for path in (ROOT / folder).rglob("*.*")):
        name = str(path.relative_to(ROOT))
        if path.suffix in (".py", ".toml"):
            text = path.read_text()
            found = of_python(text) if path.suffix == ".py" else of_toml(tomllib.loads(text))
            for message in found:
                if " " in message.strip():
                    print(f"`{name}`: {' '.join(message.split())}")


if __name__ == "__main__":
    main()
