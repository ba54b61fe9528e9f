"""Functions of a test, as modules that ranks can import whatever pytest has put on the path.

A module of two lines stands for each, in the cache folder, and every command of `fp8-harness` finds it there. A digest
of the sources is in it, because what a reference computed holds for these alone.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NAMED = "and ranks import it by its name. Fix:"
_MOVE = "move it to the top level of the module, as `{0}`, and give that."


def name_for(function: Callable[..., Any]) -> str:
    """Return the name of the module that stands for a function or class. TypeError for what no rank can import."""
    __tracebackhide__ = True
    name, (module, folder) = _importable(function), _place(function)
    key = hashlib.sha256(f"{folder}\0{module}\0{name}".encode()).hexdigest()[:8]
    return re.sub(r"\W", "_", f"{module.rpartition('.')[2]}_{name}_{key}")


def write_module(function: Callable[..., Any]) -> str:
    """Write the module whose `build` is this function or class, unless it is there as it should be; its name."""
    __tracebackhide__ = True
    from harness.durable import write_whole
    from harness.project import builds_folder
    from harness.running.identity import digest_in

    stands, name, (module, folder) = name_for(function), function.__qualname__, _place(function)
    folders = list(dict.fromkeys((folder, *(str(Path(entry).resolve()) for entry in sys.path))))
    text = (
        f'"""{name} of {module}, for ranks; sources {digest_in(module, folders)[:16]}."""\n\n'
        f"import sys\n\nsys.path.insert(0, {folder!r})\n"
        f"sys.path += [folder for folder in {folders[1:]!r} if folder not in sys.path]\n\n"
        f"from {module} import {name} as build  # noqa: E402\n"
    )
    path = builds_folder() / f"{stands}.py"
    if not path.is_file() or path.read_text() != text:
        write_whole(path, text.encode())
    return stands


def _importable(function: Callable[..., Any]) -> str:
    """Return the name of a function or class at the top level of its module."""
    __tracebackhide__ = True
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    if not callable(function) or not name or not module:
        raise TypeError(f"{function!r} is no function of a module, {_NAMED} {_MOVE.format('def build(...)')}")
    if "." in name or "<" in name:
        last = name.rpartition(".")[2]
        kind = "a lambda" if "<lambda>" in last else "defined inside of a function" if "<" in name else "a method"
        form = f"class {last}" if isinstance(function, type) else f"def {last.replace('<lambda>', 'build')}(...)"
        raise TypeError(f"{name} is {kind}, {_NAMED} {_MOVE.format(form)}")
    if getattr(sys.modules.get(module), name, None) is not function:
        what = f"{module}.{name} is something else than what was given, {_NAMED}"
        raise TypeError(f"{what} give the function that the module has by that name.")
    return str(name)


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the module of the function as ranks import it, and the folder in which they look for it."""
    name = function.__module__
    file = getattr(sys.modules[name], "__file__", None)
    if file is None:
        raise TypeError(f"{function.__qualname__} is in no file, {_NAMED} write it into a module.")
    path = Path(file).resolve()
    parts = (*name.split("."), "__init__") if path.stem == "__init__" else tuple(name.split("."))
    if path.with_suffix("").parts[-len(parts) :] == parts:
        return name, str(path.parents[len(parts) - 1])
    return path.stem, str(path.parent)  # `__main__`, and what pytest has imported under a name of its own
