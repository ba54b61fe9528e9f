"""Injections: a user's patch or a planted fault that every rank applies before the target is built."""

import sys
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from harness.registry import injections, load
from harness.trace.record import Patch


class InjectionError(Exception):
    """An injection raised, so the run says nothing about the target."""


def inject(patch: Patch) -> None:
    """Apply a patch. Raises InjectionError, which names it."""
    try:
        if patch.source:
            _call(patch)
        else:
            prefix, separator, name = patch.text.partition(":")
            load(injections()[prefix + separator].plant)(name)
    except Exception as error:
        raise InjectionError(f"injection {patch.text} raised {type(error).__name__}: {error}") from error


class _SourceOf(SourceLoader):
    """Loads the source of a patch, of which tracebacks show lines too: its file may be on another machine."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch

    def get_filename(self, fullname: str) -> str:
        return self._patch.text.rpartition(":")[0]

    def get_data(self, path: str | bytes) -> bytes:
        return self._patch.source


def _call(patch: Patch) -> None:
    path, _, function = patch.text.rpartition(":")
    spec = spec_from_loader(f"injection_{Path(path).stem}", _SourceOf(patch))
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # a compiler imports what compiled code calls
    spec.loader.exec_module(module)
    getattr(module, function)()
