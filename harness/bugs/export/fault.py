"""A planted fault as a file of its own, which an exported script takes as a patch."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping

from harness.bugs.export.bundle import NotBundled, bundle, source_of
from harness.errors import HarnessError

_FAULTS = "harness.worker.faults"
# Parts of the harness that do not run without it.
_LIMITS = (
    "harness.matrix",
    "harness.trace",
    "harness.worker.discovery",
    "harness.worker.dispatch_hooks",
    "harness.worker.probes",
    "harness.worker.targets",
    "harness.worker.virtual",
)


def exported_fault(name: str) -> str:
    """The file that plants a fault by its function of the same name. HarnessError where it needs the harness."""
    try:
        body = bundle(f"{_FAULTS}.{_modules()[name]}", name, {}, limits=_LIMITS)
    except NotBundled as reached:
        raise HarnessError(
            f"planted fault {name} cannot be exported: {reached.what}",
            fix="write it as a function of a file, and give --inject FILE.py:FUNCTION.",
        ) from reached
    return f'"""Plants the fault {name}: a deliberate bug."""\n\n{body}'


@functools.cache
def _modules() -> Mapping[str, str]:
    """The module of every function that plants a fault, by the name of the function."""
    paths = sorted(source_of(_FAULTS).parent.glob("*.py"), reverse=True)  # the first of two with the same name counts
    trees = ((path.stem, ast.parse(path.read_text())) for path in paths)
    return {node.name: module for module, tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
