"""The list of private parts against the source of the worker: what is used is declared, what is declared is used."""

import ast
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.internals import RUN, Part, read_parts, with_needed
from harness.internals import Use as Declared
from harness.trace import RankTrace
from harness.worker.process.internals import problem_of
from tests.privates import Use, attributes_of_self, identifiers, private_uses

HARNESS = Path(__file__).parents[2] / "harness"
WORKER = HARNESS / "worker"


@functools.cache
def sources() -> Mapping[str, ast.Module]:
    """Every file that ranks run: of the worker by its path in there, of a plug-in by its path in the package."""
    of_worker = {str(path.relative_to(WORKER)): path for path in sorted(WORKER.rglob("*.py"))}
    of_plugins = {str(path.relative_to(HARNESS)): path for path in sorted(HARNESS.glob("plugins/*/worker/**/*.py"))}
    return {file: ast.parse(path.read_text()) for file, path in (of_worker | of_plugins).items()}


@functools.cache
def inherited() -> frozenset[str]:
    return frozenset(name for tree in sources().values() for name in attributes_of_self(tree))


def part_of(file: str) -> str:
    """The part that a file belongs to: that of every run, where none says so."""
    names = [name for name, part in read_parts().items() if any(_has(entry, file) for entry in part.files)]
    assert len(names) <= 1, f"{file} is of several parts: {names}"
    return names[0] if names else RUN


def _has(listed: str, file: str) -> bool:
    return file.startswith(listed) if listed.endswith("/") else file == listed


def files_of(name: str) -> list[str]:
    """The files that may use what a part declares: its own, and those of parts that need it."""
    return [file for file in sources() if name in (RUN, *with_needed(part_of(file)))]


def declared_for(name: str) -> dict[str, Part]:
    """What the files of a part may use, each with the part that declares it."""
    parts = read_parts()
    return {use: parts[part_name] for part_name in (RUN, *with_needed(name)) for use in parts[part_name].uses}


def is_declared(use: Use, declared: Mapping[str, Part]) -> bool:
    if not use.is_whole:
        return any(name.endswith(use.name) for name in declared)
    if use.name in declared:
        return not use.patched or declared[use.name].use(use.name).patched
    # a method of what is declared, or the module of what is looked up by a name that the source does not tell
    return not use.patched and any(use.name.rpartition(".")[0] == n or n.startswith(f"{use.name}.") for n in declared)


def undeclared(file: str, tree: ast.Module) -> Iterator[str]:
    declared = declared_for(part_of(file))
    for use in sorted(private_uses(tree, inherited())):
        if not is_declared(use, declared):
            yield f"{file}:{use.line} {'patches' if use.patched else 'uses'} {use.name}"


def test_every_private_part_that_the_worker_uses_is_declared() -> None:
    lines = [line for file, tree in sources().items() for line in undeclared(file, tree)]
    assert lines == [], "declare them in harness/internals.toml, or use a public name"


def test_every_declared_part_is_used_declared_once_there_and_says_what_is_lost() -> None:
    unused, words = [], {file: set(identifiers(tree)) for file, tree in sources().items()}
    for name, part in read_parts().items():
        used = set().union(*(words[file] for file in files_of(name)))
        unused += [use for use in part.uses if not {use.rpartition(".")[2], use.rpartition("._")[2]} & used]
    assert unused == [], "remove them from harness/internals.toml"
    names = [use for part in read_parts().values() for use in part.uses]
    assert len(names) > 150 and len(names) == len(set(names))
    listed = [entry for part in read_parts().values() for entry in part.files]
    assert [entry for entry in listed if not any(_has(entry, file) for file in sources())] == []
    parts = read_parts()
    assert [name for name, part in parts.items() if part.files and not part.without] == ["fsdp2"]
    assert {part.record for part in parts.values()} - {""} <= set(RankTrace.__struct_fields__)
    assert all(part.use(use).why for part in parts.values() for use in part.uses)


def module_level_imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("harness.worker"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield str(node.module)


def test_no_file_imports_one_of_a_part_that_its_own_does_not_need() -> None:
    """A part that is gone must break what needs it and nothing else."""
    wrong = []
    for file, tree in sources().items():
        allowed = {RUN, *with_needed(part_of(file))}
        for module in module_level_imports(tree):
            target = module.removeprefix("harness.worker.").replace(".", "/") + ".py"
            if target in sources() and part_of(target) not in allowed:
                wrong.append(f"{file} imports {target}")
    assert wrong == []


HEAD = "import torch\nimport torch.distributed as dist\nfrom torch._inductor import config\n"


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("from torch._x import y\ny()", "torch._x.y"),
        ("import torch._x\ntorch._x.y.z()", "torch._x.y.z"),
        ("def f(param):\n    return param._hidden", "._hidden"),
        ("config.new_option = 1", "torch._inductor.config.new_option!"),
        ("module = dist\nmodule.broadcast = None", "torch.distributed.broadcast!"),
        ("setattr(dist, 'gather', None)", "torch.distributed.gather!"),
        ("for each in (dist, config):\n    wrap(each, 'scatter', None)", "torch.distributed.scatter!"),
        ("NAME = '_secret'\ngetattr(torch, NAME)", "torch._secret"),
        ("wanted = ['_hidden_op']", "._hidden_op"),
        ("torch.ops.aten._op.default()", "torch.ops.aten._op"),
    ],
)
def test_what_is_private_is_seen(source: str, seen: str) -> None:
    uses = private_uses(ast.parse(HEAD + source))
    assert seen in {use.name + "!" * use.patched for use in uses}


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __init__(self, other):\n        self._x = other._x",
        "def _f(): ...\n_f()",
        "import functools\nfunctools._private",
        "place._replace(owner=1)",
        "torch.nn.Linear.__init__",
        "'''a docstring with _names'''",
        "def f(dist):\n    dist.broadcast = 1",
    ],
)
def test_what_is_our_own_is_not(source: str) -> None:
    uses = private_uses(ast.parse("import torch\nimport torch.distributed as dist\n" + source))
    assert {use.name for use in uses} == set()


def test_what_patches_needs_more_than_a_name() -> None:
    declared = declared_for("compiled")
    assert is_declared(Use("torch._inductor.compile_fx.fake_tensor_prop", 1), declared)
    assert not is_declared(Use("torch._inductor.compile_fx.fake_tensor_prop", 1, patched=True), declared)
    assert not is_declared(Use("torch._inductor.compile_fx.other", 1), declared)


class Base:
    annotated: int

    def __init__(self) -> None:
        self.assigned = 1

    @property
    def read_only(self) -> int:
        return 1

    def method(self, known: int) -> None: ...


@pytest.mark.parametrize(
    ("name", "use", "problem"),
    [
        ("Base", {}, ""),
        ("Base.annotated", {}, ""),
        ("Base.assigned", {"set": True}, ""),
        ("Base.other", {}, "is gone"),
        ("Base.other.deeper", {}, "is gone"),
        ("Missing", {}, "is gone"),
        ("Base.read_only", {}, ""),
        ("Base.read_only", {"set": True}, "is read-only"),
        ("Base.read_only", {"patched": True}, ""),  # in the class another property can stand in its place
        ("Base.method", {"takes": ("known",)}, ""),
        ("Base.method", {"takes": ("known", "new", "other")}, "no longer takes new, other"),
        ("int.real", {"patched": True}, "is read-only"),
        ("Missing", {"since": "pytest 999.1"}, ""),
        ("Missing", {"since": "pytest 1.0"}, "is gone"),
    ],
)
def test_what_is_not_as_declared_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, use: dict[str, Any], problem: str
) -> None:
    library = types.ModuleType("library")
    vars(library).update(Base=Base, int=int)
    monkeypatch.setitem(sys.modules, "library", library)
    assert problem_of(f"library.{name}", Declared(why="a test", **use)) == problem
