"""A git revision beside the tree that is there: what is imported from it, and what cannot be."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.plugins.parity.against import Revision, checked_out, has_target, revision_environment, revision_of
from harness.project import Project
from harness.running.environments import HARNESS, origins
from tests.programs import make_commit, run_git

pytestmark = pytest.mark.programs

TARGET = "rev_target"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a target, a package in src/ that is on the path, and changes that are not committed."""
    folder = tmp_path / "clone"
    (folder / "src" / "rev_package").mkdir(parents=True)
    (folder / "src" / "rev_package" / "__init__.py").touch()
    (folder / f"{TARGET}.py").write_text("import rev_package\n")
    (folder / "cases").mkdir()
    (folder / "golden").mkdir()
    (folder / "cases" / "pr.toml").touch()
    (folder / "golden" / "x").touch()
    make_commit(folder, ".")
    hook = folder / ".git" / "hooks" / "post-checkout"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    (folder / f"{TARGET}.py").write_text("import rev_package  # not committed\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder / "src"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder / "src"), "/elsewhere")))
    return folder


def project_in(folder: Path, state: Path) -> Project:
    return Project(root=folder, state=state)


def revision(folder: Path, text: str = "HEAD") -> Revision:
    return revision_of(text, TARGET, folder)


def test_everything_of_the_repository_comes_from_the_worktree(repository: Path, tmp_path: Path) -> None:
    head = revision(repository)
    project = project_in(repository, tmp_path / "state")
    with checked_out(head, project.state) as worktree:
        assert has_target(head, worktree, repository)
        place = revision_environment(head, worktree, project)
        assert place.python_path is not None and place.python_path[-1] == "/elsewhere"
        where = origins(place.python, (TARGET, "rev_package", "harness"), place.python_path)
        assert where == {
            TARGET: str(worktree / f"{TARGET}.py"),
            "rev_package": str(worktree / "src" / "rev_package" / "__init__.py"),
            "harness": str(HARNESS / "harness" / "__init__.py"),
        }
        assert (worktree / f"{TARGET}.py").read_text() == "import rev_package\n"
        assert (place.cwd, place.root) == (worktree, worktree)
        assert not any(path.startswith(str(repository)) for path in place.python_path)
    assert not worktree.exists()
    assert (repository / f"{TARGET}.py").read_text().endswith("not committed\n")


def test_a_worktree_that_a_killed_run_left_is_no_obstacle(repository: Path, tmp_path: Path) -> None:
    head, state = revision(repository), tmp_path / "state"
    left = checked_out(head, state)
    left.__enter__()  # never left
    with checked_out(head, state) as worktree:
        assert (worktree / f"{TARGET}.py").exists()


def test_a_target_may_be_new(repository: Path, tmp_path: Path) -> None:
    (repository / "later.py").touch()
    head = revision_of("HEAD", "later", repository)
    with checked_out(head, tmp_path) as worktree:
        assert not has_target(head, worktree, repository)


def test_a_hook_of_an_editable_package_is_refused(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    info = packages / "hooked-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hooked\nVersion: 1\n")
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///x", "dir_info": {"editable": True}}))
    (info / "top_level.txt").write_text("rev_package\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    (packages / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(repository / 'src')!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    head = revision(repository)
    assert head.imported == (TARGET, "rev_package")
    project = project_in(repository, tmp_path / "state")
    with (
        checked_out(head, project.state) as worktree,
        pytest.raises(HarnessError, match=r"rev_package would be imported from .*clone"),
    ):
        revision_environment(head, worktree, project)


@pytest.mark.parametrize("text", ["nowhere", "-x", "HEAD~7", "venv/of/nobody"])
def test_what_is_no_revision_is_said(repository: Path, text: str) -> None:
    with pytest.raises(HarnessError, match=r"no revision of .*, no PACKAGE==VERSION, and no folder with bin/python"):
        revision(repository, text)


def test_a_shallow_clone_is_told_how_to_get_the_rest(repository: Path, tmp_path: Path) -> None:
    run_git(repository, "commit", "--allow-empty", "-m", "second")
    shallow = tmp_path / "shallow"
    run_git(tmp_path, "clone", "--depth", "1", f"file://{repository}", str(shallow))
    with pytest.raises(HarnessError) as raised:
        os.chdir(shallow)
        revision_of("HEAD~1", TARGET, shallow)
    assert "git fetch --unshallow" in str(raised.value)


def test_without_git_or_a_repository_it_says_what_to_give(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "lonely.py").touch()
    monkeypatch.chdir(outside)
    with pytest.raises(HarnessError, match="is in no git repository"):
        revision_of("HEAD", "lonely", outside)
    monkeypatch.chdir(repository)
    with pytest.raises(HarnessError, match="nothing that torchtitan trains is imported from"):
        revision_of("HEAD", "torchtitan", repository)
    monkeypatch.setenv("PATH", str(outside))
    with pytest.raises(HarnessError, match="git is not installed"):
        revision(repository)
