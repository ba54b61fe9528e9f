"""The real command in a temporary project, with a rank program that needs no torch."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from harness.cli.main import main
from harness.running.identity import target_digest
from harness.running.plan import DEFAULT_PROGRAM
from tests.fork_servers import ForkServers

if TYPE_CHECKING:
    from tests.fork_servers import ForkServers

REPOSITORY = Path(__file__).parents[2]

CASES = """
description = "cases of the acceptance tests"

[[case]]
axes = {recipe = "tensorwise", steps = 3, loss_tolerance = 0.05}

[[case]]
axes = {recipe = "rowwise", dp_shard = 2, steps = 3, loss_tolerance = 0.05}

[[case]]
axes = {recipe = "rowwise", tp = 2, output_layer = true, vocab_size = 2256}

[[case]]
axes = {recipe = "bf16", steps = 3, loss_tolerance = 0.05}
"""


@dataclass
class Command:
    """Runs `fp8-harness` in a project folder of its own. `fork_servers`: what `call` forks ranks from, or None."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    fork_servers: ForkServers | None = None

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        given = {"env": self.environment_of_runs(), "stdout": pipe, "stderr": pipe, "text": True, **options}
        command = [sys.executable, "-m", "harness", *arguments]
        return subprocess.Popen(command, cwd=self.folder, start_new_session=True, **given)

    def start_until(self, words: str, *arguments: str) -> subprocess.Popen[str]:
        """Start it, and wait until a line on stderr has these words."""
        process = self.start(*arguments)
        assert process.stderr is not None
        while words not in (line := process.stderr.readline()):
            assert line, f"ended without {words!r}"
        return process

    def run(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same in this process, which saves most of a run: a new process only imports what this one has."""
        importlib.invalidate_caches()
        target_digest.cache_clear()  # a test may change its target between two runs
        with TemporaryFile("w+", 1) as out, TemporaryFile("w+", 1) as err, ExitStack() as here:
            here.enter_context(patch.dict(os.environ, self.environment_of_runs(), clear=True))
            if self.fork_servers is not None:
                borrowed = partial(self.fork_servers.lend, environment=self.environment)
                here.enter_context(patch("harness.running.executor.ForkServerEngine", borrowed))
            with chdir(self.folder), redirect_stdout(out), redirect_stderr(err):
                code = main(arguments)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())

    def printed(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a printed command line with the fake rank program: in this process, unless it needs a shell."""
        program, *words = line.split()
        if program != "fp8-harness" or set(line) & set("'\"$#"):
            return self.shell(line, fake=True)
        return self.call(*words)

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.process(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments)

    def process(self, *words: str, timeout_s: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run another program in the project, in the environment of its runs if no other is given."""
        given = {"env": self.environment_of_runs(), "cwd": self.folder, "text": True, "capture_output": True, **options}
        return subprocess.run(words, check=False, timeout=timeout_s, **given)

    def shell(self, line: str, *, fake: bool = False, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a printed command line as it is; only PATH leads to this `fp8-harness` and this `python`.

        The line must name the rank program itself, unless it is to be the `fake` one.
        """
        program = self.folder / "bin" / "fp8-harness"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m harness "$@"\n')
        program.chmod(0o755)
        path = (str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"])
        environment = {**self.environment_of_runs(), "PATH": os.pathsep.join(path)}
        if not fake:
            environment.pop("FP8_HARNESS_PROGRAM")
        return self.process("sh", "-c", line, timeout_s=timeout_s, env=environment)

    def tier(self, name: str, text: str) -> None:
        (self.folder / "cases" / f"{name}.toml").write_text(text)

    def cases(self, name: str, *axes: str) -> None:
        """A tier of cases with these axes."""
        self.tier(name, "".join(f"[[case]]\naxes = {{{case_axes}}}\n" for case_axes in axes))

    def record(self, name: str, *, where: str, verdict: str, rule: str) -> None:
        """Record a fault, of any version of torch and for ever."""
        fields = {"name": name, "where": where, "verdict": verdict, "link": "https://example.org/1", "torch": ">=2"}
        words = "".join(f'{key} = "{value}"\n' for key, value in fields.items())
        more = f'review_by = 2999-01-01\nreason = "It is {name}."\nrequires = [{{rule = "{rule}"}}]\n'
        self.tier("known", f"[[fault]]\n{words}{more}")

    def planted(self, name: str, *seeds: int, steps: int = 3) -> None:
        """A tier of cases of two ranks, each with a seed that says what goes wrong (`fake_program.py`)."""
        axes = f'recipe = "tensorwise", dp_shard = 2, steps = {steps}, loss_tolerance = 0.05'
        self.cases(name, *(f"{axes}, seed = {seed}, lr = 0.00{number}" for number, seed in enumerate(seeds, 1)))

    def environment_of_runs(self) -> dict[str, str]:
        # What tells GitHub of a run of this suite must not tell it of the runs in its tests.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join(paths),
            "FP8_HARNESS_PROGRAM": "tests.acceptance.fake_program",
            "FP8_HARNESS_STATE": str(self.folder / "state"),
            **self.environment,
        }


def empty_project(folder: Path) -> Path:
    """The folder with folders for cases and goldens."""
    for name in ("cases", "golden"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, fork_servers: ForkServers) -> Path:
    """The folder of a project with one tier `smoke` and its goldens."""
    command = Command(empty_project(tmp_path_factory.mktemp("template")), fork_servers=fork_servers)
    command.tier("smoke", CASES)
    done = command.call("baseline", "update", "smoke", "--device", "cpu", "--reason", "first")
    assert done.returncode == 0, done.stdout + done.stderr
    return command.folder


def copied(template: Path, folder: Path, fork_servers: ForkServers) -> Command:
    for name in ("cases", "golden"):
        shutil.copytree(template / name, folder / name)
    return Command(folder, fork_servers=fork_servers)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, template: Path, fork_servers: ForkServers) -> Command:
    """One project for the tests of a file that do not change it."""
    return copied(template, tmp_path_factory.mktemp("shared"), fork_servers)


@pytest.fixture
def project(tmp_path: Path, template: Path, fork_servers: ForkServers) -> Command:
    """A project of the test's own."""
    return copied(template, tmp_path, fork_servers)


@pytest.fixture(scope="module")
def warm(fork_servers: ForkServers) -> Iterator[ForkServers]:
    """The fork servers of runs in this process; those of a file's own targets end with it."""
    yield fork_servers
    fork_servers.forget_targets()


TARGETS = Path(__file__).parents[1] / "targets"


@dataclass
class Inside(Command):
    """`fp8-harness` in this process; `start`, `shell` and `apart` run the real command in the same folder."""

    @property
    def apart(self) -> Command:
        return Command(self.folder, self.environment)

    def having(self, **environment: str) -> Inside:
        """The same with more in the environment of its runs."""
        return replace(self, environment={**self.environment, **environment})

    def run(self, *arguments: str, timeout_s: float = 0) -> subprocess.CompletedProcess[str]:
        """Run the command line to its end. `timeout_s` is for the real command: cases have limits of their own."""
        return self.call(*arguments)


def with_targets(folder: Path, fork_servers: ForkServers, *names: str) -> Inside:
    """A project with these files of `tests/targets` in it, run on the real ranks."""
    empty_project(folder)
    for name in names:
        (folder / name).write_text((TARGETS / name).read_text())
    return Inside(folder, {"FP8_HARNESS_PROGRAM": DEFAULT_PROGRAM}, fork_servers=fork_servers)
