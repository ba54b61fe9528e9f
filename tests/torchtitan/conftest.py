"""Everything here needs torchtitan, which is an extra: `make torchtitan` installs it and runs these tests."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

Script = Callable[[str], str]


@pytest.fixture(autouse=True, scope="session")
def _torchtitan() -> None:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed: `make torchtitan` installs it and runs these tests")
    from harness.worker.targets.torchtitan import preload
    from harness.worker.virtual import device

    device.install()
    preload()


@pytest.fixture
def script() -> Script:
    """Run Python code in a process of its own, in which nothing is shimmed yet; returns what it prints."""

    def run(code: str) -> str:
        env = {name: value for name, value in os.environ.items() if name != "JE_ARROW_MALLOC_CONF"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
