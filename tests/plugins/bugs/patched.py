"""Sources of installed packages with a patch, in a process that imports them from copies."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Imported at the start of every interpreter whose PYTHONPATH has its folder.
_HOOK = """
import importlib.machinery, importlib.util, json, os, runpy, sys

class Patched(importlib.machinery.PathFinder):
    files = json.loads(os.environ["PATCHED"])

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in cls.files:
            return None
        inner = path if cls.files[name].endswith("__init__.py") else None
        folders = None if inner is None else [os.path.join(folder, name.rpartition(".")[2]) for folder in inner]
        return importlib.util.spec_from_file_location(name, cls.files[name], submodule_search_locations=folders)

sys.meta_path.insert(0, Patched)
"""


def installed_file(path: str) -> Path:
    """Return the file of an installed package that a patch or a link names: `src/torch/x.py` or `torch/x.py`."""
    inner = Path(path.removeprefix("src/"))
    spec = importlib.util.find_spec(inner.parts[0])
    assert spec is not None and spec.origin is not None, path
    return Path(spec.origin).parents[1] / inner


def patched_environment(patch: Path, folder: Path) -> dict[str, str]:
    """Return variables with which Python imports what the patch changes from copies in `folder`, changed."""
    names = re.findall(r"^--- a/(\S+)", patch.read_text(), flags=re.MULTILINE)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed_file(name), folder / name)
    subprocess.run(["git", "apply", "--whitespace=nowarn", str(patch.resolve())], cwd=folder, check=True)
    modules = {re.sub(r"(/__init__)?\.py$", "", name.removeprefix("src/")).replace("/", "."): name for name in names}
    (folder / "sitecustomize.py").write_text(_HOOK)
    files = {module: str(folder / name) for module, name in modules.items()}
    return {**os.environ, "PYTHONPATH": str(folder), "PATCHED": json.dumps(files), "GIT_CEILING_DIRECTORIES": "/"}


def with_fix(script: Path, fix: str) -> list[str]:
    """Return the command that applies FILE.py:FUNCTION and then runs a script."""
    file, _, name = fix.partition(":")
    code = f"import runpy; runpy.run_path({file!r})[{name!r}](); runpy.run_path({str(script)!r}, run_name='__main__')"
    return [sys.executable, "-c", code]
