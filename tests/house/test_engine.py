"""The engine stands alone: it knows jobs, bytes, leases and processes, and nothing of what ranks train."""

import ast
import re
from collections.abc import Iterator

from tests.house.test_imports import PACKAGE, modules, room

# All that the engine imports of the house.
ALLOWED = {"harness.durable", "harness.errors", "harness.text"}
# No name in the engine has one of these words in it. Its messages may: people read them.
FOREIGN = {
    *("case", "cases", "checks", "train", "trains", "training", "losses", "golden", "goldens", "tolerance"),
    *("recipe", "float8", "fp8", "bf16", "verdict", "finding", "findings", "fault", "faults", "layout"),
}


def test_the_engine_imports_no_more_of_the_house_than_is_listed() -> None:
    imports = [name for module in modules() if module.room == "engine" for name in module.imports]
    assert {name for name in imports if name.startswith("harness.") and room(name) != "engine"} == ALLOWED


def named_in(tree: ast.AST) -> Iterator[str]:
    """Every name that the code gives to something, or uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""


def foreign_names(text: str) -> set[str]:
    """The names with a word of `FOREIGN`, in code."""
    names = set(named_in(ast.parse(text)))
    return {name for name in names if FOREIGN & words(name)}


def words(name: str) -> set[str]:
    """The words of a name in either style: {"rank", "process"} of RankProcess, rank_process and RANK_PROCESS."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+", name)}


def test_nothing_in_the_engine_is_named_after_cases_checks_or_training() -> None:
    paths = sorted((PACKAGE / "engine").glob("*.py"))
    found = {path.name: foreign_names(path.read_text()) for path in paths}
    assert len(paths) > 10 and {name: names for name, names in found.items() if names} == {}


def test_a_name_of_training_is_seen() -> None:
    text = "from a import train\nclass CaseResult: ...\ndef check_fits(losses): return job.golden_path(fp8=True)\n"
    assert foreign_names(text) == {"train", "CaseResult", "losses", "golden_path", "fp8"}
