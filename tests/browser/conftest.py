"""Headless Chromium, which opens reports from disk. `make browser` installs it.

Where there is none the tests are skipped. With FP8_HARNESS_BROWSER=required they fail: there it must be installed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def _chromium() -> Path | None:
    return next((Path(path) for name in _NAMES if (path := shutil.which(name)) is not None), None)


@pytest.fixture(scope="module")  # not of the session: its event loop would be that of other tests
def browser() -> Iterator[Browser]:
    path = _chromium()
    if path is None:
        text = "no Chromium is installed: `make browser` installs it"
        if os.environ.get("FP8_HARNESS_BROWSER") == "required":
            pytest.fail(text)
        pytest.skip(text)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()
