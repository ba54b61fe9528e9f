"""The git tree of a project: its commit, what differs from it, and the goldens of another one. Empty without git."""

import contextlib
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.errors import HarnessError

_DIRTY = "-dirty"


def tree_commit(root: Path) -> str:
    """The git commit of the tree at `root`, with "-dirty" when tracked files differ; "unknown" without git."""
    return git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").strip() or "unknown"


def source_commit(root: Path) -> str:
    """As `tree_commit`, but "-dirty" only if `changed_files` has any: the provenance of references."""
    commit = tree_commit(root).removesuffix(_DIRTY)
    return f"{commit}{_DIRTY}" if changed_files(root) else commit


def changed_files(root: Path) -> tuple[str, ...]:
    """The tracked files outside of golden/ that differ from the commit, relative to the git repository."""
    everything_else = ("--", ":(top)", ":(exclude)golden")
    return tuple(filter(None, git(root, "diff", "--name-only", "-z", "HEAD", *everything_else).split("\0")))


def tree_difference(root: Path) -> str:
    """The differences of tracked files from the commit, as a patch; empty without git or without any."""
    return git(root, "diff", "HEAD")


@contextlib.contextmanager
def goldens_of(root: Path, against: str) -> Iterator[Path]:
    """A folder with the golden/ of another project root, or of a git revision of this one.

    Raises HarnessError where it is neither.
    """
    if against and (Path(against) / "golden").is_dir():
        yield Path(against)
        return
    if against.startswith("-") or not git(root, "rev-parse", "--verify", "--quiet", f"{against}^{{commit}}"):
        fix = "name a commit, a branch or a tag of this project, or a folder with golden/."
        raise HarnessError("neither a revision nor a project.", where=f"--against {against}", fix=fix)
    with tempfile.TemporaryDirectory(prefix="fp8-harness-") as folder:
        archive = _git_bytes(root, "archive", "--format=tar", against, "golden")
        if archive:  # that revision may have had no goldens
            _unpack(archive, Path(folder))
        yield Path(folder)


def _unpack(archive: bytes, folder: Path) -> None:
    """Write the regular files of a tar archive below a folder. The safe filter of `extractall` needs Python 3.11.4."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in filter(tarfile.TarInfo.isfile, files):
            content = files.extractfile(member)
            path = folder / member.name
            if content is not None and path.resolve().is_relative_to(folder.resolve()):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


def git(root: Path, *words: str) -> str:
    """What git prints; empty when it fails or is not installed."""
    return _git_bytes(root, *words).decode(errors="replace")


def _git_bytes(root: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
