"""The command line in this process: for what a run says and leaves behind.

Signals, terminals and what is left of processes need the real command. Only who starts the zygotes is replaced: ranks
are real, or those of `fake_program.py`.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from harness.running.plan import DEFAULT_PROGRAM
from tests.acceptance.conftest import Command, empty_project
from tests.zygotes import Zygotes

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


def with_targets(folder: Path, zygotes: Zygotes, *names: str) -> Inside:
    """A project with these files of `tests/targets` in it, run on the real ranks."""
    empty_project(folder)
    for name in names:
        (folder / name).write_text((TARGETS / name).read_text())
    return Inside(folder, {"FP8_HARNESS_PROGRAM": DEFAULT_PROGRAM}, zygotes=zygotes)
