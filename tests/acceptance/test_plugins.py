"""Plug-ins: one of another package is installed by pip and works; one of the harness is removed and nothing breaks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.registry import plugins
from tests.acceptance.conftest import REPOSITORY, Command

CAPTURED: dict[str, Any] = {"capture_output": True, "text": True}
PLUGINS = [plugin.name for plugin in plugins()]
# What needs each plug-in, as commands.
USERS = {
    "baseline": (("baseline", "show"), ("baseline", "update", "smoke", "--reason", "x")),
    "bugs": (("bug", "list"), ("list", "bugs"), ("new", "--id", "--from", "--parallelism.tensor_parallel_degree 2")),
    "check_target": (("check-target", "my_pkg.my_target"),),
    "conformance": (("dev", "conformance", "--list"),),
    "exec": (("exec", "--", "python", "train.py"),),
    "faults": (
        ("dev", "mutate", "--list"),
        ("dev", "tier", "smoke"),
        ("explain", "--list", "faults"),
        ("run", "smoke", "--inject", "fault:amax_without_abs"),
        ("dev", "evidence", "proof", "--device", "cpu", "--fault", "amax_without_abs"),
    ),
    "gpu": (("dev", "evidence", "--list"),),
    "handoff": (("handoff", "trainer.safetensors", "exported"),),
    "independence": (("dev", "independence"),),
    "launchers": (
        ("run", "smoke", "--launcher", "ray", "--address", "127.0.0.1:1"),
        ("run", "smoke", "--launcher", "torchrun"),
        ("baseline", "update", "smoke", "--reason", "x", "--dry-run", "-o", "launcher=ray"),
    ),
    "parity": (("parity", "single-bf16-v2048-b16"),),
    "predict": (("predict", "cost", "single-bf16-v2048-b16"),),
    "release": (("compare", "last~1", "last"),),
    "tiers": (("dev", "tier", "smoke"),),
    "torchtitan": (("run", "smoke", "--target", "torchtitan"),),
}
# Everything of the core and of other plug-ins can be imported, and the commands say what is missing.
IMPORT_AND_CALL = """
import contextlib, importlib, io, json, pathlib, sys
folder, commands = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
for path in (folder / "harness").rglob("*.py"):
    parts = path.relative_to(folder).with_suffix("").parts
    if not {"worker", "__main__", "_project"} & set(parts):
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
from harness.cli.main import main
print(json.dumps({"file": sys.modules["harness"].__file__}))
for command in [["--help"], ["dev", "--help"], ["show", "--help"], *commands]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(command)
    print(json.dumps({"code": code, "text": out.getvalue()}))
"""


def without(name: str | None, folder: Path, *more: str) -> Path:
    """A copy of the package, and of `more` of the repository, without one plug-in."""
    for part in ("harness", "fp8_harness", "cases", "golden", "pyproject.toml", "ci", *more):
        source, others = REPOSITORY / part, (name,) if name and part in ("harness", "tests") else ()
        if source.is_dir():
            skipped = shutil.ignore_patterns("__pycache__", "_project", *others)
            shutil.copytree(source, folder / part, ignore=skipped)
        else:
            shutil.copy(source, folder / part)
    return folder


def said(folder: Path, *commands: tuple[str, ...]) -> list[dict[str, object]]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "80"}
    command = [sys.executable, "-c", IMPORT_AND_CALL, str(folder), json.dumps(commands)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert Path(lines[0]["file"]).is_relative_to(folder)
    return lines[1:]


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many lines the help of all commands has, with every plug-in."""
    return lines_of_help(said(without(None, tmp_path_factory.mktemp("whole"))))


def lines_of_help(answers: list[dict[str, object]]) -> int:
    assert all(answer["code"] == 0 for answer in answers)
    return sum(len(str(answer["text"]).splitlines()) for answer in answers)


@pytest.mark.parametrize("name", PLUGINS)
def test_without_a_plugin_the_rest_works_and_what_used_it_names_it(name: str, helped: int, tmp_path: Path) -> None:
    assert name in USERS, f"add commands that need the plug-in {name} to USERS"
    answers = said(without(name, tmp_path), *USERS[name])
    (plugin,) = (plugin for plugin in plugins() if plugin.name == name)
    lines = lines_of_help(answers[:3])
    assert lines < helped or not plugin.commands
    for command, answer in zip(USERS[name], answers[3:], strict=True):
        assert answer["code"] == 2 and f"it needs the plug-in {name}." in str(answer["text"]), (command, answer)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PLUGINS)
def test_without_a_plugin_lint_unit_tests_and_smoke_pass(name: str, tmp_path: Path) -> None:
    folder = without(
        name,
        tmp_path,
        ".github",
        "tests",
        "docs",
        "examples",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "Makefile",
    )
    environment = {**os.environ, "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    units = ["tests/unit", "tests/house", *map(str, folder.glob("tests/plugins/*/unit"))]
    for words in (
        ("-m", "ruff", "check", "."),
        ("-m", "mypy"),
        ("-m", "pytest", "-q", "-n", "2", "-m", "not sweep and not programs", *units),
        ("-m", "harness", "run", "smoke", "--device", "cpu"),
    ):
        done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=False, **CAPTURED)
        assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def extra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the package of somebody else."""
    site = tmp_path_factory.mktemp("site")
    source = shutil.copytree(REPOSITORY / "tests" / "plugins" / "package", site / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site / "installed"), str(source)], check=True)
    return site / "installed"


@pytest.fixture
def extended(extra: Path, shared: Command) -> Iterator[Command]:
    yield Command(shared.folder, {"PYTHONPATH": f"{extra}:{REPOSITORY}", "FP8_HARNESS_PROGRAM": ""})


def test_a_package_of_somebody_else_adds_commands(extended: Command) -> None:
    assert "extra  Say that the plug-in is here." in extended.run("--help").stdout
    for words in (("extra",), ("dev", "extra")):
        assert extended.run(*words).stdout == "extra is here\n"
    assert ", quiet." in extended.run("explain", "--list", "checks").stdout


def test_its_target_its_check_and_its_injection_run(extended: Command) -> None:
    case = ("run", "single-bf16-v2048-s2-b16", "--target", "extra_llama", "--device", "cpu")
    clean = extended.run(*case)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    loud = extended.run(*case, "--inject", "extra:loud")
    assert loud.returncode == 1 and "quiet/loud" in loud.stdout, loud.stdout + loud.stderr
    wrong = extended.run(*case, "--inject", "extra:silent")
    assert wrong.returncode == 2 and "no injection is named 'silent'. Fix: write extra:loud." in wrong.stderr
