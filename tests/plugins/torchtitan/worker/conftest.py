"""Everything here needs torchtitan: `make torchtitan` installs it and runs these tests."""

import pytest

from harness.hints import INSTALL_TORCHTITAN
from harness.sources import installed_version


@pytest.fixture(autouse=True, scope="session")
def _torchtitan() -> None:
    if installed_version("torchtitan") is None:
        pytest.skip(f"torchtitan is not installed: {INSTALL_TORCHTITAN}")
    from harness.plugins.torchtitan.worker import preload
    from harness.worker.virtual import device

    device.install()
    preload()
