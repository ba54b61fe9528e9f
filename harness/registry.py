"""What plug-ins add: commands, targets, checks, injections, and answers to what the core and other plug-ins ask.

A plug-in is a package with an entry point of the group `fp8_harness`, whose object is a `Plugin`. Those of the harness
are the folders of `harness/plugins/`, and a package of anybody else plugs in the same way. Nothing but this module
looks for them: the core imports no plug-in, and none imports another.

A user's own target goes by the name of its module, all others by the names that are here. The interface of a target is
in `worker/targets/target.py`; here is what the controller knows without importing one.
"""

import functools
import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import HarnessError

GROUP = "fp8_harness"  # of entry points

# What plug-ins of the harness add, for the error where one was removed. A test compares it with what they declare.
_HOMES: Mapping[str, str] = {
    "baseline": "baseline",
    "bug": "bugs",
    "check-target": "check_target",
    "exec": "exec",
    "compare": "release",
    "handoff": "handoff",
    "parity": "parity",
    "predict": "predict",
    "dev conformance": "conformance",
    "dev evidence": "gpu",
    "dev independence": "independence",
    "dev mutate": "faults",
    "dev tier": "tiers",
    "--launcher ray": "launchers",
    "--launcher torchrun": "launchers",
    "fault:": "faults",
    "torchtitan": "torchtitan",
    "torchtitan.llama3": "torchtitan",
    "torchtitan.qwen3": "torchtitan",
    "bug files": "bugs",
    "catalogue of faults": "faults",
    "compare records": "exec",
    "configurations": "bugs",
    "hand off on a rank": "handoff",
    "check a hand-off": "handoff",
    "probe logprobs": "parity",
    "mutation testing": "faults",
    "injected faults": "faults",
    "watch a model": "exec",
}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What trains a case, under the name that cases call it by.

    `module`: has `build`, as `worker/targets/target.py` says. `llama`: it trains the Llama of the cases, so shapes and
    names of its modules follow from a case. `plain_shards`: modules get plain tensors under TP, and experts tokens of
    other ranks. `attends_apart`: attention gets packed documents as pieces of a tensor, without a mask. `package`: what
    must be installed; `install`: the command that does it. `require`: a function that raises HarnessError where what is
    installed cannot be driven, before anything runs.
    """

    module: str
    llama: bool = False
    plain_shards: bool = False
    attends_apart: bool = False
    package: str = ""
    install: str = ""
    require: str = ""


class Injections(msgspec.Struct, frozen=True, kw_only=True):
    """Injections with a prefix of their own. `check` and `plant` are functions of what is behind the prefix.

    `check` raises HarnessError for what is wrong, before anything runs. `plant` is called in every rank.
    """

    check: str
    plant: str


class PageSection(msgspec.Struct, frozen=True, kw_only=True):
    """A section that `show --html` adds to a page. `read`: a function from the path of a file to a `Section`."""

    help: str  # of the option that names the file
    read: str


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """What one plug-in adds. Objects are named as "module:object", and imported when they are used.

    `commands`: by the words behind `fp8-harness`, "predict" or "dev mutate", click commands. `checks`: `Check`s, run
    after the core's. `rules`: tuples of rules of no check. `injections`: by the prefix of what `--inject` gets, such
    as "fault:". `sections`: by the option of `show`. `answers`: by the name of a question, what the core or another
    plug-in asks for.
    """

    name: str
    summary: str
    commands: Mapping[str, str] = {}
    section: str = "Plug-ins"  # of `fp8-harness --help`
    targets: Mapping[str, Target] = {}
    checks: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    injections: Mapping[str, Injections] = {}
    sections: Mapping[str, PageSection] = {}
    answers: Mapping[str, str] = {}
    folder: Path | None = None  # of the package; filled in when it is found


@functools.cache
def plugins() -> tuple[Plugin, ...]:
    """Return every plug-in that is installed, by name. HarnessError for one that cannot be imported."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return tuple(plugin for entry in found if (plugin := _loaded(entry)) is not None)


def _loaded(entry: EntryPoint) -> Plugin | None:
    """Return the plug-in of an entry point; None if its folder was removed."""
    try:
        plugin = entry.load()
    except ModuleNotFoundError as error:
        if error.name is not None and (entry.module == error.name or entry.module.startswith(f"{error.name}.")):
            return None
        raise _broken(entry, error) from error
    except Exception as error:
        raise _broken(entry, error) from error
    if not isinstance(plugin, Plugin):
        raise _broken(entry, TypeError(f"{entry.value} is no harness.registry.Plugin"))
    spec = importlib.util.find_spec(entry.module)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    return msgspec.structs.replace(plugin, folder=folder)


def _broken(entry: EntryPoint, error: Exception) -> HarnessError:
    package = entry.dist.name if entry.dist is not None else entry.module
    what = f"it cannot be imported: {type(error).__name__}: {error}."
    return HarnessError(what, where=f"plug-in {entry.name}", fix=f"correct the package {package}, or uninstall it.")


def load(place: str) -> Any:
    """Return the object that "module:object" names, or the module of "module"."""
    module, _, name = place.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded


def commands(group: str = "") -> Mapping[str, tuple[str, str]]:
    """Return the commands that plug-ins add to a group, or to the top: by name, section of the help and place."""
    added: dict[str, tuple[str, str]] = {}
    for plugin in plugins():
        for words, place in plugin.commands.items():
            *path, name = words.split()
            if " ".join(path) == group:
                added[name] = plugin.section, place
    return added


def injections() -> Mapping[str, Injections]:
    """Return the injections of all plug-ins by their prefix."""
    return {prefix: kind for plugin in plugins() for prefix, kind in plugin.injections.items()}


def sections() -> Mapping[str, PageSection]:
    """Return the sections that plug-ins add to pages, by the option of `show`."""
    return {option: section for plugin in plugins() for option, section in plugin.sections.items()}


def answers(question: str) -> Iterator[Any]:
    """Yield what the plug-ins that know about it answer to a question."""
    for plugin in plugins():
        if question in plugin.answers:
            yield load(plugin.answers[question])


def answer(question: str, *, where: str) -> Any:
    """Return what the first plug-in answers. HarnessError, with the plug-in needed, where none knows about it."""
    for found in answers(question):
        return found
    raise needed(question, where=where)


def launcher(kind: str) -> Any:
    """Return what starts ranks otherwise than the fork server: the module for `ray`, the engine for `torchrun`."""
    return answer(f"--launcher {kind}", where=f"--launcher {kind}")


def needed(name: str, *, where: str) -> HarnessError:
    """Return the error for something that a removed plug-in adds."""
    home = _HOMES[name]
    fix = f"install all of fp8-harness: harness/plugins/{home} is not here."
    return HarnessError(f"it needs the plug-in {home}.", where=where, fix=fix)


def is_offered(name: str) -> bool:
    """Return True for what a plug-in of the harness adds, installed or not."""
    return name in _HOMES


REFERENCE = "reference"
OF_DTENSOR = "the formula is for modules that compute with DTensor"  # and not for plain shards

TARGET_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@functools.cache
def targets() -> Mapping[str, Target]:
    """Return the targets that have a name: the reference, and those of plug-ins."""
    reference = Target(module="harness.worker.targets.reference.build", llama=True, attends_apart=True)
    return {REFERENCE: reference, **{name: target for plugin in plugins() for name, target in plugin.targets.items()}}


def module_of(target: str) -> str:
    return targets()[target].module if target in targets() else target


def is_llama(target: str) -> bool:
    """True if shapes and names of the model follow from the case. Of any other, what must be seen is found out."""
    return target in targets() and targets()[target].llama


def attends_apart(target: str) -> bool:
    """Return True if a packed document has the kernel calls that it has alone, and so the same bits."""
    return target in targets() and targets()[target].attends_apart


def computes_on_plain_shards(target: str) -> bool:
    """Return True if the operands of modules under TP cannot be put together, or compared with those of one rank."""
    return target in targets() and targets()[target].plain_shards
