"""Everything here needs torchtitan 0.3.0, an extra: `make torchtitan-0.3` installs it and runs these tests."""

import pytest

from harness.plugins.torchtitan import VERSION
from harness.sources import installed_version


@pytest.fixture(autouse=True, scope="session")
def _torchtitan() -> None:
    if installed_version("torchtitan") != VERSION:
        pytest.skip("torchtitan 0.3.0 is not installed: `make torchtitan-0.3` installs it and runs these tests")
    from harness.plugins.torchtitan.worker import preload
    from harness.worker.virtual import device

    device.install()
    preload()
