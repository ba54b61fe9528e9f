"""Fork servers that tests of one process share: importing torch and torchao is most of a short test on real ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Self

from harness.engine.fork_server_engine import ForkServerEngine
from harness.engine.messages import Share, ShareEvent, ShareOutcome
from harness.running.plan import DEFAULT_PROGRAM

EAGER = {"device": "cpu", "arithmetic": "exact", "compile": "off"}
COMPILED = {**EAGER, "compile": "on"}

_OF_THE_COMMAND = ("FP8_HARNESS_PROGRAM", "FP8_HARNESS_STATE")  # no rank reads them
Key = tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]


class ForkServers:
    """Fork servers, each started once and kept until the end of this context, or until what it loaded is forgotten."""

    def __init__(self) -> None:
        self._engines: dict[Key, ForkServerEngine] = {}
        self._lock = threading.Lock()

    def engine(
        self, options: Mapping[str, str], program: str = DEFAULT_PROGRAM, environment: Mapping[str, str] | None = None
    ) -> ForkServerEngine:
        """The engine of a rank program with these options, whose ranks have this environment."""
        seen = {name: value for name, value in (environment or {}).items() if name not in _OF_THE_COMMAND}
        key = (program, tuple(sorted(options.items())), tuple(sorted(seen.items())))
        with self._lock:
            if key not in self._engines:
                self._engines[key] = ForkServerEngine(program, options)
            return self._engines[key]

    def lend(
        self,
        program: str,
        options: Mapping[str, str],
        *,
        environment: Mapping[str, str] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> Borrowed:
        """The same for one run, which closes what it borrowed and thereby ends no process."""
        del note  # programs of tests lack nothing, and the engine outlives the run
        return Borrowed(self.engine(options, program, environment))

    def forget_targets(self) -> None:
        """End the fork servers that have loaded a target: no other file of tests has it."""
        for key in [key for key in self._engines if "target" in dict(key[1])]:
            self._engines.pop(key).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.close()


class Borrowed:
    """A shared engine as the `Runner` of one run: its end ends the jobs of that run, and no process."""

    def __init__(self, engine: ForkServerEngine) -> None:
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
