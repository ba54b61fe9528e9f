"""Named changes of torch: found in the sources of a package, and by its version where these do not tell."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.matrix import upstream
from harness.matrix.upstream import CHANGES, UpstreamChange, changes_in, installed_changes

BY_NAME = {change.name: change for change in CHANGES}
NIGHT, RELEASE = "2.15.0.dev20260801+cpu", "2.15.0+cu132"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with nothing in it, which can be found and not be imported."""
    folder = tmp_path / "toy_torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    assert "toy_torch" not in sys.modules


def installed(folder: Path, change: UpstreamChange, text: str | None, version: str, patch: pytest.MonkeyPatch) -> bool:
    """Whether the toy has the change, with this text in the file that tells."""
    if text is not None:
        path = folder / change.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# of torch\n{text}\n")
    patch.setattr(upstream, "installed_version", lambda package: version)
    return replace(change, package="toy_torch").is_installed


@pytest.mark.parametrize("name", BY_NAME)
def test_the_sources_tell_before_the_version_does(name: str, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = BY_NAME[name]
    for version in (NIGHT, RELEASE, "2.13.0+cpu", "2.16.0a0+git12"):
        assert installed(toy, change, change.now, version, monkeypatch)
        assert not installed(toy, change, change.before, version, monkeypatch)


@pytest.mark.parametrize("text", [None, "", "def rewritten():\n    ..."])
@pytest.mark.parametrize("name", BY_NAME)
def test_the_version_tells_where_the_sources_do_not(
    name: str, text: str | None, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = BY_NAME[name]
    assert installed(toy, change, text, RELEASE, monkeypatch)
    assert installed(toy, change, text, "2.16.0.dev20261120", monkeypatch)
    assert not installed(toy, change, text, f"{change.since}.0.dev20260801", monkeypatch)
    assert not installed(toy, change, text, "2.13.0+cpu", monkeypatch)


def test_a_run_that_does_not_say_what_it_found_has_the_changes_of_its_versions() -> None:
    assert changes_in({"torch": RELEASE}) == frozenset(CHANGES)
    assert {change.name for change in changes_in({"torch": NIGHT})} == {"separate-backward-casts"}
    assert changes_in({"torch": "2.13.0"}) == changes_in({}) == frozenset()
    assert installed_changes() <= frozenset(CHANGES)
