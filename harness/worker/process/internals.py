"""Checks the private parts of torch and torchao against what `harness/internals.toml` declares.

Only names are looked up: nothing is called, and of what no run imports only the parts in use are.
`python -m harness.worker.process.internals` prints the state of all parts as JSON (`harness.internals.State`).
"""

import dis
import functools
import importlib
import inspect
import sys
import time
import types
from collections.abc import Collection
from typing import Any, NamedTuple

from harness.internals import RUN, State, Use, read_parts, with_needed
from harness.sources import installed_versions, is_since

COMPILED, ASYNC_TP, GLOO, MODULE_TENSORS, METAS = "compiled", "async_tp", "gloo", "module_tensors", "shared_metas"
_OF_COMPILED_RUNS = (COMPILED, ASYNC_TP)

_GONE = "is gone"
_READ_ONLY = "is read-only"
_MISSING = object()
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


class Gap(NamedTuple):
    name: str
    problem: str

    def line(self, *lost: str) -> str:
        """Return one line: the library with its version, the name, what is wrong with it, and what is lost."""
        library = self.name.partition(".")[0]
        version = installed_versions([library]).get(library, "")
        return f"{library} {version}: {self.name} {self.problem}: {'; '.join(lost)}"


@functools.cache
def gaps(part: str) -> tuple[Gap, ...]:
    """Return what is not as declared of a part and of those that it needs. Found once: later patches are no gaps."""
    return tuple(gap for name in with_needed(part) for gap in own_gaps(name))


@functools.cache
def own_gaps(part: str) -> tuple[Gap, ...]:
    declared = read_parts()[part]
    problems = {name: problem_of(name, declared.use(name)) for name in declared.uses}
    return tuple(Gap(name, problem) for name, problem in problems.items() if problem)


def require(*parts: str) -> None:
    """Raise RuntimeError where a part has a gap; its text is one line."""
    for part in parts:
        for gap in gaps(part):
            raise RuntimeError(gap.line(read_parts()[part].without))


def lost_records(asked: Collection[str]) -> dict[str, str]:
    """Return the requested fields of `RankTrace` that cannot be recorded here, each with the reason."""
    return {
        part.record: gaps(name)[0].line(part.without)
        for name, part in read_parts().items()
        if part.record in asked and gaps(name)
    }


def is_of_compiled_runs(part: str) -> bool:
    """Return True for what only compiled runs use, which takes a second to import."""
    return not {*_OF_COMPILED_RUNS}.isdisjoint(with_needed(part))


def import_parts(*, compiled: bool) -> None:
    """Import the files of every part that ranks have before the fork, where nothing is missing."""
    for name, part in read_parts().items():
        if part.preloaded and (compiled or not is_of_compiled_runs(name)) and not gaps(name):
            for module in part.modules:
                importlib.import_module(module)


def lines(*, compiled: bool) -> list[str]:
    """Return one line for every gap of what runs use, with all that is lost by it; `compiled` runs too."""
    used = [RUN, *(_OF_COMPILED_RUNS if compiled else ())]
    used += [name for name, part in read_parts().items() if part.record and (compiled or COMPILED not in part.needs)]
    lost: dict[Gap, list[str]] = {}
    for part in used:
        for gap in gaps(part):
            lost.setdefault(gap, []).append(read_parts()[part].without)
    return [gap.line(*(consequences[:1] if gap in gaps(RUN) else consequences)) for gap, consequences in lost.items()]


def problem_of(name: str, use: Use) -> str:
    """What is wrong with one name here: "is gone", "is read-only", "no longer takes x". Empty where nothing is."""
    if use.since and _is_older(use.since):
        return ""
    owner, member = _look_up(name)
    if member is _MISSING:
        return _GONE
    is_read_only = isinstance(member, property) and member.fset is None
    is_immutable = isinstance(owner, type) and bool(owner.__flags__ & _IMMUTABLE_TYPE)
    if (use.set and is_read_only) or (use.patched and is_immutable):
        return _READ_ONLY
    parameters = _parameters(member) if use.takes else ()
    missing = [parameter for parameter in use.takes if parameter not in parameters]
    return f"no longer takes {', '.join(missing)}" if missing else ""


def _is_older(since: str) -> bool:
    """Return True if the library is older than this release, as "torch 2.15". Nightlies of 2.15 are."""
    library, _, release = since.partition(" ")
    return not is_since(installed_versions([library]).get(library, "0"), release)


def _look_up(name: str) -> tuple[Any, Any]:
    """Return the owner of a dotted name and what it has under the last one, imported as far as it is a module."""
    module, *rest = _module_of(name)
    owner, member = None, module
    for attribute in rest:
        owner, member = member, _attribute(member, attribute)
        if member is _MISSING:
            break
    return owner, member


def _module_of(name: str) -> list[Any]:
    """Return the innermost module on the way to a name, followed by the other words of it."""
    words = name.split(".")
    module: Any = importlib.import_module(words[0])
    for at in range(1, len(words)):
        path = ".".join(words[: at + 1])
        if path not in sys.modules and hasattr(module, words[at]):
            return [module, *words[at:]]
        try:
            module = importlib.import_module(path)
        except ImportError:
            return [module, *words[at:]]
    return [module]


def _attribute(owner: Any, name: str) -> Any:
    """What `owner` has under this name; for a class also what its objects get, of which only the name is known."""
    try:
        return inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
    except AttributeError:
        kinds = owner.__mro__[:-1] if isinstance(owner, type) else ()
        is_set = any(_sets(kind, name) for kind in kinds) or _assigns(owner, name)
        return None if is_set else _MISSING


def _sets(kind: type, name: str) -> bool:
    """Return True if a class annotates an attribute, or a method of it assigns one of this name."""
    return name in _annotations(kind) or any(_assigns(member, name) for member in vars(kind).values())


def _annotations(kind: type) -> Collection[str]:
    """Return the attributes that a class annotates itself: since Python 3.14, `vars` of the class lacks them."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(kind, format=annotationlib.Format.FORWARDREF)
    return vars(kind).get("__annotations__", {})


def _assigns(function: object, name: str) -> bool:
    function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
    return (
        isinstance(function, types.FunctionType)
        and name in function.__code__.co_names
        and any(
            instruction.opname == "STORE_ATTR" and instruction.argval == name
            for instruction in dis.get_instructions(function)
        )
    )


def _parameters(function: Any) -> Collection[str]:
    function = getattr(function, "__func__", function)
    return inspect.signature(function).parameters


def state() -> State:
    parts = read_parts()
    for name in parts:
        gaps(name)
    started = time.perf_counter()
    for name, part in parts.items():
        if name == RUN or part.preloaded:
            for used_name in part.uses:
                problem_of(used_name, part.use(used_name))
    milliseconds = 1000 * (time.perf_counter() - started)
    return State(
        versions=installed_versions(("torch", "torchao")),
        gaps={name: dict(own_gaps(name)) for name in parts},
        milliseconds=milliseconds,
    )
