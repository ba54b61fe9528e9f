"""Gets a torchtitan for the target: `ci/torchtitan.py get SOURCE[@COMMIT] FOLDER`, as `make torchtitan` does.

    ci/torchtitan.py names SOURCE COMMIT...    # which names of each commit the target would miss

SOURCE is a folder or the URL of a git repository. Without a commit a folder is taken as it is, with what is not
committed; anything else is cloned into FOLDER, and a commit that the target cannot drive is refused before a package is
installed. Only what a package needs is checked out, so a clone without all of its blobs will do.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness.errors import HarnessError
from harness.plugins.torchtitan.names import Read, in_folder, missing

_PARTS = ("torchtitan", "torchtitan_recipes", "assets", "pyproject.toml", "README.md", "LICENSE")
_SHOWN = 5  # names that a commit lacks


def _ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)


def _git(folder: Path, *words: str) -> str:
    done = _ran(folder, *words)
    if done.returncode:
        raise HarnessError(
            (done.stderr.strip() or "git failed").splitlines()[-1],
            where=f"git {' '.join(words[:2])} in {folder}",
            fix="give TORCHTITAN=a folder, or a repository with the commit: URL@COMMIT.",
        )
    return done.stdout


def _text(folder: Path, commit: str, path: str) -> str | None:
    done = _ran(folder, "show", f"{commit}:{path}")
    return None if done.returncode else done.stdout


def get(source: str, folder: Path) -> Path:
    """Return the folder of a torchtitan that the target can drive. HarnessError for any other."""
    if "@" in source:
        source, _, commit = source.rpartition("@")
    else:
        commit = ""
    if not commit and (Path(source) / "pyproject.toml").is_file():
        _require(f"torchtitan in {source}", in_folder(Path(source)))
        return Path(source)
    if not folder.is_dir():
        _git(Path(), "clone", "--quiet", "--no-checkout", "--filter=blob:none", source, str(folder))
    _git(folder, "remote", "set-url", "origin", source)
    _git(folder, "fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*")
    found = _commit(folder, commit)
    _git(folder, "read-tree", found)
    parts = _git(folder, "ls-files", "-z", *_PARTS).rstrip("\0").split("\0")
    for first in range(0, len(parts), 500):
        _git(folder, "checkout", "--quiet", "--force", found, "--", *parts[first : first + 500])
    _git(folder, "update-ref", "--no-deref", "HEAD", found)
    _require(f"torchtitan {found[:9]}", in_folder(folder))
    _name(folder / "assets" / "version.txt", found)
    return folder


def _commit(folder: Path, commit: str) -> str:
    for name in (f"origin/{commit or 'HEAD'}", commit or "HEAD"):
        done = _ran(folder, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if not done.returncode:
            return done.stdout.strip()
    _git(folder, "fetch", "--quiet", "origin", commit)  # of no branch, as that of a pull request
    return _git(folder, "rev-parse", "--verify", "FETCH_HEAD^{commit}").strip()


def _name(version: Path, commit: str) -> None:
    """Put the commit into the version, which main leaves at that of some release: results name it."""
    version.write_text(f"{version.read_text().strip().partition('+')[0]}+g{commit[:9]}\n")


def _require(what: str, read: Read) -> None:
    gone = missing(read)
    if gone:
        listed = "; ".join(map(str, gone[:_SHOWN]))
        raise HarnessError(
            f"it lacks {len(gone)} names that the target uses: {listed}.",
            where=what,
            fix="give another commit: `ci/torchtitan.py names SOURCE COMMIT...` says what each one lacks.",
        )


def names(source: Path, commits: Sequence[str]) -> None:
    """Print what the target would miss in each commit."""
    for commit in commits:
        gone = missing(partial(_text, source, commit))
        when = _git(source, "log", "-1", "--format=%h %cs %s", commit).strip()
        print(f"{when}: {f'lacks {len(gone)} names' if gone else 'has all names'}")
        for name in gone:
            print(f"  {name}")


def main(words: Sequence[str]) -> int:
    """Return 0, or 2 after saying what is wrong."""
    try:
        match words:
            case ["get", source, folder]:
                print(get(source, Path(folder)))
            case ["names", source, *commits] if commits:
                names(Path(source), commits)
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except HarnessError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
