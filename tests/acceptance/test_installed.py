"""With an installed package, in an empty folder and in a project: its tiers run, and nothing is written into it."""

import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import REPOSITORY, Command

GOLDEN = ("baseline", "update", "single-bf16-v2048-s3-b16", "--device", "cpu", "--reason", "first")


@pytest.fixture
def installed(tmp_path: Path, shared: Command) -> Iterator[Command]:
    """An empty folder, and a copy of the package as a wheel installs it: with a project inside."""
    package = tmp_path / "site" / "harness"
    shutil.copytree(REPOSITORY / "harness", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cases", "golden"):
        shutil.copytree(shared.folder / name, package / "_project" / name)
    shutil.copytree(REPOSITORY / "ci", package / "_project" / "ci", ignore=lambda _, names: filter(_no_pins, names))
    here = tmp_path / "here"
    here.mkdir()
    yield Command(here, {"PYTHONPATH": f"{package.parent}:{REPOSITORY}"})


def _no_pins(name: str) -> bool:
    return not name.startswith("constraints")


@pytest.fixture
def own(installed: Command) -> Command:
    """The same folder as a project without cases and goldens."""
    for name in ("cases", "golden"):
        (installed.folder / name).mkdir()
    return installed


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.suffix in (".json", ".toml")}


def test_what_is_stored_needs_a_project_which_the_fix_makes(installed: Command) -> None:
    shipped = installed.folder.parent / "site" / "harness" / "_project"
    before = files(shipped)
    commands = (
        ("baseline", "tolerance", "--measure", "smoke"),
        ("dev", "tier", "smoke"),
        ("dev", "tier", "--fit", str(shipped / "cases" / "smoke.toml")),
        GOLDEN,
    )
    for command in commands:
        done = installed.run(*command)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "nothing is stored in the package" in done.stderr and str(installed.folder) in done.stderr
    assert installed.run(*GOLDEN, "--dry-run").returncode == 0
    assert files(shipped) == before
    assert installed.shell(done.stderr.split("`")[1]).returncode == 0
    done = installed.run(*GOLDEN)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = files(installed.folder)
    assert path.is_relative_to(installed.folder / "golden") and f"stored in {path}" in done.stdout


def test_a_run_does_not_suggest_to_store_goldens_there(installed: Command) -> None:
    case = '[[case]]\naxes = {recipe = "rowwise", steps = 4, loss_tolerance = 0.1}\n'
    (installed.folder / "my.toml").write_text(case)
    done = installed.run("run", "my.toml", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 golden not stored: " in done.stderr and "To store them" not in done.stderr


def test_the_tiers_of_the_package_are_those_of_every_project(own: Command) -> None:
    listed = own.run("list", "smoke")
    assert listed.returncode == 0 and "of this project" not in listed.stderr, listed.stderr
    collect = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "--fp8-tier", "smoke")
    collected = own.process(*collect).stdout
    described = own.run("explain", "smoke").stdout
    ids = [line.split()[1] for line in listed.stdout.splitlines()]
    assert ids and all(name in collected and name in described for name in ids)
    ran = own.run("run", "smoke", "--device", "cpu")
    assert ran.returncode == 0 and "not stored" not in ran.stderr, "the goldens of the package hold: " + ran.stderr
    assert "no golden is missing" in own.run("baseline", "update", "smoke", "--missing", "--reason", "first").stderr
    assert not files(own.folder)


def test_a_tier_of_the_project_comes_before_the_one_of_the_package(own: Command) -> None:
    own.cases("smoke", 'recipe = "rowwise", steps = 4, loss_tolerance = 0.1')
    said = "smoke is cases/smoke.toml of this project, not the tier of the package."
    for command in (("list", "smoke"), ("explain", "smoke"), ("run", "--device", "cpu")):
        done = own.run(*command)
        assert done.returncode == 0 and done.stderr.count(said) == 1, done.stderr
        assert "single-rowwise-v2048-s4-f32-tol.0.1" in done.stdout


def test_what_the_project_stores_of_a_tier_of_the_package_is_in_the_project(own: Command) -> None:
    shipped = own.folder.parent / "site" / "harness" / "_project"
    before = {path: path.read_bytes() for path in files(shipped)}
    assert own.run(*GOLDEN).returncode == 0
    assert [path.parent.name for path in files(own.folder)] == ["cpu"]
    refused = own.run("dev", "tier", "smoke")
    assert refused.returncode == 2 and "this tier is the package's" in refused.stderr
    assert {path: path.read_bytes() for path in files(shipped)} == before


def test_the_command_that_new_prints_works_in_an_empty_folder(installed: Command) -> None:
    words = ("--tp", "2", "--recipe", "rowwise", "--steps", "4", "--set", "loss_tolerance=0.1")
    done = installed.run("new", "my.toml", *words)
    command = done.stdout.splitlines()[-1].removeprefix("run it: ").split(maxsplit=1)[1]
    ran = installed.run(*shlex.split(command), "--device", "cpu")
    assert ran.returncode == 0, ran.stderr
    assert "schema" not in (installed.folder / "my.toml").read_text()
    assert installed.run("new", "../site/my.toml", *words).returncode == 0  # beside the schema, as in a checkout
    relative = (installed.folder / "../site/my.toml").read_text()
    assert relative.startswith("#:schema harness/schemas/case.schema.json\n")
    done = installed.run("constraints", "--for", "torch-2.15")
    assert done.returncode == 0 and "\ntorch==2.15.0\n" in done.stdout and "\nclick==" in done.stdout
