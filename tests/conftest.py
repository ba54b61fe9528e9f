"""Settings of every test. Hypothesis profiles: `dev` (default), `ci` and `nightly`, by HYPOTHESIS_PROFILE."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.examples import PROFILE, examples

if TYPE_CHECKING:
    from tests.fork_servers import ForkServers

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


def _skip_without_plugin(name: str) -> None:
    """Skip what needs a plug-in of the harness whose folder was removed, by the name of a module of it."""
    home, _, rest = name.partition(".plugins.")
    plugin = rest.partition(".")[0]
    if (
        home in ("harness", "tests")
        and plugin
        and not (Path(__file__).parents[1] / "harness/plugins" / plugin).is_dir()
    ):
        pytest.skip(f"it needs the plug-in {plugin}", allow_module_level=True)


class TestFile(pytest.Module):
    """A file of tests. One that imports a plug-in that was removed is skipped, as its tests are."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            if isinstance(error.__cause__, ModuleNotFoundError):
                _skip_without_plugin(error.__cause__.name or "")
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> TestFile:
    return TestFile.from_parent(parent, path=module_path)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that is marked with plug-ins needs all of them."""
    for marker in item.iter_markers("plugin"):
        for plugin in marker.args:
            _skip_without_plugin(f"harness.plugins.{plugin}")


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
def fork_servers() -> Iterator[ForkServers]:
    """The fork servers that all tests of this process share."""
    from tests.fork_servers import ForkServers

    with ForkServers() as shared:
        yield shared
