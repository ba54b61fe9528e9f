"""Which names of torchtitan the target uses, and which of them a checkout lacks: nothing is imported.

main has no versions, so a commit is known by what is in it. `ci/torchtitan.py` compares commits by the same functions.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from harness.errors import HarnessError
from harness.hints import INSTALL_TORCHTITAN
from harness.sources import installed_version, package_paths

TORCH = "2.15"  # FSDP2 there lets go of what it gathered once operands are made of it
_SOURCES = Path(__file__).parent / "worker"

Read = Callable[[str], str | None]  # the text of a file of torchtitan, by its path in the checkout


class Name(NamedTuple):
    """A name of a module of torchtitan. `of`: of what it is an option, such as "Trainer.Config"."""

    module: str
    name: str
    of: str = ""

    def __str__(self) -> str:
        return f"{self.module}: {self.of}({self.name}=...)" if self.of else f"{self.module}: {self.name}"


def require() -> None:
    """Raise HarnessError where the target cannot drive the torchtitan that is installed, or with this torch."""
    where, torch = "target torchtitan", installed_version("torch") or "0"
    if Version(torch) < Version(TORCH):
        raise HarnessError(f"it needs torch {TORCH}, not {torch}.", where=where, fix=INSTALL_TORCHTITAN)
    folder = package_paths("torchtitan")[0].parent
    gone = missing(in_folder(folder))
    if gone:
        installed = installed_version("torchtitan")
        what = f"torchtitan {installed} in {folder} lacks {len(gone)} names that it uses, first {gone[0]}."
        raise HarnessError(what, where=where, fix=INSTALL_TORCHTITAN)


def in_folder(folder: Path) -> Read:
    """Return what reads the files of a checkout."""
    return lambda path: (folder / path).read_text() if (folder / path).is_file() else None


def missing(read: Read) -> list[Name]:
    """Return the names that the target uses and this torchtitan lacks, sorted."""
    seen = _Modules(read)
    return sorted(name for name in used() if not seen.has(name))


def used() -> set[Name]:
    """Return what the modules of the target import from torchtitan, and the options that they pass to it."""
    names: set[Name] = set()
    for path in sorted(_SOURCES.glob("*.py")):
        tree = ast.parse(path.read_text())
        homes = dict(_imported(tree))
        names |= {Name(*home) for home in homes.values()}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            first, _, rest = _dotted(call.func).partition(".")
            if first in homes:
                module, name = homes[first]
                of = f"{name}.{rest}" if rest else name
                names |= {Name(module, word.arg, of) for word in call.keywords if word.arg is not None}
    return names


def _imported(tree: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torchtitan":
            yield from ((alias.asname or alias.name, (str(node.module), alias.name)) for alias in node.names)


def _dotted(node: ast.expr) -> str:
    """Return "Trainer.Config" for that expression, and nothing for one that is no name."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class _Modules:
    """The modules of a torchtitan, parsed once each."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._trees: dict[str, ast.Module | None] = {}

    def has(self, name: Name) -> bool:
        if not name.of:
            return self._is_module(f"{name.module}.{name.name}") or self._found(name.module, name.name) is not None
        found = self._found(name.module, name.of)
        return found is not None and self._takes(*found, name.name)

    def _is_module(self, module: str) -> bool:
        return self._tree(module) is not None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = module.replace(".", "/")
            text = next(filter(None, map(self._read, (f"{path}/__init__.py", f"{path}.py"))), None)
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def _found(self, module: str, dotted: str) -> tuple[str, ast.AST] | None:
        """Return what a name of a module is bound to, and the module that has it."""
        first, _, rest = dotted.partition(".")
        tree = self._tree(module)
        for node in () if tree is None else _bound(tree):
            if first in _names_of(node):
                return self._inside(module, node, rest) if rest else (module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == first:
                        home = self._home(module, node)
                        return self._found(home, f"{alias.name}.{rest}" if rest else alias.name)
        return None

    def _home(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return str(node.module)
        package = module.split(".")
        if self._read(f"{module.replace('.', '/')}/__init__.py") is None:
            package = package[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])

    def _inside(self, module: str, node: ast.AST, dotted: str) -> tuple[str, ast.AST] | None:
        """Return what a class has under this name, itself or from one of its bases."""
        if not isinstance(node, ast.ClassDef):
            return None
        first, _, rest = dotted.partition(".")
        for inner in _bound(node):
            if first in _names_of(inner):
                return self._inside(module, inner, rest) if rest else (module, inner)
        for home, base in self._bases(module, node):
            if (found := self._inside(home, base, dotted)) is not None:
                return found
        return None

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
        for base in map(_dotted, node.bases):
            if base and (found := self._found(module, base)) is not None:
                yield found

    def _takes(self, module: str, node: ast.AST, option: str) -> bool:
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            return node.args.kwarg is not None or any(argument.arg == option for argument in given)
        return self._inside(module, node, option) is not None or self._inherits_unknown(module, node)

    def _inherits_unknown(self, module: str, node: ast.AST) -> bool:
        """Return True for a class with a base outside of torchtitan, such as NamedTuple."""
        bases = [name for name in map(_dotted, getattr(node, "bases", [])) if name]
        return any(self._found(module, name) is None for name in bases)


def _bound(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module or class that bind names, under `if` and `try` too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _bound(child)
        else:
            yield child


def _names_of(node: ast.AST) -> set[str]:
    """Return the names that a statement binds, but for imports."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
