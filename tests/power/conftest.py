"""One zygote for all eager runs of this folder, and the kill matrix of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.project import find_project
from harness.running.executor import Executor, open_executor
from harness.running.plan import make_plan
from harness.studies.kill_matrix import Power
from tests.power.kills import short_kill_matrix


@pytest.fixture(scope="session")
def executor() -> Iterator[Executor]:
    with open_executor(make_plan(device="cpu"), find_project()) as opened:
        yield opened


@pytest.fixture(scope="module")
def power(request: pytest.FixtureRequest, executor: Executor) -> Power:
    """The FAULTS of the file, in short carriers."""
    return short_kill_matrix(request.module.FAULTS, executor)
