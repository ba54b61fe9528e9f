"""Settings of every test. Hypothesis profiles: `dev` (default), `ci` and `nightly`, by HYPOTHESIS_PROFILE."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.examples import PROFILE, examples

if TYPE_CHECKING:
    from tests.zygotes import Zygotes

# No deadline: the time of one example says nothing on a machine that other jobs use too. The examples of `ci` are the
# same in every run, those of the others are not.
settings.register_profile("dev", deadline=None, max_examples=examples(30))
settings.register_profile("ci", deadline=None, max_examples=examples(50), derandomize=True, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=examples(100), print_blob=True)
settings.load_profile(PROFILE)

# The rewritten asserts of 240 files are kept, whatever the environment says: they are two thirds of collecting.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Temporary folders in memory, where programs may run and there is room: a suite makes and removes thousands of files.
_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC and disk_usage(_MEMORY).free > 4e9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

gc.disable()  # until everything is imported and collected


def pytest_collection_finish() -> None:
    """What was imported and collected is no garbage, and is not looked through again and again."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_sessionfinish() -> None:
    """The last collections of pytest have nothing to go through: what cannot be raised is reported as tests run."""
    gc.freeze()


@pytest.fixture(scope="session")
def zygotes() -> Iterator[Zygotes]:
    """The zygotes that all tests of this process share."""
    from tests.zygotes import Zygotes

    with Zygotes() as shared:
        yield shared
