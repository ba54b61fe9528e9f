"""One zygote for all eager runs of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.project import find_project
from harness.running.executor import Executor, open_executor
from harness.running.plan import make_plan


@pytest.fixture(scope="session")
def executor() -> Iterator[Executor]:
    with open_executor(make_plan(device="cpu"), find_project()) as opened:
        yield opened
