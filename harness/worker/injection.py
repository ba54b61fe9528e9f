"""Injections: a function of the user, called in every rank before the target is built, to try a patch on the matrix."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def inject(spec: str) -> None:
    """Call FUNCTION of `FILE.py:FUNCTION` without arguments. What it raises carries a note that names the injection."""
    path, _, function = spec.rpartition(":")
    try:
        module_spec = importlib.util.spec_from_file_location(f"injection_{Path(path).stem}", path)
        assert module_spec is not None and module_spec.loader is not None, f"{path} is not a Python file"
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        getattr(module, function)()
    except Exception as error:
        raise InjectionError(f"injection {spec} raised {type(error).__name__}: {error}") from error


class InjectionError(Exception):
    """An injection failed: the run says nothing about the target."""
