"""What every test of this folder has.

`st.from_type(Case)` is any case at all, excluded ones too. Nothing waits for a disk.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from harness.matrix.case import Case
from harness.project import Project
from tests.strategies import CASES

st.register_type_strategy(Case, CASES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where torch is not installed, as for `make pythons`, nothing can be planned."""
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if isinstance(item, pytest.Function) and "make_plan" in item.function.__code__.co_names:
                item.add_marker(pytest.mark.skip(reason="torch is not installed"))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project without cases and goldens."""
    for name in ("cases", "golden"):
        (tmp_path / name).mkdir()
    return Project(root=tmp_path, state=tmp_path / "state")


def written(folder: Path, text: str) -> Path:
    """A new TOML file with this text."""
    path = folder / "file.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_a_disk() -> Iterator[None]:
    """No test loses its power, which is all that fsync is for; `test_store.py` tests that it is called."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: None)
        yield
