"""The arrows of the architecture, checked by walking every import of the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "harness"
FILES = sorted(PACKAGE.rglob("*.py"))

# Rooms from the top down. A room may import rooms below it and files of its own; `worker` is beside them all.
LEVELS = [
    ["__main__", "pytest_plugin"],
    ["cli"],
    ["measured.references", "measured.noise", "planted.power"],
    ["workflow"],
    ["running"],
    ["report", "store", "project"],
    ["checks", "conformance"],
    ["measured.golden", "measured.tolerance"],
    ["engine", "spec", "jsonform", "measured.sealed", "planted.faults", "planted.killmatrix"],
    ["durable", "result", "request", "trace", "verdict", "errors"],
]
# Rooms whose files stand on different levels: some of them run cases, the others are read by those that judge them.
SPLIT = {"measured", "planted"}
VALUES = {"spec", "planted.faults", "trace", "request", "result", "verdict", "errors", "durable"}
WORKER_MAY_READ = {"harness.engine.program", "harness.engine.wire", "harness.conformance.check"}
FRONT_ENDS = {"cli", "pytest_plugin", "__main__"}
PROGRAMS = {"harness.engine.warm", "harness.engine.torchrun_rank"}  # run by `python -m`
TORCH = {"torch", "torchao", "torchtitan"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The first name below the package, or the first two in a room that is split."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts and parts[0] in SPLIT else "".join(parts[:1])


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def own_imports(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] == "harness" and "." in name}


def level(name: str) -> int:
    return next(index for index, rooms in enumerate(LEVELS) if name in rooms)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_arrows_only_go_down(path: Path) -> None:
    here = room(module_name(path))
    for target in sorted(own_imports(path)):
        there = room(target)
        if there == here or not here:
            continue
        if here == "worker":
            assert there in VALUES or target in WORKER_MAY_READ, target
            continue
        assert there != "worker", f"{path}: only ranks import the worker"
        if {here, there} == {"spec"} | VALUES & {here, there}:
            continue  # values know each other
        assert level(there) >= level(here), f"{path}: {target} is above {here}"


def test_every_room_has_a_level() -> None:
    rooms = {room(module_name(path)) for path in FILES} - {"", "worker"} - SPLIT
    assert rooms <= {name for names in LEVELS for name in names}


def test_spec_and_engine_do_not_know_each_other() -> None:
    for path in FILES:
        here = room(module_name(path))
        there = {room(target) for target in own_imports(path)}
        assert not (here == "spec" and there - VALUES), path
        assert not (here == "engine" and "spec" in there), path


@pytest.mark.parametrize("path", [path for path in FILES if room(module_name(path)) != "worker"], ids=module_name)
def test_torch_is_only_in_the_worker(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & TORCH


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_only_front_ends_talk_and_exit(path: Path) -> None:
    if room(module_name(path)) in FRONT_ENDS:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"print", "click.echo", "exit", "quit"}, f"{path}:{node.lineno}"
            is_program = module_name(path) in {
                "harness.engine.warm",
                "harness.engine.rank",
                "harness.engine.torchrun_rank",
            }
            assert called != "sys.exit" or is_program, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_shell_and_no_pickles(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & {"pickle", "marshal", "shelve", "dill"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert not any(word.arg == "shell" for word in node.keywords), f"{path}:{node.lineno}"
            assert ast.unparse(node.func) not in {"os.system", "os.popen", "eval", "exec"}, f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    "module", ["harness.cli.main", "harness.cli.listing", "harness.cli.explain", "harness.workflow"]
)
def test_front_ends_start_without_heavy_libraries(module: str) -> None:
    heavy = ["torch", "torchao", "numpy", "rich", "jsonschema", "pytest", "hypothesis"]
    code = f"import sys, {module}; print(sorted(set({heavy}) & set(sys.modules)))"
    assert _printed(code) == "[]"


def test_pytest_plugin_is_cheap() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import harness.pytest_plugin;"
        "print(sorted(name for name in set(sys.modules) - before))"
    )
    assert _printed(code) == "['harness', 'harness.pytest_plugin']"


def _printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()
