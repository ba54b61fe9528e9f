"""A git revision of the repository that a target is in, run beside the files that are there now.

It is checked out into a worktree for as long as it runs, in the environment that runs. But what this one has from the
repository, by `pip install -e` or by the working directory, comes from the worktree, which is first on PYTHONPATH.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.evidence.golden import git
from harness.project import Project, is_project
from harness.registry import module_of, targets
from harness.running.environments import CHECKOUT, HARNESS, NamedEnvironment, last_line, origins
from harness.running.identity import search_path, target_file
from harness.sources import is_editable, package_paths

_CHECKOUT_S = 300.0


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """A commit of a repository. `imported`: the top-level packages that come from there, with the target's first."""

    text: str  # as the user wrote it
    commit: str
    repository: Path
    target: str
    imported: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.commit[:12]


def revision_of(text: str, target: str, root: Path) -> Revision:
    """The revision that `text` means in the repository of the target; of torchtitan's, in the one of this folder.

    Raises HarnessError where there is none, or where nothing that the target imports is in that repository.
    """
    where = f"--against {text}"
    if shutil.which("git") is None:
        fix = "install git, or give PACKAGE==VERSION or the folder of a virtual environment."
        raise HarnessError("git is not installed.", where=where, fix=fix)
    start = Path.cwd() if target in targets() else Path(target_file(target, root)).parent
    toplevel = git(start, "rev-parse", "--show-toplevel").strip()
    if not toplevel:
        what = f"{start} is in no git repository, and there is no such environment."
        fix = "give a folder with bin/python, PACKAGE==VERSION, or a revision of the repository that the target is in."
        raise HarnessError(what, where=where, fix=fix)
    commit = "" if text.startswith("-") else git(start, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}")
    if not commit.strip():
        shallow = git(start, "rev-parse", "--is-shallow-repository").strip() == "true"
        fix = "`git fetch --unshallow`, as this clone has not the whole history." if shallow else "see `git log`."
        what = f"no revision of {toplevel}, no PACKAGE==VERSION, and no folder with bin/python."
        raise HarnessError(what, where=where, fix=fix)
    repository = Path(toplevel).resolve()
    imported = tuple(dict.fromkeys(_imported_from(repository, target, root)))
    if not imported:
        what = f"nothing that {target} trains is imported from {repository}."
        fix = "install that package there with `pip install -e`, or give PACKAGE==VERSION or a virtual environment."
        raise HarnessError(what, where=where, fix=fix)
    return Revision(text=text, commit=commit.strip(), repository=repository, target=target, imported=imported)


def _imported_from(repository: Path, target: str, root: Path) -> Iterator[str]:
    """Top-level names whose files are in the repository: the target's own, and those of packages installed with -e."""
    own = () if target in targets() else (module_of(target).partition(".")[0],)
    editable = (package for package in distributions() if is_editable(package))
    names = (*own, *(name for package in editable for name in (package.read_text("top_level.txt") or "").split()))
    for name in names:
        paths = package_paths(name, search_path(root))
        if name != "harness" and any(repository in path.parents for path in paths):
            yield name


@contextlib.contextmanager
def checked_out(revision: Revision, state: Path) -> Iterator[Path]:
    """A worktree with the revision, removed at the end. Hooks of the repository do not run.

    Raises HarnessError where git does not make it.
    """
    folder = state / "revisions" / revision.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove(revision.repository, folder)  # of a run that was killed
    add = ("worktree", "add", "--quiet", "--detach", "--force", str(folder), revision.commit)
    command = ["git", "-C", str(revision.repository), "-c", "core.hooksPath=/dev/null", *add]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECKOUT_S, check=False)
        if done.returncode != 0:
            what = f"git cannot check it out: {last_line(done.stderr)}."
            raise HarnessError(what, where=f"--against {revision.text}", fix=f"make room in {folder.parent}.")
        yield folder
    finally:
        _remove(revision.repository, folder)


def _remove(repository: Path, folder: Path) -> None:
    git(repository, "worktree", "remove", "--force", str(folder))
    shutil.rmtree(folder, ignore_errors=True)


def has_target(revision: Revision, worktree: Path, root: Path) -> bool:
    """False for a target that the revision has not got yet."""
    folders = _folders(revision, worktree, root)
    if revision.target in targets():
        return True
    names = module_of(revision.target).split(".")
    for at in range(len(names)):
        spec = PathFinder.find_spec(".".join(names[: at + 1]), list(folders))
        if spec is None:
            return False
        folders = tuple(spec.submodule_search_locations or ())
    return True


def revision_environment(revision: Revision, worktree: Path, project: Project) -> NamedEnvironment:
    """This environment, importing from the worktree what this process imports from the repository.

    Raises HarnessError where a hook of an installed package imports from the repository all the same.
    """
    others = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    kept = (folder for folder in others if _moved(revision, worktree, Path(folder)) is None)
    paths = (*CHECKOUT, *_folders(revision, worktree, project.root), *kept)
    python = Path(sys.executable)
    for name, origin in origins(python, revision.imported, paths).items():
        if origin and not Path(origin).resolve().is_relative_to(worktree.resolve()):
            what = f"{name} would be imported from {origin}, not from that revision."
            fix = "install it with `pip install -e . --config-settings editable_mode=compat`."
            raise HarnessError(what, where=f"--against {revision.text}", fix=fix)
    there, root = _moved(revision, worktree, Path.cwd()), _moved(revision, worktree, project.root)
    return NamedEnvironment(
        name=f"base-{revision.name}",
        python=python,
        cwd=there if there is not None and there.is_dir() else worktree,
        root=root if root is not None and is_project(root) else project.root,
        python_path=paths,
    )


def _folders(revision: Revision, worktree: Path, root: Path) -> Sequence[str]:
    """The folders of the worktree that stand for those of the repository in which this process looks for modules."""
    searched = [*map(Path, filter(None, (*sys.path, *search_path(root))))]
    of_hooks = (path.parent for name in revision.imported for path in package_paths(name, search_path(root)))
    here = (_moved(revision, worktree, path) for path in (*searched, *of_hooks) if path.resolve() != HARNESS)
    return tuple(dict.fromkeys(str(path) for path in here if path is not None and path.is_dir()))


def _moved(revision: Revision, worktree: Path, path: Path) -> Path | None:
    """The same path in the worktree; None outside of the repository."""
    path = path.resolve()
    if not path.is_relative_to(revision.repository) or path.is_relative_to(worktree.resolve()):
        return None
    return worktree / path.relative_to(revision.repository)
