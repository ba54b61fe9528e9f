"""Everything here needs torchtitan 0.2.2, which is an extra: `make torchtitan` installs it and runs these tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.matrix.targets import TORCHTITAN, VERSIONS
from harness.sources import installed_version
from tests.programs import run_script

Script = Callable[[str], str]


@pytest.fixture(autouse=True, scope="session")
def _torchtitan() -> None:
    if installed_version("torchtitan") != VERSIONS[TORCHTITAN]:
        pytest.skip("torchtitan 0.2.2 is not installed: `make torchtitan` installs it and runs these tests")
    from harness.plugins.torchtitan.worker.v0_2 import preload
    from harness.worker.virtual import device

    device.install()
    preload()


@pytest.fixture
def script() -> Script:
    """`run_script`: nothing is shimmed there yet."""
    return run_script
