"""`ci/torchtitan.py get`: a folder as it is, or a commit of a repository, named by its version; others are refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ci.torchtitan import get, main
from harness.errors import HarnessError
from harness.plugins.torchtitan import names
from harness.plugins.torchtitan.names import Name

pytestmark = pytest.mark.programs


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits: the first has the name that is used, the second has lost it."""
    folder = tmp_path / "titan"
    for path, text in (
        ("torchtitan/config.py", "kept = 1\n"),
        ("assets/version.txt", "0.2.2\n"),
        ("pyproject.toml", ""),
        ("tests/large.json", "{}"),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main", str(folder))
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    (folder / "torchtitan" / "config.py").write_text("renamed = 1\n")
    git(folder, "commit", "-qam", "second")
    return folder


@pytest.fixture(autouse=True)
def uses_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "used", lambda: {Name("torchtitan.config", "kept")})


@pytest.mark.parametrize("source", ["{}", "file://{}"])
def test_a_commit_is_checked_out_without_what_no_package_needs(source: str, repository: Path, tmp_path: Path) -> None:
    first, made = git(repository, "rev-parse", "HEAD~1"), tmp_path / "made"
    assert get(f"{source.format(repository)}@{first}", made) == made
    assert (made / "torchtitan" / "config.py").read_text() == "kept = 1\n" and not (made / "tests").exists()
    assert (made / "assets" / "version.txt").read_text() == f"0.2.2+g{first[:9]}\n"
    assert get(f"{repository}@{first[:10]}", made) == made  # again, and by a short name


def test_a_commit_without_a_name_is_refused_by_that_name(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"it lacks 1 names that the target uses: torchtitan\.config: kept"):
        get(f"{repository}@main", tmp_path / "made")
    with pytest.raises(HarnessError, match="it lacks 1 names"):
        get(str(repository), tmp_path / "made")  # a folder as it is


def test_a_commit_of_no_branch_is_fetched(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "HEAD~1")
    pull = git(repository, "commit-tree", f"{first}^{{tree}}", "-p", first, "-m", "pull")
    get(f"{repository}@{first}", tmp_path / "made")
    git(repository, "update-ref", "refs/pull/1/head", pull)
    git(repository, "config", "uploadpack.allowAnySHA1InWant", "true")
    get(f"file://{repository}@{pull}", tmp_path / "made")
    assert git(tmp_path / "made", "rev-parse", "HEAD") == pull


def test_a_folder_counts_as_it_is_with_what_is_not_committed(repository: Path, tmp_path: Path) -> None:
    (repository / "torchtitan" / "config.py").write_text("kept = 2\n")
    assert get(str(repository), tmp_path / "made") == repository


@pytest.mark.parametrize("source", ["{}@nothing", "{}/nowhere"])
def test_what_is_no_commit_is_refused_before_anything_is_made(
    source: str, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["get", source.format(repository), str(tmp_path / "made")]) == 2
    assert "Fix: give TORCHTITAN=" in capsys.readouterr().err


def test_commits_are_compared_by_what_each_lacks(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["names", str(repository), "HEAD~1", "HEAD"]) == 0
    shown = capsys.readouterr().out
    assert "first: has all names" in shown and "second: lacks 1 names\n  torchtitan.config: kept" in shown
