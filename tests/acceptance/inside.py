"""The command line in this process, with ranks that are forked from zygotes which several runs share.

For what a run says and leaves behind. Signals, terminals and what is left of processes need the real command. Only who
starts the zygotes is replaced: ranks are real, or those of `fake_program.py`.
"""

from __future__ import annotations

import importlib
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self
from unittest import mock

from harness.engine.messages import Share, ShareEvent, ShareOutcome
from harness.engine.zygote_engine import ZygoteEngine
from harness.running.identity import target_digest
from tests.acceptance.conftest import Command, empty_project


class Warm:
    """Zygotes, each started once and kept until the end of this context."""

    def __init__(self) -> None:
        self._engines: dict[object, ZygoteEngine] = {}
        self._lock = threading.Lock()

    def lend(
        self, environment: Mapping[str, str], program: str, options: Mapping[str, str], *, note: Callable[[str], None]
    ) -> Borrowed:
        """The engine of a rank program with these options, whose ranks have this environment."""
        del note  # programs of tests lack nothing, and the engine outlives the run
        options = {name: value for name, value in options.items() if name != "warm"}  # for the cases of any run
        key = (program, tuple(sorted(options.items())), tuple(sorted(environment.items())))
        with self._lock:
            if key not in self._engines:
                self._engines[key] = ZygoteEngine(program, options)
            return Borrowed(self._engines[key])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.close()


class Borrowed:
    """A warm engine as the `Runner` of one run: its end ends the jobs of that run, and no process."""

    def __init__(self, engine: ZygoteEngine) -> None:
        self._engine = engine
        self._running: set[str] = set()
        self._closed = False
        self.warm, self.end, self.release = engine.warm, engine.end, engine.release

    def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        if self._closed:
            return ShareOutcome(infra="the engine is closed")
        self._running.add(share.job.job_id)
        try:
            return self._engine.run(share, report)
        finally:
            self._running.discard(share.job.job_id)

    def close(self) -> None:
        self._closed = True
        for job_id in tuple(self._running):
            self._engine.end(job_id)


TARGETS = Path(__file__).parents[1] / "targets"


@dataclass
class Inside(Command):
    """`fp8-harness` in this process; `start`, `shell` and `apart` run the real command in the same folder."""

    warm: Warm = field(default_factory=Warm)

    @property
    def apart(self) -> Command:
        return Command(self.folder, self.environment)

    def having(self, **environment: str) -> Inside:
        """The same with more in the environment of its runs."""
        return replace(self, environment={**self.environment, **environment})

    def run(self, *arguments: str, timeout_s: float = 0) -> subprocess.CompletedProcess[str]:
        """Run the command line to its end. `timeout_s` is for the real command: cases have limits of their own."""
        importlib.invalidate_caches()
        target_digest.cache_clear()  # a test may change its target between two runs
        borrowed = partial(self.warm.lend, self.environment)
        with mock.patch("harness.running.executor.ZygoteEngine", borrowed):
            return self.call(*arguments)


def with_targets(folder: Path, warm: Warm, *names: str) -> Inside:
    """A project with these files of `tests/targets` in it, run on the real ranks."""
    empty_project(folder)
    for name in names:
        (folder / name).write_text((TARGETS / name).read_text())
    return Inside(folder, {"FP8_HARNESS_PROGRAM": "harness.worker.main"}, warm=warm)
