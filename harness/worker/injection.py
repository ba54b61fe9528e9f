"""Injections: a user's patch or a planted fault that every rank applies before the target is built."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from harness.matrix.faults import PREFIX


class InjectionError(Exception):
    """An injection raised, so the run says nothing about the target."""


def inject(spec: str) -> None:
    """Apply `FILE.py:FUNCTION` or `fault:NAME`. Raises InjectionError, which names the injection."""
    try:
        if spec.startswith(PREFIX):
            from harness.worker.faults import plant  # imported only where a fault is planted

            plant(spec.removeprefix(PREFIX))
        else:
            _call(spec)
    except Exception as error:
        raise InjectionError(f"injection {spec} raised {type(error).__name__}: {error}") from error


def _call(spec: str) -> None:
    path, _, function = spec.rpartition(":")
    module_spec = importlib.util.spec_from_file_location(f"injection_{Path(path).stem}", path)
    assert module_spec is not None and module_spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    getattr(module, function)()
