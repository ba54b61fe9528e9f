"""Injections: a function called in every rank before the target is built: a user's patch, or a planted fault."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from harness.planted.faults import PREFIX


def inject(spec: str) -> None:
    """Do what `FILE.py:FUNCTION` or `fault:NAME` says. What it raises carries a note that names the injection."""
    try:
        if spec.startswith(PREFIX):
            _plant(spec.removeprefix(PREFIX))
        else:
            _call(spec)
    except Exception as error:
        raise InjectionError(f"injection {spec} raised {type(error).__name__}: {error}") from error


class InjectionError(Exception):
    """An injection failed: the run says nothing about the target."""


def _plant(name: str) -> None:
    from harness.worker.faults.planting import plant  # patches' imports only where a fault is planted

    plant(name)


def _call(spec: str) -> None:
    path, _, function = spec.rpartition(":")
    module_spec = importlib.util.spec_from_file_location(f"injection_{Path(path).stem}", path)
    assert module_spec is not None and module_spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    getattr(module, function)()
