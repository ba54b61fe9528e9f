"""Every command that a message suggests works as it is printed, in the situation that prints it."""

from __future__ import annotations

import ast
import re
import shutil
import signal
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import hints
from tests.acceptance.conftest import REPOSITORY, Command
from tests.commands import understood
from tests.plugins.bugs.acceptance.test_bugs import environment, wheel
from tests.unit.test_costs import stored

PACKAGE = REPOSITORY / "harness"
CPU = ("--device", "cpu")
OTHERS = 'recipe = "rowwise", dp_shard = 2, steps = 3'
PASSES = f"{OTHERS}, loss_tolerance = 0.05"

NO_COMMANDS = {"fp8-harness fork server", "fp8-harness on both sides"}
REMARKS = {
    "fp8-harness dev tier",
    "fp8-harness explain --list",
    "fp8-harness constraints",
}  # in the head of a file


def literals(tree: ast.AST) -> Iterator[str]:
    """The text that a module can print: no docstrings, and no examples of `--help`."""
    silent: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            silent.add(id(body[0].value))
        named = isinstance(node, ast.Assign) and any("EPILOG" in ast.unparse(name) for name in node.targets)
        if isinstance(node, ast.keyword) and node.arg == "epilog":
            silent |= {id(inner) for inner in ast.walk(node.value)}
        elif named:
            silent |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.value


def test_no_message_spells_a_command_without_its_function() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "hints.py"]
    commands = {
        command: str(path.relative_to(PACKAGE))
        for path in files
        for text in literals(ast.parse(path.read_text()))
        for command in re.findall(r"fp8-harness (?:[a-z]+ )*[a-z]+(?: --?[a-z-]+)*", text)
    }
    new = {command: file for command, file in commands.items() if command not in NO_COMMANDS | REMARKS}
    assert new == {}, "write a function in harness/hints.py, and its situation here"


def only(text: str, start: str = "fp8-harness") -> str:
    """The one command between backticks."""
    (command,) = {quoted for quoted in re.findall(r"`([^`]+)`", " ".join(text.split())) if start in quoted}
    return command


def wrong_word(project: Command) -> str:
    return project.call("explain", "single-xyz-v2048-f32").stderr


def excluded_case(project: Command) -> str:
    return project.call("run", *CPU, "fsdp3-bf16-v2048-f32").stderr


def nothing_selected(project: Command) -> str:
    project.cases("my tier", OTHERS)
    return project.call("run", "smoke", "cases/my tier.toml", "--select", "tp=8").stderr


def wrong_fault(project: Command) -> str:
    return project.call("run", "--inject", "fault:zzz").stderr


def no_check(project: Command) -> str:
    return project.call("dev", "conformance", "zzz").stderr


def wrong_family(project: Command) -> str:
    return project.call("baseline", "update", "smoke", "--family", "zzz", "--reason", "x").stderr


def stopped(project: Command) -> str:
    project.cases("bad", *(f"{PASSES}, lr = 0.00{number}" for number in range(1, 6)))
    (project.folder / "patch.py").write_text("def apply():\n    raise ValueError(1)\n")
    done = project.call("run", "bad", *CPU, "-x", "-j", "1", "--inject", "patch.py:apply")
    (project.folder / "patch.py").write_text("def apply():\n    pass\n")
    return next(line for line in done.stdout.splitlines() if line.startswith("not run: "))


def interrupted(project: Command) -> str:
    project.environment["GO"] = str(project.folder / "go")
    project.planted("waiting", 0, 8, 8)
    process = project.start_until("passed ", "run", "waiting", *CPU, "-j", "1")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    (project.folder / "go").touch()
    return next(line for line in out.splitlines() if line.startswith("not run: "))


def other_environment(project: Command) -> str:
    interrupted(project)
    other = Command(project.folder, project.environment | {"FP8_HARNESS_RANK_THREADS": "2"})
    return other.call("run", "--resume").stderr


def no_such_results(project: Command) -> str:
    return project.call("runs", "remove", "nosuch").stderr


def damaged_golden(project: Command) -> str:
    golden = next((project.folder / "golden" / "cpu").glob("tiny-v2048-*.json"))
    golden.write_text(golden.read_text()[:100])
    return project.call("run", "smoke", *CPU).stderr


def no_goldens(project: Command) -> str:
    project.cases("../my own", *(f"{PASSES}, seed = {seed}" for seed in (8, 9)))
    done = project.call("run", "my own.toml", *CPU, "--select", "seed=9 dp_shard=2")
    assert done.returncode == 0, done.stdout + done.stderr
    return next(line for line in done.stderr.splitlines() if " not stored: " in line)


def with_target(project: Command) -> None:
    """A tier of one case that a module of the user trains."""
    (project.folder / "mine.py").write_text("build = None\n")
    project.cases("mine", f'{PASSES}, target = "mine"')


def no_profiles(project: Command) -> str:
    with_target(project)
    done = project.call("run", "mine", *CPU)
    return next(line for line in done.stderr.splitlines() if " not recorded, so " in line)


def no_profile(project: Command) -> str:
    with_target(project)
    return next(line for line in project.call("run", "mine", *CPU).stdout.splitlines() if "no profile" in line)


def stale_choice(project: Command) -> str:
    project.tier("pr", '[[matrix]]\nname = "m"\n[matrix.axes]\ntp = [1, 2]\nrecipe = ["bf16", "rowwise"]\n')
    chosen = project.folder / "cases" / "chosen" / "pr.toml"
    chosen.parent.mkdir()
    chosen.write_text('[[case]]\nid = "single-bf16-v2048-f32"\ncost_cpu_s = 1.0\nreason = "x"\n')
    add_costs(project)
    return project.call("list", "pr").stderr


def damaged_costs(project: Command) -> str:
    costs = project.folder / "golden" / "evidence" / "costs.json"
    costs.parent.mkdir(exist_ok=True)
    costs.write_text("{}")
    project.cases("pr", PASSES)
    return project.call("run", "smoke", *CPU, "--budget-s", "60").stderr


def add_costs(project: Command) -> None:
    (project.folder / "golden" / "evidence").mkdir(exist_ok=True)
    shutil.copy(REPOSITORY / "golden" / "evidence" / "costs.json", project.folder / "golden" / "evidence")


def imported_bug(project: Command) -> str:
    (project.folder / "report.md").write_text(
        "# Crash\npytorch/ao#77\n```\ntorchrun --nproc_per_node 2 t.py --tp_size 2\nRuntimeError: boom\n```\n"
    )
    done = project.call("bug", "import", "report.md")
    file = project.folder / "cases" / "bugs" / "ao-77.toml"
    file.write_text(
        file.read_text().replace("[case.axes]", "[case.axes]\nloss_tolerance = 0.05\nsteps = 3\nlr = 0.002")
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("run it: "))
    return f"`{line.removeprefix('run it: ')}`"


def two_environments(project: Command) -> str:
    for name in ("one", "two"):
        venv.create(project.folder / name)
    return project.call("run", "smoke", *CPU, "--env", "one=one", "--env", "two=two").stdout


def broken_version(project: Command) -> str:
    project.planted("mine", 9)
    wheels = project.folder / "wheels"
    wheels.mkdir()
    for version in ("9.0", "9.1"):
        environment(project.folder / version, version, package="torchtitan")
        wheel(wheels, version, package="torchtitan")
    words = ("--env", "9.0=9.0", "--env", "9.1=9.1", "--index", "wheels")
    done = project.call("compare", "--versions", "torchtitan=9.0,9.1", "mine", *words)
    lines = done.stdout.partition("changes by cause (torchtitan 9.0 -> 9.1)")[2].splitlines()
    return f"`{next(line for line in lines if line.startswith('    $ ')).removeprefix('    $ ')}`"


def moved_numbers(project: Command) -> str:
    project.cases("mine", PASSES)
    patch = "import tests.acceptance.fake_program as program\nusual = program._loss\n"
    patch += "def apply():\n    program._loss = lambda case, step: usual(case, step) + 0.001\n"
    (project.folder / "patch.py").write_text(patch)
    project.call("run", "mine", *CPU, "--name", "v1")
    project.call("run", "mine", *CPU, "--name", "v2", "--inject", "patch.py:apply")
    lines = project.call("compare", "v1", "v2").stdout.splitlines()
    return f"`{next(line for line in lines if line.startswith('    $ ')).removeprefix('    $ ')}`"


def failed(project: Command) -> str:
    project.planted("bad", 1)
    return next(
        f"`{line[8:]}`" for line in project.call("run", "bad", *CPU).stdout.splitlines() if line[:8] == "  next: "
    )


SITUATIONS: dict[str, tuple[Callable[[Command], str], ...]] = {
    "EXPLAIN_RULE": (),  # of a word that stands for any rule, as the next two of a check
    "EXPLAIN_CHECK": (),
    "LIST_INJECTED": (),
    "EXEC": (),  # tests/plugins/exec
    "LIST_RULES": (),  # in suggestions: tests/unit
    "LIST_BUGS": (),
    "LIST_WORDS": (wrong_word,),
    "LIST_FAULTS": (wrong_fault,),
    "LIST_CHECKS": (no_check,),
    "LIST_BASELINES": (wrong_family,),
    "LIST_RUNS": (no_such_results,),
    "MEASURE_TOLERANCES": (),  # has a test below
    "VERIFY_FORMULAS": (),  # runs tier pr
    "VERIFY_GPUS": (),  # needs GPUs
    "explain_case": (excluded_case,),
    "list_cases": (nothing_selected,),
    "run_cases": (imported_bug, moved_numbers, other_environment, interrupted, stopped),
    "shrink": (failed,),
    "compare_runs": (two_environments,),
    "repro_with": (broken_version,),
    "update_golden": (damaged_golden,),
    "update_profile": (no_profile,),
    "update_missing": (no_goldens, no_profiles),
    "choose_tier": (stale_choice,),
    "fit_costs": (damaged_costs,),
    "INSTALL_FOR_CPU": (),  # no command of ours, as the next two
    "INSTALL_TORCHTITAN": (),
    "START_CONTAINER": (),
}


def test_every_hint_has_a_situation() -> None:
    functions = re.findall(r"^def ([a-z]\w+)", Path(hints.__file__).read_text(), flags=re.MULTILINE)
    assert {*functions, *(name for name in vars(hints) if name.isupper())} == SITUATIONS.keys()
    for command in (hints.VERIFY_FORMULAS, hints.VERIFY_GPUS):
        understood(command)


@pytest.mark.parametrize("situation", [situation for situations in SITUATIONS.values() for situation in situations])
def test_the_command_works_as_printed(project: Command, situation: Callable[[Command], str]) -> None:
    command = only(situation(project))
    parts = command.split(" && ")
    for part in parts:
        done = project.printed(part)
        fails = situation is broken_version  # which the command reproduces
        assert done.returncode == int(fails), f"{part}\n{done.stdout}{done.stderr}"
        if part != parts[-1]:  # ranks without torch leave no solo witnesses to fit to
            stored(project.folder).rename(project.folder / "result.json")


def test_a_damaged_chosen_case_names_its_tier(project: Command) -> None:
    stale_choice(project)
    chosen = project.folder / "cases" / "chosen" / "pr.toml"
    chosen.write_text('[[case]]\nid = "x"\ncost_cpu_s = 1.0\nreason = "x"\n')
    done = project.printed(only(project.call("list", "pr").stderr))
    assert done.returncode == 0, done.stderr


def test_a_project_elsewhere_is_named(project: Command, tmp_path_factory: pytest.TempPathFactory) -> None:
    damaged_golden(project)
    elsewhere = Command(tmp_path_factory.mktemp("elsewhere"), project.environment)
    command = only(elsewhere.call("--root", str(project.folder), "run", "smoke", *CPU).stderr)
    done = elsewhere.printed(command)
    assert done.returncode == 0, done.stderr


def test_measuring_a_tolerance_works_where_smoke_has_cases_without_one(project: Command) -> None:
    project.cases("smoke", OTHERS)
    assert project.printed(hints.MEASURE_TOLERANCES).returncode == 0


def test_what_each_golden_is_stored_in_is_printed(project: Command) -> None:
    done = project.call("baseline", "update", "smoke", *CPU, "--reason", "again")
    stored = [Path(line.split("stored in ")[1]) for line in done.stdout.splitlines() if "stored in " in line]
    assert sorted(stored) == sorted((project.folder / "golden" / "cpu").glob("*.json"))
