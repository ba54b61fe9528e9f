"""Cases as pytest items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from harness.cli.main import app
from harness.cli.run import run_command
from harness.pytest_plugin import pytest_addoption
from harness.run_options import PARTS, options_of
from tests.lines import read_run

if TYPE_CHECKING:
    from tests.acceptance.conftest import Command

PLUGIN = ("--fp8-device", "cpu")  # loaded by its entry point, as for every user


def test_cases_are_collected_where_they_are_asked_for_and_bad_files_are_errors(project: Command) -> None:
    assert "fp8-harness: cases are collected by name: pytest cases/" in project.pytest(*PLUGIN).stdout
    (project.folder / "test_other.py").write_text("def test_other():\n    assert True\n")
    assert "1 passed" in project.pytest(*PLUGIN).stdout
    (project.folder / "test_other.py").write_text("def test_other():\n    assert False\n")
    done = project.pytest(*PLUGIN, "--fp8-tier", "smoke", "-k", "tensorwise", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases/smoke.toml::single-tensorwise" in done.stdout
    assert "1 passed" in done.stdout
    assert done.stdout.count("smoke is cases/smoke.toml of this project, not the tier of the package.") == 1
    project.tier("bad", "[base\n")
    done = project.pytest(*PLUGIN, "cases/")
    assert done.returncode == 2
    assert "bad.toml:1" in done.stdout


class FakeParser:
    """Takes the options that the plugin adds."""

    def __init__(self) -> None:
        self.added: dict[str, dict[str, Any]] = {}

    def getgroup(self, name: str, description: str) -> FakeParser:
        return self

    def addoption(self, name: str, **given: Any) -> None:
        self.added[name.replace("--fp8-", "--")] = given


def test_the_options_are_those_of_run_but_for_those_that_pytest_has() -> None:
    parser = FakeParser()
    pytest_addoption(parser)  # type: ignore[arg-type]
    options = [option for option in (*app.params, *run_command.params) if option.param_type_name == "option"]
    of_run = {option.opts[-1]: option for option in options if option.expose_value}
    declared = {option.flag.split("/")[0]: option for part in PARTS for option in options_of(part).values()}
    assert declared.keys() == of_run.keys()
    del parser.added["--tier"]  # of pytest alone
    assert parser.added.keys() == {flag for flag, option in declared.items() if not option.pytest}
    for name, given in parser.added.items():
        option = of_run[name]
        assert (given.get("action") == "append") is option.multiple, name
        choices = getattr(option.type, "choices", None)
        assert choices is None or (list(given["choices"]), given["default"]) == (list(choices), option.default), name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--fp8-tier", "smok"), "did you mean smoke"),
        (("--fp8-slots=0", "--collect-only"), "argument --fp8-slots: Expected `"),
        (("--fp8-timeout-s=-1", "--collect-only"), "argument --fp8-timeout-s: Expected `"),
        (("--fp8-slots=x", "--collect-only"), "argument --fp8-slots: Expected `"),
        (("--fp8-tier", "smoke", "--fp8-shard", "3/2"), "1/4"),
    ],
)
def test_what_run_refuses_is_refused(shared: Command, words: tuple[str, ...], said: str) -> None:
    done = shared.pytest(*PLUGIN, *words)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and said in done.stderr


TIERS = ("--fp8-tier", "smoke", "--fp8-tier", "bad", "-n", "2", "--fp8-slots", "2")


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(("cases/",), id="the folder", marks=pytest.mark.sweep),
        pytest.param(TIERS, id="tiers on two workers"),
    ],
)
def test_findings_are_shown_and_a_session_is_one_stored_run(project: Command, asked: tuple[str, ...]) -> None:
    project.planted("bad", 1)
    done = project.pytest(*PLUGIN, *asked, "--fp8-name", "candidate", "--junitxml", "junit.xml")
    assert done.returncode == 1 and "4 passed" in done.stdout, done.stdout + done.stderr
    assert "planted failure" in done.stdout and " fp8-harness run " in done.stdout
    (summary,) = (line for line in done.stdout.splitlines() if line.startswith("FAILED "))
    assert " - engine/" in summary, "the rule comes first"
    assert len(ElementTree.parse(project.folder / "junit.xml").findall(".//failure")) == 1
    assert len(list((project.folder / "state" / "runs").glob("*/*.jsonl"))) == 1
    shown = project.call("show", "last")
    assert "4 passed, 1 crash" in shown.stdout and "planted failure" in shown.stdout, shown.stdout + shown.stderr
    project.call("show", "candidate", "--json", "out.json")
    document = read_run(project.folder / "out.json")
    assert (document["name"], document["exit_code"], document["interrupted"]) == ("candidate", 1, False)
    assert document["environment"]["device"] == "cpu" and all(case["command"] for case in document["cases"])
    (bad,) = (case["id"] for case in document["cases"] if not case["good"])
    assert "crash" in project.call("runs", "history", bad).stdout
    again = project.call("-q", "run", "--lf")
    assert again.returncode == 1 and "1 case: 1 crash" in again.stdout and "repeats --device cpu" in again.stderr
    assert "last against candidate" in project.call("compare", "candidate", "last").stdout


def test_what_a_session_did_not_get_to_is_not_run(project: Command) -> None:
    project.planted("bad", 1, 10)
    assert project.pytest(*PLUGIN, "--fp8-tier", "bad", "-x").returncode == 1
    assert "1 crash, 1 not_run" in project.call("show").stdout


def test_recorded_faults_are_strict_xfails_and_quarantined_cases_may_fail(project: Command) -> None:
    project.planted("bad", 1, 10)
    project.record("planted", where="recipe=tensorwise", verdict="crash", rule="engine/raised")
    done = project.pytest(*PLUGIN, "--fp8-tier", "bad", "-rx")
    assert done.returncode == 1 and "1 failed, 1 xfailed" in done.stdout, done.stdout + done.stderr
    assert "[XPASS(strict)] planted: It is planted. (https://example.org/1)" in done.stdout
    known = "judge/known: planted (https://example.org/1), no candidate fix is recorded: It is planted."
    assert f" - {known}" in done.stdout
    assert "remove the record" in done.stdout
    assert "1 known, 1 unexpected_pass" in project.call("show").stdout
    quarantine = '[[quarantine]]\nselect = "seed=1"\nowner = "ana"\nreason = "breaks"\nexpires = 2999-01-01\n'
    (project.folder / "cases" / "known.toml").unlink()
    (project.folder / "cases" / "quarantine.toml").write_text(quarantine)
    done = project.pytest(*PLUGIN, "--fp8-tier", "bad", "-rx")
    assert done.returncode == 0 and "1 passed, 1 xfailed" in done.stdout, done.stdout + done.stderr
    assert "quarantined until 2999-01-01 by ana: breaks" in done.stdout


def test_shards_are_those_of_run(project: Command) -> None:
    ran = []
    for index in (1, 2):
        listed = project.run("list", "smoke", "--shard", f"{index}/2").stdout.splitlines()
        done = project.pytest(*PLUGIN, "--fp8-tier", "smoke", "--fp8-shard", f"{index}/2")
        assert done.returncode == 0 and f"{len(listed)} passed, {4 - len(listed)} deselected" in done.stdout
        project.call("show", "--json", "out.json")
        document = read_run(project.folder / "out.json")
        ids = [case["id"] for case in document["cases"]]
        assert ids == [line.split()[1] for line in listed] and document["shard"] == f"{index}/2"
        ran += ids
    assert len(set(ran)) == 4


def test_cases_are_selected_and_kept_as_by_run(project: Command) -> None:
    kept = ("--fp8-select", "recipe=tensorwise", "--fp8-keep-logs", "logs")
    done = project.pytest(*PLUGIN, "--fp8-tier", "smoke", *kept)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert list((project.folder / "logs").iterdir())
    other = project.pytest(*PLUGIN, "--fp8-tier", "smoke", "--fp8-target", "torchtitan", "--collect-only", "-q")
    assert "target.torchtitan-" in other.stdout
