"""`fp8-harness compare`, quarantined cases, and runs in several environments, by the real command."""

from __future__ import annotations

import json
from typing import Any

from tests.acceptance.conftest import Command
from tests.plugins.bugs.acceptance.test_bugs import PACKAGE, environment, wheel

CPU = ("--device", "cpu")
BREAKS = "def apply():\n    raise ValueError('broken')\n"
QUARANTINE = '[[quarantine]]\nselect = "steps>1"\nowner = "ana"\nreason = "known to break"\nexpires = {day}\n'
REQUIRED = '[[required]]\nname = "rowwise"\nselect = "recipe=rowwise"\nreason = "users run it"\nat_least = {count}\n'


def run(project: Command, name: str, *words: str, code: int = 0) -> str:
    done = project.call("run", "smoke", *CPU, "--name", name, *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def gate(project: Command, before: str, after: str, *words: str) -> tuple[int, str]:
    done = project.call("compare", before, after, *words)
    return done.returncode, done.stdout + done.stderr


def test_two_runs_of_the_same_are_go_and_a_broken_one_or_too_few_required_cells_are_not(project: Command) -> None:
    (project.folder / "broken.py").write_text(BREAKS)
    run(project, "v1")
    run(project, "v2")
    run(project, "v3", "--inject", "broken.py:apply", code=1)
    assert gate(project, "v1", "v2")[1].startswith("GO: v2 against v1\nno reason gates\n")
    outputs = ("--json", "-", "--markdown", str(project.folder / "gate.md"), "--html", "gate.html")
    done = project.call("compare", "v1", "v3", *outputs)
    document: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, document["answer"], document["reasons"][0]["kind"]) == (1, "NO-GO", "new-failure")
    assert document["reasons"][0]["command"].endswith("--inject broken.py:apply")
    (moved,) = document["groups"]
    assert (moved["origin"], moved["moved"].keys()) == ("ours", {"verdict"}), "no frame of torch is in it"
    assert done.stderr.startswith("NO-GO: v3 against v1\n")
    assert (project.folder / "gate.md").read_text().startswith("## NO-GO: v3 against v1\n")
    page = (project.folder / "gate.html").read_text()
    assert "<title>NO-GO: v3 against v1</title>" in page and "--inject broken.py:apply" in page
    assert '"history":{"rows":[["20' in page, "v1 and v2 are earlier runs of these cases"
    assert gate(project, "v3", "v3")[0] == 6 and gate(project, "v3", "v3", "--strict")[0] == 1
    required = project.folder / "cases" / "required.toml"
    for count, code in ((2, 0), (3, 1)):
        required.write_text(REQUIRED.format(count=count))
        assert gate(project, "v1", "v1", "--required", "cases/required.toml")[0] == code


def test_what_cannot_be_compared_has_codes_of_its_own(project: Command) -> None:
    run(project, "v1", "--select", "recipe=bf16")
    run(project, "v2", "--select", "recipe=rowwise tp=1")
    code, text = gate(project, "v1", "v2")
    assert code == 6 and text.startswith("NOT COMPARED: v2 against v1\nno case was run in both results: run the same")
    for words, message in (
        (("v1", "zzz"), "there are no such results"),
        (("v1",), "two runs A and B are needed"),
        (("v1", "v2", "--allow", "zzz=x"), "'zzz' is no kind of change"),
        (("v1", "v2", "--allow", "new-failure=x"), "excused in cases/quarantine.toml"),
        (("v1", "v2", "--allow", "wire="), "it does not say why"),
        (("v1", "v2", "--html", "no/such.html"), "there is no such folder"),
        (("v1", "v2", "-o", "jobs=2"), "need --versions"),
        (("v1", "v2", "--env", "a=b"), "need --versions"),
        (("--versions", "torchao=1"), "no package with two versions"),
    ):
        done = project.call("compare", *words)
        assert done.returncode == 2 and message in done.stderr, done.stderr


def test_quarantined_cases_run_and_fail_nothing_until_their_day(project: Command) -> None:
    (project.folder / "broken.py").write_text(BREAKS)
    run(project, "v1")
    quarantine = project.folder / "cases" / "quarantine.toml"
    quarantine.write_text(QUARANTINE.format(day="2999-01-01"))
    output = run(project, "v2", "--inject", "broken.py:apply")
    assert "quarantined until 2999-01-01 by ana: known to break" in output and "of them quarantined)" in output
    code, text = gate(project, "v1", "v2")
    assert code == 6 and "quarantined until 2999-01-01 by ana: known to break" in text, "no case is good in both"
    done = project.pytest("cases/smoke.toml", "--fp8-inject", "broken.py:apply", "--fp8-device", "cpu", "-q", "-rx")
    assert done.returncode == 0 and "quarantined until 2999-01-01" in done.stdout, done.stdout
    quarantine.write_text(QUARANTINE.format(day="2020-01-01"))
    output = run(project, "v3", "--inject", "broken.py:apply", code=1)
    assert "the quarantine by ana expired on 2020-01-01: known to break. Its cases count again." in output
    code, text = gate(project, "v1", "v3")
    assert code == 1 and "the quarantine by ana expired on 2020-01-01: known to break" in text
    quarantine.write_text(QUARANTINE.replace("owner", "owners").format(day="2020-01-01"))
    assert project.call("run", "smoke", *CPU).returncode == 2


def test_the_same_cases_run_in_several_environments(project: Command) -> None:
    environment(project.folder / "old env", "0.1")
    environment(project.folder / "new", "0.2")
    (project.folder / "patch.py").write_text(
        f"def apply():\n    import {PACKAGE}\n    assert {PACKAGE}.VERSION == '0.1'\n"
    )
    (project.folder / "link").symlink_to("new")
    words = ("--env", "old=old env", "--env", "new=link", "--inject", "patch.py:apply", "--select", "recipe=bf16")
    done = project.call("run", "smoke", *CPU, *words)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["environment", "good", "cases", "CPU", "s", "wall", "s"]
    assert [line.split()[:3] for line in lines[1:3]] == [["old", "1", "1"], ["new", "0", "1"]]
    assert "different verdicts in 1 case of 1" in lines and "    old: passed" in lines and "    new: crash" in lines
    assert gate(project, "old", "new")[0] == 1
    stored = json.loads(project.call("runs", "list", "--json", "-").stdout)
    assert {stored_run["name"] for stored_run in stored} == {"old", "new"}
    (project.folder / "other").mkdir()
    (project.folder / "other" / "pyvenv.cfg").touch()
    for option, message in (
        (("--env", "x=other"), "it has no packages of python3."),
        (("--env", "x=nowhere"), "this is no virtual environment"),
        (("--env", "nowhere"), "this is not NAME=PATH"),
        (("--env", "a=new", "--env", "a=new"), "two environments have one name"),
        (("--env", "a=new", "--json", "x.json"), "--json: it is of one run"),
    ):
        refused = project.call("run", "smoke", *CPU, *option)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr


HOOK = """\
import importlib.machinery
import sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, [{folder!r}])

sys.meta_path.append(Finder)
"""


def test_a_package_that_hides_behind_a_hook_is_refused(project: Command) -> None:
    folder = environment(project.folder / "env", "0.1")
    (packages,) = folder.glob("lib/python*/site-packages")
    (project.folder / "checkout").mkdir()
    (project.folder / "checkout" / "torchao.py").write_text("")
    (packages / "hook.py").write_text(HOOK.format(folder=str(project.folder / "checkout")))
    (packages / "hook.pth").write_text("import hook\n")
    done = project.call("run", "smoke", *CPU, "--env", f"x={folder}")
    assert done.returncode == 2 and "torchao would be imported from" in done.stderr, done.stderr


def test_versions_of_a_package_are_gated(project: Command) -> None:
    wheels = project.folder / "wheels"
    wheels.mkdir()
    for version in ("0.1", "0.2"):
        wheel(wheels, version)
    axes = 'recipe = "rowwise", dp_shard = 2, steps = 3, loss_tolerance = 0.05'
    project.cases("mine", axes, f"{axes}, seed = 7")
    links = {"FIND_LINKS": str(wheels), "NO_INDEX": "1"}
    project.environment |= {f"{tool}_{name}": value for tool in ("PIP", "UV") for name, value in links.items()}
    words = ("--select", "seed=7", "-o", "jobs=1", "-o", "timeout-s=77", "--json", "-", "--html", "gate.html")
    done = project.call("compare", "--versions", f"{PACKAGE}=0.1,0.2", "mine", *words)
    assert (done.returncode, json.loads(done.stdout)["compared"]) == (0, 1), done.stderr
    assert f"\nGO: {PACKAGE}-0.2 against {PACKAGE}-0.1\n" in done.stderr
    assert "--timeout-s 77" in (project.folder / "gate.html").read_text()
    (asked, *_) = json.loads(project.call("runs", "list", "--json", "-").stdout)
    assert asked["cases"] == 1 and "--select" in asked["argv"]
    assert f"{PACKAGE} 0.1: installing it into " in done.stderr and "which is kept" in done.stderr
    missing = project.call("compare", "--versions", f"{PACKAGE}=0.1,0.3", "mine")
    assert missing.returncode == 2 and "==0.3: it cannot be installed" in missing.stderr


def test_environments_that_are_there_are_used_for_their_versions(project: Command) -> None:
    environment(project.folder / "old env", "0.1")
    environment(project.folder / "new", "0.2.dev3")
    words = ("smoke", "--select", "recipe=bf16", "--env", "0.1=old env", "--env", "nightly=new")
    done = project.call("compare", "--versions", f"{PACKAGE}=0.1,nightly", *words)
    assert done.returncode == 0, done.stderr
    assert f"GO: {PACKAGE}-nightly against {PACKAGE}-0.1\n" in done.stdout
    for given, message in (
        (("--env", "0.1=new", "--env", "nightly=new"), f"it has {PACKAGE} 0.2.dev3, not 0.1"),
        (("--env", "zzz=new"), "has no zzz"),
        (("--env", "0.1=nowhere"), "this is no virtual environment"),
    ):
        refused = project.call("compare", "--versions", f"{PACKAGE}=0.1,nightly", "smoke", *given)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr
