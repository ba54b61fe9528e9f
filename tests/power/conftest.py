"""One zygote for all eager runs of this folder, and the mutation matrix of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.project import find_project
from harness.running.executor import Executor, open_executor
from harness.running.plan import make_plan
from harness.studies.mutation import MutationMatrix
from tests.power.kills import short_matrix


@pytest.fixture(scope="session")
def executor() -> Iterator[Executor]:
    with open_executor(make_plan(device="cpu"), find_project()) as opened:
        yield opened


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, executor: Executor) -> MutationMatrix:
    """The FAULTS of the file, in short host cases."""
    return short_matrix(request.module.FAULTS, executor)
