"""What every test of this folder has.

`st.from_type(Case)` is any case at all, excluded ones too. Nothing waits for a disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from harness.matrix.case import Case
from tests.strategies import CASES

st.register_type_strategy(Case, CASES)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_a_disk() -> Iterator[None]:
    """No test loses its power, which is all that fsync is for; `test_durable.py` tests that it is called."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: None)
        yield
