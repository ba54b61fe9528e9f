"""What a result depends on: the source of its target, the environment of its run, and the key of its witnesses.

It imports nothing that it inspects. A user's target may be in the working directory or in the project.
Of its package, and of a rank program, every byte counts for a witness. Of torch and of packages that a target imports,
the content of every Python file and shared library counts (`files_digest`): versions are not enough where files are
edited in place. So a fresh checkout, or an installation of the same wheels, has the same key. An edit that keeps the
size and sets back the time is not seen.
"""

import ast
import functools
import hashlib
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from harness.engine.hardware import CPUINFO, arithmetic_limits, cpu_kind
from harness.errors import HarnessError
from harness.evidence.golden import tree_commit, tree_difference
from harness.hints import EXEC
from harness.matrix.upstream import installed_changes
from harness.project import builds_folder
from harness.registry import REFERENCE, Target, is_offered, load, module_of, needed, targets
from harness.request import default_arithmetic
from harness.result import Environment
from harness.running.plan import DEFAULT_PROGRAM, Plan
from harness.sources import (
    MODULES,
    common_folder,
    files_digest,
    installed_source,
    installed_version,
    is_editable,
    module_digest,
    module_files,
    package_paths,
    source_digest,
)

_COMPUTE = ("torch", "torchao", "numpy")  # what every rank imports
_SKIPPED = {"harness", *_COMPUTE, *sys.stdlib_module_names}
_HERE = Path(__file__).parents[1]
_OURS = ("worker", "trace", "matrix", "expect")  # the packages of the harness that compute a reference


def search_path(root: Path) -> tuple[str, ...]:
    """Return the folders in which ranks look for a target besides those of this process.

    The last has the modules that the library makes for functions which are called `build` in a test.
    """
    return tuple(dict.fromkeys((str(Path.cwd()), str(root), str(builds_folder()))))


def check_targets(names: Iterable[str], root: Path) -> None:
    """Raise HarnessError for a target whose module is not there, or whose training framework is not installed."""
    for target in dict.fromkeys(names):
        if target in targets():
            _check_package(target, targets()[target])
            continue
        if is_offered(target):
            raise needed(target, where=f"target {target}")
        files = _files(target, search_path(root))
        if not files:
            folders = " or ".join(search_path(root))
            raise HarnessError(
                f"there is no module {target}.",
                where=f"target {target}",
                fix=f"install the package that it is in, or put its file into {folders}.",
            )
        if (file := _file_of(target, files)) is not None:
            _check_build(target, file)


def _check_package(name: str, target: Target) -> None:
    """Raise HarnessError if the training framework that a target drives is not installed, or cannot be driven."""
    if target.package and installed_version(target.package) is None:
        raise HarnessError(f"{target.package} is not installed.", where=f"target {name}", fix=target.install)
    if target.require:
        load(target.require)()


def _check_build(target: str, file: Path) -> None:
    """Raise HarnessError for a module whose source binds no `build`: ranks would only say so one by one."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # its own error is what ranks will report
    if not any(_binds_build(node) for node in _outside_of_functions(tree)):
        raise HarnessError(
            f"module {target} has no function `build`, so there is nothing to train.",
            where=str(file),
            fix="add `def build(case, world)` that returns an object with `model` and `step(microbatches)`: "
            "docs/your-own-trainer.md starts with one. A script runs as it is: "
            f"`{EXEC} -- torchrun --nproc-per-node 2 {file.name}`.",
        )


def _outside_of_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all that runs when a module is imported, under `if` and `try` too, without the bodies of functions."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _outside_of_functions(node)


def _binds_build(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name in ("build", "__getattr__")
    if isinstance(node, ast.alias):
        return (node.asname or node.name) in ("build", "*")
    return isinstance(node, ast.Name) and node.id == "build" and isinstance(node.ctx, ast.Store)


def target_file(target: str, root: Path) -> str:
    return str(_file_of(target, _files(target, search_path(root))) or target)


def _file_of(target: str, files: Iterable[Path]) -> Path | None:
    """Return the source of the module itself, of the files of its package; None for one that is no Python file."""
    name = "/" + module_of(target).replace(".", "/")
    endings = (f"{name}.py", f"{name}/__init__.py")
    return next((path for path in files if path.as_posix().endswith(endings)), None)


def own_source_digest(target: str, root: Path) -> str:
    """A digest of the package of a target of the user's own, equal on any machine; empty for targets of the harness."""
    return "" if target in targets() else module_digest(module_of(target), search_path(root))


@functools.cache
def target_digest(target: str, root: Path) -> str:
    """Return a digest of what a target computes with, besides torch and the harness; empty for the reference target."""
    if target == REFERENCE:
        return ""
    if target in targets():
        package, own = targets()[target].package, Path(target_file(target, root)).parent
        installed = f"{installed_version(package)} {files_digest(package)}" if package else ""
        return f"{target} {installed} {source_digest(own, own.rglob('*.py'))}"
    return digest_in(target, search_path(root))


def digest_in(module: str, folders: Sequence[str]) -> str:
    """Return a digest of a module in one of these folders, and of the packages that it imports."""
    files = module_files(module, folders)
    imported = sorted(
        {name.partition(".")[0] for path in files for name in _imports(path)} - _SKIPPED - {module.partition(".")[0]}
    )
    parts = [source_digest(common_folder(files), files) if files else ""]
    parts += [f"{name} {installed_version(name)} {files_digest(name, folders)}" for name in imported]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _files(target: str, folders: Sequence[str]) -> list[Path]:
    return module_files(module_of(target), folders)


def _imports(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # its own error is what ranks will report
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def witness_key(plan: Plan, *, cpuinfo: Path = CPUINFO) -> str:
    """Return the key of the references of this plan, on this machine with what is installed now. Takes 0.15 s."""
    parts = (
        plan.program,
        plan.device,
        plan.backend,
        plan.arithmetic,
        str(plan.probed),
        arithmetic_limits(),
        cpu_kind(cpuinfo),
        *sorted({node.cpu for node in plan.capacity.nodes}),
        *(f"{package} {installed_version(package)} {files_digest(package)}" for package in _COMPUTE),
        source_digest(_HERE, (path for folder in _OURS for path in (_HERE / folder).rglob("*.py"))),
        _program_digest(plan.program),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _program_digest(program: str) -> str:
    """Over the source of the package, or of the single file, that a rank program is in; empty when it is not found.

    What it imports from elsewhere is not looked at. Our own program is part of our own source.
    """
    if program == DEFAULT_PROGRAM:
        return ""
    paths = package_paths(program.partition(".")[0])
    return " ".join(source_digest(place.parent, place.rglob("*.py") if place.is_dir() else [place]) for place in paths)


def environment(plan: Plan, root: Path, targets: Iterable[str] = ()) -> Environment:
    """Return the environment of a run by this plan in the project at `root` that trains these targets.

    Reads the sources of editable installs and of targets of the user's own.
    """
    first = plan.capacity.nodes[0]
    both = plan.sides if plan.decides else None  # equal where every case gets the same device
    installed = {name: package for name in MODULES if (package := _installed(name)) is not None}
    sources = {name: installed_source(MODULES[name]) for name, package in installed.items() if is_editable(package)}
    return Environment(
        packages={
            **{name: package.version for name, package in installed.items()},
            "python": platform.python_version(),
        },
        contents={name: source.digest[:16] for name, source in sources.items() if source is not None},
        targets={name: digest for name in sorted(set(targets)) if (digest := own_source_digest(name, root))},
        injected=tuple(Path(injection.content).name for injection in plan.injections),
        device=first.device_name if both is None else f"{plan.capacity.words}, cpu",
        architecture=first.architecture,
        driver=first.driver,
        cpu=first.cpu,
        threads=first.threads,
        limits=arithmetic_limits(),
        platform=f"{platform.system()} {platform.machine()}",
        launcher=plan.launcher,
        backend=plan.backend if both is None else f"{both.gpus.backend}, {both.cpu.backend}",
        arithmetic="" if plan.arithmetic == default_arithmetic(plan.device) else plan.arithmetic,
        program=plan.program,
        commit=tree_commit(root),
        changes=hashlib.sha256(difference.encode()).hexdigest()[:16] if (difference := tree_difference(root)) else "",
        upstream=tuple(sorted(change.name for change in installed_changes())),
    )


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
