"""The zygote engine: runs shares of jobs on ranks forked from one zygote, and replaces that process when it dies.

Neither imports the rank program nor forks, so any thread may call it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self

from harness.engine.messages import Share, ShareEvent, ShareOutcome
from harness.engine.zygote_client import ZygoteClient, ZygoteFailure, ZygoteSpec

START_ATTEMPTS = 2  # a program that failed to preload twice in a row will fail again
START_TIMEOUT_S = 600.0  # importing and warming up torch takes 10-60 s on a busy machine
REPLY_MARGIN_S = 60.0  # after the deadline of a job; stacks, kill and sweep take at most 41 s


class ZygoteEngine:
    """Runs shares of jobs of the rank program `program`, a dotted module name, preloaded with `options` by `python`.

    The first share starts the zygote, and `note` gets what the program says of its environment, in any thread. Use as a
    context manager, or `close` it.
    """

    def __init__(
        self,
        program: str,
        options: Mapping[str, str] | None = None,
        python: str = sys.executable,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._note = note
        self._spec = ZygoteSpec(program=program, options=dict(options or {}), python=python)
        self._starting = threading.Lock()
        self._client: ZygoteClient | None = None
        self._closed = False
        self._submitting = threading.Lock()
        self._ended: dict[str, bool] = {}  # by id of a job that runs: whether its share must end
        self._failed_starts = 0
        self._failure = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        """Run one share and return its outcome; by then all its processes have ended. Callable from any thread.

        Of a share that is not the whole job, `report` is told in another thread when all its ranks have returned (they
        wait for `release`) and when the first has failed. Failures are part of the outcome, never raised.
        KeyboardInterrupt kills the share.
        """
        assert not share.devices or len(share.devices) == share.count, "one device per rank, or none"
        assert share.count > 0, "a share has ranks"
        assert share.job.deadline_s > 0, "deadline_s must be positive"
        self._ended[share.job.job_id] = False
        try:
            return self._run_on(self._ready_client(), share, report)
        except ZygoteFailure as failure:
            return ShareOutcome(infra=str(failure))
        finally:
            del self._ended[share.job.job_id]

    def warm(self) -> None:
        """Start the zygote if needed, and wait until it can fork. `run` reports why it cannot."""
        with suppress(ZygoteFailure):
            self._ready_client()

    def end(self, job_id: str) -> None:
        """End the share of this job at once, with the stacks of its ranks: one on another node has failed."""
        with self._submitting:
            if job_id in self._ended:
                self._ended[job_id] = True
            if self._client is not None:
                self._client.end(job_id)

    def release(self, job_id: str) -> None:
        """Let the ranks of this job exit: all have returned, on all nodes."""
        if self._client is not None:
            self._client.release(job_id)

    def _run_on(self, client: ZygoteClient, share: Share, report: Callable[[ShareEvent], None]) -> ShareOutcome:
        job = share.job
        with self._submitting:
            if self._ended[job.job_id]:
                return ShareOutcome()  # before any of its ranks was started
            ticket, future = client.submit(share, report)
        try:
            return future.result(job.deadline_s + REPLY_MARGIN_S)
        except ZygoteFailure:
            raise
        except TimeoutError:
            reason = f"the zygote sent no outcome within {REPLY_MARGIN_S:g} s of the deadline of {job.job_id}"
            client.close(reason)
            raise ZygoteFailure(reason) from None
        except BaseException:
            client.cancel(ticket)
            raise

    def _ready_client(self) -> ZygoteClient:
        with self._starting:
            if self._closed:
                raise ZygoteFailure("the engine is closed")
            if self._client is not None and self._client.serving:
                return self._client
            if self._client is not None:
                self._client.close("the zygote had died")  # ends whatever outlived it
            if self._failed_starts >= START_ATTEMPTS:
                raise ZygoteFailure(self._failure)
            self._client = ZygoteClient(self._spec)
            self._wait_until_ready(self._client)
            return self._client

    def _wait_until_ready(self, client: ZygoteClient) -> None:
        try:
            if self._closed:  # closed between the check above and the spawn
                raise ZygoteFailure("the engine is closed")
            notes = client.wait_until_ready(START_TIMEOUT_S)
        except ZygoteFailure as failure:
            self._failed_starts += 1
            self._failure = str(failure)
            client.close(self._failure)
            raise
        except BaseException:
            client.close("interrupted while the zygote started")
            raise
        self._failed_starts = 0
        for text in notes:
            self._note(text)

    def close(self) -> None:
        """Shut down the zygote and all ranks. Pending and later shares end as `infra`."""
        self._closed = True
        client = self._client  # without the lock: another thread may be waiting for the preload
        if client is not None:
            client.close("the engine was closed")
