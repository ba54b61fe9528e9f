"""A planted fault as a file of its own, which an exported script takes as a patch. Sources are parsed, not imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.durable import write_whole
from harness.errors import HarnessError
from harness.matrix.choice import FAULT_PREFIX, catalogue_of_faults
from harness.registry import injections as kinds_of_injections
from harness.running.injection import Injection

_PACKAGE = Path(__file__).parents[2]
# Parts of the harness that do not run without it.
_LIMITS = (
    "harness.matrix",
    "harness.trace",
    "harness.worker.dispatch_hooks",
    "harness.worker.probes",
    "harness.worker.process",
    "harness.worker.tensors.digests",
    "harness.worker.tensors.names",
    "harness.worker.tensors.names",
    "harness.worker.tensors.places",
    "harness.worker.targets",
    "harness.worker.virtual",
)


class _NeedsHarness(HarnessError):
    """A definition needs a part of the harness."""


def exported_fault(name: str) -> str:
    """The file that plants a fault by its function of the same name. HarnessError where it needs the harness."""
    imports: set[str] = set()
    texts: dict[tuple[str, str], str] = {}
    try:
        gather(_modules()[name], name, imports, texts)
    except _NeedsHarness as reached:
        raise HarnessError(
            f"planted fault {name} cannot be exported: {reached.what}",
            fix="write it as a function of a file, and give --inject FILE.py:FUNCTION.",
        ) from reached
    head = [
        f'"""Plants the fault {name}, a deliberate bug: {_title(name)}."""',
        "\n".join(sorted(imports)),
    ]
    return "\n\n\n".join(["\n\n".join(head), *texts.values()]) + "\n"


def _title(name: str) -> str:
    title: str = catalogue_of_faults("bug export").fault_named(name).title
    return title


def patch_of(injection: Injection, folder: Path) -> str:
    """FILE.py:FUNCTION that does the same as an injection; of a planted fault, a new file in `folder`."""
    if not injection.text.startswith(FAULT_PREFIX):
        return injection.target
    fault = injection.text.removeprefix(FAULT_PREFIX)
    write_whole(folder / f"{fault}.py", exported_fault(fault).encode())
    return f"{folder / fault}.py:{fault}"


def planted_title(injections: Sequence[Injection]) -> str:
    """What the first planted fault among these injections is; "" without one."""
    planted = (injection.text for injection in injections if injection.text.startswith(FAULT_PREFIX))
    return next((_title(text.removeprefix(FAULT_PREFIX)) for text in planted), "")


def gather(
    module: str,
    name: str,
    imports: set[str],
    texts: dict[tuple[str, str], str],
    read: Callable[[str], Source] | None = None,
) -> None:
    """Add the text of a definition, behind those of what it needs, and the imports from elsewhere."""
    source = (read or _read)(module)
    node = source.definitions.get(name)
    words = _words(node or ast.Pass())
    inner = next((imported for imported in words.imported if imported.startswith("harness.")), None)
    if node is None or inner is not None or module.startswith(_LIMITS):
        raise _NeedsHarness(f"it needs {inner or module}, which is a part of the harness.")
    if (module, name) in texts:
        return
    texts[module, name] = ""  # it may need itself
    for used in words.used:
        if used in source.definitions:
            gather(module, used, imports, texts, read)
        for line in source.imports.get(used, ()):
            if line.module.startswith("harness."):
                gather(line.module, line.name, imports, texts, read)
            else:
                imports.add(line.text)
    del texts[module, name]
    texts[module, name] = source.text_of(node)  # behind what it needs


class _Words(NamedTuple):
    """The names that a definition uses, each once in their order, and the modules that it imports inside."""

    used: tuple[str, ...]
    imported: frozenset[str]


@functools.cache  # most faults share their helpers
def _words(node: ast.stmt) -> _Words:
    nodes = list(ast.walk(node))
    return _Words(
        used=tuple(dict.fromkeys(name.id for name in nodes if isinstance(name, ast.Name))),
        imported=frozenset(statement.module or "" for statement in nodes if isinstance(statement, ast.ImportFrom)),
    )


class _Import(NamedTuple):
    module: str
    name: str
    text: str


class Source:
    """The top level of one module: what it defines, and what it imports by the name that this binds."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, list[_Import]] = {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", "")
                for alias in node.names if module != "__future__" else ():
                    bound = alias.asname or (alias.name if module else alias.name.partition(".")[0])
                    one = ast.ImportFrom(module, [alias], 0) if module else ast.Import([alias])
                    self.imports.setdefault(bound, []).append(_Import(module, alias.name, ast.unparse(one)))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
                self.definitions |= {name.id: node for name in names}

    def text_of(self, node: ast.stmt) -> str:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        return "\n".join(self._lines[first - 1 : node.end_lineno])


@functools.cache
def _read(module: str) -> Source:
    path = _PACKAGE.joinpath(*module.split(".")[1:])
    return Source((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


@functools.cache
def _modules() -> Mapping[str, str]:
    """The module of the function that plants each fault."""
    package, _, _ = kinds_of_injections()[FAULT_PREFIX].plant.partition(":")
    folder = _PACKAGE.joinpath(*package.split(".")[1:])
    modules = [f"{package}.{path.stem}" for path in sorted(folder.glob("*.py"), reverse=True)]
    return {name: module for module in modules for name in _read(module).definitions}  # of two with a name the first
