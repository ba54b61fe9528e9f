"""The fixtures of the library, which the plug-in of pytest brings along. Importing it costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def fp8_ranks() -> Callable[..., list[Any]]:
    """Return `run_on_ranks(function, ranks, *arguments)`: what each CPU rank returned, by rank."""
    from fp8_harness.ranks import run_on_ranks

    return run_on_ranks


@pytest.fixture(scope="session")
def fp8_watch() -> Callable[..., Any]:
    """Return `watch(model, optimizer)`, a context that records what a model does."""
    from fp8_harness.watching import watch

    return watch


def pytest_unconfigure() -> None:
    """End the ranks that tests of this process have started, if they have."""
    import sys

    if "fp8_harness.session" in sys.modules:
        sys.modules["fp8_harness.session"].close()
