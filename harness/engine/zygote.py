"""The zygote engine: runs jobs on ranks forked from one warm process, and replaces that process when it dies.

Never imports the rank program, never forks: any thread may call it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Self

from harness.engine.warmclient import WarmClient, WarmFailure, WarmSpec
from harness.engine.wire import Job, JobOutcome

START_ATTEMPTS = 2  # a program that fails to preload twice in a row will not preload the third time
START_TIMEOUT_S = 600.0  # preloading and warming torch takes 10-60 s on a busy machine
LOST_S = 60.0  # beyond a job's deadline; stacks, kill and sweep take 41 s at the very worst


def infra_outcome(job: Job, message: str) -> JobOutcome:
    """Returns the outcome of a job of which nothing came back."""
    return JobOutcome(job_id=job.job_id, status="infra", ranks=(), message=message)


class ZygoteEngine:
    """Runs jobs of the rank program `program`, a dotted module name, preloaded with `options` by `python`.

    The warm process starts with the first job. Use as a context manager, or `close` it.
    """

    def __init__(self, program: str, options: Mapping[str, str] | None = None, python: str = sys.executable) -> None:
        self._spec = WarmSpec(program=program, options=dict(options or {}), python=python)
        self._starting = threading.Lock()
        self._client: WarmClient | None = None
        self._closed = False
        self._failed_starts = 0
        self._failure = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: Job) -> JobOutcome:
        """Run one job to its end and return its outcome; nothing of it is left then. Callable from any thread.

        Whatever goes wrong is in the outcome. On KeyboardInterrupt and the like the job is killed.
        """
        assert not job.devices or len(job.devices) == job.world_size, "one device per rank, or none"
        assert job.world_size > 0, "a job has ranks"
        assert job.deadline_s > 0, "a job has time"
        try:
            return self._run_on(self._ready_client(), job)
        except WarmFailure as failure:
            return infra_outcome(job, str(failure))

    def _run_on(self, client: WarmClient, job: Job) -> JobOutcome:
        ticket, future = client.submit(job)
        try:
            return future.result(job.deadline_s + LOST_S)
        except WarmFailure:
            raise
        except TimeoutError:
            reason = f"the warm process did not answer within {LOST_S:g} s after the deadline of {job.job_id}"
            client.close(reason)
            raise WarmFailure(reason) from None
        except BaseException:
            client.cancel(ticket)
            raise

    def _ready_client(self) -> WarmClient:
        with self._starting:
            if self._closed:
                raise WarmFailure("the engine is closed")
            if self._client is not None and self._client.serving:
                return self._client
            if self._client is not None:
                self._client.close("it had died")  # and whatever outlived it
            if self._failed_starts >= START_ATTEMPTS:
                raise WarmFailure(self._failure)
            self._client = WarmClient(self._spec)
            self._greet(self._client)
            return self._client

    def _greet(self, client: WarmClient) -> None:
        try:
            if self._closed:  # between the check and the spawn
                raise WarmFailure("the engine is closed")
            client.greet(START_TIMEOUT_S)
        except WarmFailure as failure:
            self._failed_starts += 1
            self._failure = str(failure)
            client.close(self._failure)
            raise
        except BaseException:
            client.close("interrupted while it started")
            raise
        self._failed_starts = 0

    def close(self) -> None:
        """End the warm process and all ranks. Jobs in flight end as `infra`, and so does every later one."""
        self._closed = True
        client = self._client  # without the lock: another thread may be waiting for the preload
        if client is not None:
            client.close("the engine was closed")
