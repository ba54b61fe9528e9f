"""The arrows of the architecture, checked by walking every import and call of the package."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.privates import everything
from tests.programs import run_script

PACKAGE = Path(__file__).parents[2] / "harness"

# Rooms of the core from the top down. A room may import rooms below it and files of its own. `worker` stands beside
# them all. Plug-ins stand above: one imports the core and itself, and nothing imports it.
LEVELS = [
    ["__main__", "pytest_plugin"],
    ["cli"],
    ["report"],
    ["studies"],
    ["workflow"],
    ["running"],
    ["store", "project"],
    ["checks"],
    ["evidence"],
    ["expect"],
    ["request", "result", "jsonform"],
    ["engine", "matrix", "run_options"],
    ["internals", "headline"],
    ["durable", "registry"],
    ["errors", "hints", "promises", "sources", "trace", "verdict"],
    ["declared", "text"],
]
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
WORKER_MAY_READ = {
    "matrix",
    "trace",
    "request",
    "result",
    "verdict",
    "errors",
    "sources",
    "internals",
    "registry",
}  # values, and files
# What a rank program is, and what it must not do before the fork.
WORKER_MAY_ALSO_READ = {"harness.engine.program", "harness.engine.messages"}
# And what a process needs that starts ranks by itself.
WORKER_MAY_ALSO_READ |= {"harness.engine.linux", "harness.engine.processes", "harness.engine.rank"}
FRONT_ENDS = {"cli", "pytest_plugin", "__main__"}  # and the commands of plug-ins
# Processes of their own.
PROGRAMS = {
    "harness.engine.fork_server",
    "harness.plugins.launchers.torchrun",
    "harness.plugins.bugs.worker.exported",
}
TORCH = {"torch", "torchao", "torchtitan"}
PICKLES = {"pickle", "marshal", "shelve", "dill"}
TALKING = {"print", "click.echo", "exit", "quit"}
SHELLS = {"os.system", "os.popen", "eval", "exec"}
DECODING = {"msgspec.msgpack.decode", "msgspec.json.decode"}
# Calls are looked for in files that have one of these words: most have none, and their expressions are not walked.
WORDS = ("shell", "sys.exit", "msgspec.msgpack.Decoder", *TALKING, *SHELLS, *DECODING)


class Call(NamedTuple):
    """A call of something with a dotted name, or of "" for what has none."""

    place: str
    name: str
    keywords: frozenset[str | None]


class Module(NamedTuple):
    """What one file of the package imports, and which of its calls are of `WORDS`, if any."""

    name: str
    imports: frozenset[str]
    calls: tuple[Call, ...]

    @property
    def room(self) -> str:
        return room(self.name)

    @property
    def is_front_end(self) -> bool:
        """True for what talks to people: the command line, and the commands of a plug-in."""
        of_plugin = bool(plugin(self.name)) and self.name.endswith(("command", "commands"))
        return self.room in FRONT_ENDS or of_plugin

    @property
    def runs_in_ranks(self) -> bool:
        """True in `worker`, and in the folder `worker` of a plug-in."""
        return self.room == "worker" or self.name.split(".")[3:4] == ["worker"]


def room(module: str) -> str:
    """The first name below the package."""
    return "".join(module.split(".")[1:2])


def plugin(module: str) -> str:
    """The name of the plug-in that the module is of; empty for a module of the core."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["plugins"] and len(parts) > 2 else ""


def read(path: Path) -> Module:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    text = path.read_text()
    tree = ast.parse(text)
    nodes = everything(tree) if any(word in text for word in WORDS) else ()
    return Module(
        name=".".join(parts[:-1] if parts[-1] == "__init__" else parts),
        imports=frozenset(name for node in statements(tree) for name in imported(node)),
        calls=tuple(
            Call(f"{path}:{node.lineno}", dotted(node.func), frozenset(word.arg for word in node.keywords))
            for node in nodes
            if isinstance(node, ast.Call)
        ),
    )


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement, and what holds some."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, name, ())
            pending += inside if isinstance(inside, list) else ()


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield "." * node.level + (node.module or "")


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every file of the package."""
    return tuple(read(path) for path in sorted(PACKAGE.rglob("*.py")))


def packages(module: Module) -> set[str]:
    """The top-level packages that it imports."""
    return {name.split(".")[0] for name in module.imports}


def points_down(module: Module, target: str) -> bool:
    """True when this module may import that one."""
    here, there = module.room, room(target)
    own, other = plugin(module.name), plugin(target)
    if own or other:
        return own == other or (bool(own) and not other and _core_for(module, target))
    if there == here or not here:
        return True
    if here == "worker":
        return there in WORKER_MAY_READ or target in WORKER_MAY_ALSO_READ
    return there != "worker" and LEVEL_OF[there] > LEVEL_OF[here]


def _core_for(module: Module, target: str) -> bool:
    """True for what a plug-in may import of the core: nothing above commands, and no torch but in ranks."""
    if module.runs_in_ranks:
        return room(target) in {"worker", *WORKER_MAY_READ} or target in WORKER_MAY_ALSO_READ
    return room(target) not in {"worker", "__main__", "pytest_plugin"}


def test_arrows_only_go_down() -> None:
    arrows = [(module, name) for module in modules() for name in module.imports if name.startswith("harness.")]
    assert len(arrows) > 500
    assert [f"{module.name} -> {name}" for module, name in arrows if not points_down(module, name)] == []


def test_arrows_that_point_up_or_sideways_are_seen() -> None:
    for here, there in (
        ("harness.checks.judge", "harness.running.plan"),
        ("harness.checks.judge", "harness.worker.training.train"),
        ("harness.engine.rank", "harness.matrix.case"),
        ("harness.matrix.case", "harness.engine.rank"),
        ("harness.worker.training.train", "harness.checks.judge"),
        ("harness.cli.show", "harness.plugins.faults.commands"),
        ("harness.plugins.bugs.export", "harness.plugins.faults.faults"),
        ("harness.plugins.bugs.export", "harness.worker.training.train"),
        ("harness.plugins.gpu.worker.kernels", "harness.running.plan"),
    ):
        assert not points_down(Module(here, frozenset(), ()), there)


def in_order(arrows: dict[str, set[str]]) -> list[str]:
    """The files so that each comes after those that it imports. CycleError where there is no such order."""
    return list(TopologicalSorter(arrows).static_order())


def test_no_file_imports_itself_through_others() -> None:
    names = {module.name for module in modules() if module.room != "worker"}
    arrows = {module.name: names & (module.imports - {module.name}) for module in modules() if module.name in names}
    assert set(in_order(arrows)) == names and len(names) > 200
    with pytest.raises(CycleError):
        in_order(arrows | {"harness.errors": {"harness.cli.main"}})


def test_the_library_is_above_the_core_and_knows_no_plug_in() -> None:
    paths = sorted((PACKAGE.parent / "fp8_harness").glob("*.py"))
    imports = {name for path in paths for name in read(path).imports}
    assert len(paths) > 5 and {name for name in imports if room(name) in ("plugins", *FRONT_ENDS)} == set()
    assert {name for name in imports if room(name) == "worker"} == {"harness.worker.calls"}
    assert {module.name for module in modules() if "fp8_harness" in packages(module)} == set()


def test_imports_are_absolute() -> None:
    assert [module.name for module in modules() if any(name.startswith(".") for name in module.imports)] == []


def test_every_room_has_a_level() -> None:
    assert {module.room for module in modules()} - {"", "worker", "plugins"} == set(LEVEL_OF)


def test_torch_is_only_in_the_worker() -> None:
    assert [module.name for module in modules() if packages(module) & TORCH and not module.runs_in_ranks] == []
    assert {module.room for module in modules() if packages(module) & TORCH} <= {"worker", "plugins"}


def test_only_front_ends_talk_and_only_programs_exit() -> None:
    quiet = [module for module in modules() if not module.is_front_end]
    assert [call.place for module in quiet for call in module.calls if call.name in TALKING] == []
    assert {module.name for module in quiet for call in module.calls if call.name == "sys.exit"} <= PROGRAMS


def test_no_shell_and_no_pickles() -> None:
    assert [module.name for module in modules() if packages(module) & PICKLES] == []
    calls = [call for module in modules() for call in module.calls]
    assert [call.place for call in calls if "shell" in call.keywords or call.name in SHELLS] == []


def test_front_ends_start_without_heavy_libraries() -> None:
    code = (
        "import importlib, sys\n"
        "heavy = {'torch', 'torchao', 'numpy', 'rich', 'jinja2', 'jsonschema', 'pytest', 'hypothesis'}\n"
        "for name in ('harness.cli.main', 'harness.cli.listing', 'harness.cli.explain', 'harness.workflow'):\n"
        "    importlib.import_module(name)\n"
        "    print(name, sorted(heavy & set(sys.modules)))"
    )
    assert [line.split(maxsplit=1)[1] for line in run_script(code).splitlines()] == ["[]"] * 4


def test_help_imports_no_command_and_completion_only_what_the_command_needs() -> None:
    """The imports of every command take 0.3 s of CPU."""
    code = (
        "import sys; from click.shell_completion import ShellComplete; from harness.cli.main import app, main\n"
        "complete = ShellComplete(app, {}, 'fp8-harness', '').get_completions\n"
        "main(['--help']), main(['dev', '--help']); helped = sorted(sys.modules); print()\n"
        "print(*helped); print(len(complete(['run'], 'tp2-')), *sys.modules)"
    )
    *_, helped, completed = run_script(code).splitlines()
    ours = {name for name in helped.split() if name.startswith("harness.")}
    assert {name for name in ours if room(name) == "cli"} == {f"harness.cli{end}" for end in ("", ".main", ".options")}
    assert [name for name in ours if plugin(name) and name.count(".") > 2] == []
    assert {room(name) for name in ours} & {"checks", "evidence", "expect", "project", "report", "result"} == set()
    assert {"packaging", "hashlib", "rich"}.isdisjoint(helped.split())
    count, *names = completed.split()
    assert int(count) > 1 and {"harness.cli.run", "harness.running.plan"} <= set(names)
    assert "harness.cli.environments" not in names


def test_the_key_of_kept_witnesses_does_not_import_what_it_is_about() -> None:
    code = (
        "import sys; from harness.running.plan import Plan; from harness.running.identity import witness_key;"
        "witness_key(Plan()); print(sorted({'torch', 'torchao', 'numpy', 'harness.worker'} & set(sys.modules)))"
    )
    assert run_script(code) == "[]"


def test_pytest_plugin_is_cheap() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import harness.pytest_plugin;"
        "print(sorted(name for name in set(sys.modules) - before))"
    )
    assert run_script(code) == "['harness', 'harness.pytest_plugin']"


def test_threads_decode_with_decoders_that_were_made_before() -> None:
    """msgspec 0.22.0 dies with SIGSEGV where two threads need the same type for the first time: 7 of 25 tries."""
    threaded = [
        module
        for module in modules()
        if module.room in ("checks", "running", "engine") or plugin(module.name) == "launchers"
    ]
    calls = [call for module in threaded if module.name not in PROGRAMS for call in module.calls]
    assert any(call.name == "msgspec.msgpack.Decoder" for call in calls)
    assert [call.place for call in calls if call.name in DECODING] == []


# Rooms of the worker from the top down, as docs/architecture.md draws them; "" has the programs.
WORKER_LEVELS = ["", "training", "one_rank", "probes", "targets", "virtual", "tensors", "dispatch_hooks", "process"]


def worker_arrows() -> dict[str, set[str]]:
    """By every file that ranks run, those that it imports: at its head, in functions, and for annotations alone."""
    paths = [*(PACKAGE / "worker").rglob("*.py"), *PACKAGE.glob("plugins/*/worker/**/*.py")]
    texts = {read(path).name: path.read_text() for path in paths}
    return {name: set(imported_modules(ast.parse(text), set(texts))) - {name} for name, text in texts.items()}


def imported_modules(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """The modules, of those that are known, that are imported by their name or out of their package."""
    for node in statements(tree):
        for name in imported(node):
            names = [f"{name}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else [name]
            yield from (each if each in known else name for each in names if {each, name} & known)


def worker_room(module: str) -> str:
    """The room of a file of the worker, "" for a program."""
    return ".".join(module.split(".")[2:-1]).partition(".")[0]


def points_down_in_worker(here: str, there: str) -> bool:
    """True when one file of the worker may import the other: of its own room, or of one below."""
    return WORKER_LEVELS.index(worker_room(there)) >= WORKER_LEVELS.index(worker_room(here))


def test_arrows_of_the_worker_only_go_down() -> None:
    ours = "harness.worker."
    packages_of_rooms = {f"{ours}{room}" for room in WORKER_LEVELS}
    arrows = [
        (here, there)
        for here, imports in worker_arrows().items()
        for there in imports
        if here.startswith(ours) and there.startswith(ours) and there not in packages_of_rooms
    ]
    assert len(arrows) > 200
    assert [f"{here} -> {there}" for here, there in arrows if not points_down_in_worker(here, there)] == []
    assert not points_down_in_worker("harness.worker.probes.probe", "harness.worker.training.train")
    assert not points_down_in_worker("harness.worker.targets.reference.loss", "harness.worker.probes.probe")


def test_no_file_of_the_worker_imports_itself_through_others() -> None:
    arrows = worker_arrows()
    assert set(in_order(arrows)) == set(arrows) and len(arrows) > 80
    with pytest.raises(CycleError):
        in_order(arrows | {"harness.worker.process.process": {"harness.worker.training.train"}})


def test_only_programs_are_outside_of_the_rooms_of_the_worker() -> None:
    loose = [
        module for module in modules() if module.name.startswith("harness.worker.") and module.name.count(".") == 2
    ]
    rooms = {f"harness.worker.{room}" for room in WORKER_LEVELS}
    programs = {module.name for module in loose if module.name not in rooms}
    texts = {name: PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py").read_text() for name in programs}
    marks = ("def rank_main(", '__name__ == "__main__"')
    assert programs and [name for name, text in texts.items() if not any(mark in text for mark in marks)] == []


INSTALLING = {"install_hook", "impl", "register_backend", "setattr", "Library", "wrap", "install"}


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported: everything but the bodies of functions."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        is_function = isinstance(node, (ast.FunctionDef, ast.Lambda))
        pending += decorators if is_function else ast.iter_child_nodes(node)


def installs_at_import(text: str) -> list[str]:
    """What an import would put into another module: calls that install, and attributes that are set."""
    nodes = list(at_import(ast.parse(text)))
    called = [dotted(node.func) for node in nodes if isinstance(node, ast.Call)]
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    set_attributes = [dotted(target) for target in targets if isinstance(target, ast.Attribute)]
    return set_attributes + [name for name in called if name.rpartition(".")[2] in INSTALLING]


def test_nothing_is_installed_by_an_import() -> None:
    paths = [*(PACKAGE / "worker").rglob("*.py"), *PACKAGE.glob("plugins/*/worker/**/*.py")]
    found = {path.name: installs_at_import(path.read_text()) for path in paths}
    assert {name: installed for name, installed in found.items() if installed} == {}


@pytest.mark.parametrize(
    "text",
    ["torch.backward = mine", "for name in NAMES:\n    install_hook(name)", "@torch.library.impl('a')\ndef f(): ..."],
)
def test_what_an_import_installs_is_seen(text: str) -> None:
    assert installs_at_import(text)
