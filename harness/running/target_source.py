"""The source of a target: where its module is and what it consists of, found without importing it.

A user's target is looked for in the working directory and in the project too, so that one that is not installed works.
Of the package that a target is in, every byte counts for a witness; of the packages that it imports, version, paths,
sizes and times of change.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harness.errors import HarnessError
from harness.matrix.targets import MODULES, REFERENCE, VERSIONS, module_of
from harness.running.witness_key import PACKAGES
from harness.sources import files_digest, installed_version, module_digest, module_files, source_digest

_SKIPPED = {"harness", *PACKAGES, *sys.stdlib_module_names}


def search_path(root: Path) -> tuple[str, ...]:
    """The folders in which ranks look for a target besides those of this process."""
    return tuple(dict.fromkeys((str(Path.cwd()), str(root))))


def check_targets(targets: Iterable[str], root: Path) -> None:
    """Raises HarnessError for a target whose module is not there, or whose training framework is not installed."""
    for target in dict.fromkeys(targets):
        if target in VERSIONS:
            _check_torchtitan(target)
        if target not in MODULES and not _files(target, search_path(root)):
            folders = " or ".join(search_path(root))
            raise HarnessError(
                f"there is no module {target}.",
                where=f"target {target}",
                fix=f"install the package that it is in, or put its file into {folders}.",
            )


def _check_torchtitan(target: str) -> None:
    installed, driven = installed_version("torchtitan"), VERSIONS[target]
    if installed == driven:
        return
    what = "torchtitan is not installed." if installed is None else f"it drives torchtitan {driven}, not {installed}."
    extra = target.replace("_", "-")
    raise HarnessError(what, where=f"target {target}", fix=f"pip install 'fp8-harness[{extra}]'")


def target_file(target: str, root: Path) -> str:
    """The file of the module of a target; the name of the module where it is found in no file."""
    names = module_of(target).split(".")
    folders = search_path(root)
    endings = ("/".join(names) + ".py", "/".join((*names, "__init__.py")))
    return next((str(path) for path in _files(target, folders) if path.as_posix().endswith(endings)), target)


def own_source_digest(target: str, root: Path) -> str:
    """A digest of the package of a target of the user's own, equal on any machine; empty for targets of the harness."""
    return "" if target in MODULES else module_digest(module_of(target), search_path(root))


@functools.cache
def target_digest(target: str, root: Path) -> str:
    """A digest of what a target computes with, besides torch and the harness; empty for the reference target."""
    if target == REFERENCE:
        return ""
    if target in MODULES:
        return f"{target} {installed_version('torchtitan')} {files_digest('torchtitan')}"
    folders = search_path(root)
    files = _files(target, folders)
    imported = sorted(_imported(files) - _SKIPPED - {target.partition(".")[0]})
    parts = [source_digest(files[0].parent, files) if files else ""]
    parts += [f"{name} {installed_version(name)} {files_digest(name, folders)}" for name in imported]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _files(target: str, folders: Sequence[str]) -> list[Path]:
    return module_files(module_of(target), folders)


def _imported(files: Iterable[Path]) -> set[str]:
    """Top-level names of everything that these files import."""
    return {name.partition(".")[0] for path in files for name in _imports(path)}


def _imports(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # its own error is what ranks will report
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
