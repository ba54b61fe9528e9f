"""What is changed in a module when a script imports it: importing it at the start would take long."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Context = Callable[[], AbstractContextManager[None]]


class _Within(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, context: Context) -> None:
        self._name, self._context = name, context

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def within(module: Any) -> None:
                with self._context():
                    execute(module)

            spec.loader.exec_module = within
        return spec


def around_import(name: str, context: Context) -> None:
    """Import this module in a context, when it is imported."""
    sys.meta_path.insert(0, _Within(name, context))


def after_import(name: str, change: Callable[[Any], None]) -> None:
    """Call `change` with this module when it is imported, or now where it is."""

    @contextmanager
    def changed() -> Iterator[None]:
        yield
        change(sys.modules[name])

    if name in sys.modules:
        change(sys.modules[name])
    else:
        around_import(name, changed)


def is_installed(*names: str) -> bool:
    """Return whether a script could import these."""
    return all(importlib.util.find_spec(name) is not None for name in names)


def has_interpreter() -> bool:
    """Return whether Triton's own interpreter can run its kernels."""
    return is_installed("triton", "ml_dtypes")
