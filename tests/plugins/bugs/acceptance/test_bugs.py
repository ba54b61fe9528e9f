"""`bug` from a report to an answer: import, reproduce and shrink on real ranks, and with wheels of a folder."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from harness.checks.scales import RULES
from harness.matrix.axes import own_axes
from harness.matrix.caseid import parse_case_id
from harness.running.environments import NotInstalled, Versions
from harness.running.plan import DEFAULT_PROGRAM
from tests.acceptance.conftest import Command, Inside
from tests.fork_servers import ForkServers
from tests.programs import run_git

REPORT = """# float8 crash with TP
pytorch/ao#77 on 2025-06-03
It fails with torch==2.8.0:
```
torchrun --nproc_per_node 2 train.py --float8_recipe rowwise --tp_size 2
RuntimeError: boom
```
"""
FILE = "cases/bugs/ao-77.toml"


def test_a_report_becomes_a_bug_file_that_is_listed(project: Command) -> None:
    (project.folder / "report.md").write_text(REPORT)
    done = project.call("bug", "import", "report.md")
    assert done.returncode == 0, done.stderr
    assert f"wrote {FILE}\nrun it: fp8-harness run {FILE}\n" in done.stdout
    assert '  tp = 2: "--tp_size 2"' in done.stdout
    assert "3 lines of configurations: 3 used, 0 without effect, 0 not understood" in done.stdout
    assert "seen: crash, torch 2.8.0; RuntimeError: boom" in done.stdout
    assert "tp2-rowwise-v2048-gb2-b16" in project.call("list", FILE).stdout
    assert "ao-77" in project.call("bug", "list").stdout
    again = project.call("bug", "import", "report.md")
    assert again.returncode == 2 and "this file exists" in again.stderr
    assert project.call("bug", "import", "report.md", "--force").returncode == 0


def test_json_has_every_list(project: Command) -> None:
    (project.folder / "report.md").write_text(REPORT)
    options = ("--version", "torchao=0.12.0")
    done = project.call("bug", "import", "report.md", "--dry-run", "--json", "-", *options)
    tree = json.loads(done.stdout)
    assert tree["versions"] == {"torch": "2.8.0", "torchao": "0.12.0"}
    assert (tree["id"], tree["case"], tree["file"]) == ("ao-77", "tp2-rowwise-v2048-gb2-b16", None)
    assert tree["stated"]["tp"] and tree["assumed"]["dtype"] and tree["missing"] == {} and tree["reported"] is None
    assert [line["why"] for line in tree["lines"]["used"]] == ["ranks_per_node", "recipe", "tp"]
    assert not (project.folder / FILE).exists()


def test_open_questions_stop_the_run(project: Command) -> None:
    (project.folder / "report.md").write_text(REPORT.replace("--tp_size 2", "--tp_size 2 --parallel-rings 3"))
    done = project.call("bug", "import", "report.md")
    assert "not understood\n  --parallel-rings 3\n" in done.stdout and "run it" not in done.stdout
    ran = project.call("run", FILE)
    assert ran.returncode == 2 and "`--parallel-rings 3` is not understood, and is about parallelism" in ran.stderr


def test_stdin_is_read(project: Command) -> None:
    words = ("-m", "harness", "bug", "import", "-", "--id", "ours", "--dry-run")
    done = project.process(sys.executable, *words, input=REPORT)
    assert done.returncode == 0 and 'recipe = "rowwise"' in done.stdout and done.stderr.startswith("ours: ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nope.md",), "cannot be read"),
        (("cases",), "cannot be read"),
        (("r.md", "--id", "../x"), "not an id of a bug"),
        (("r.md", "--link", "https://example.com"), "not a link of GitHub"),
        (("r.md", "--output", "x.toml"), "in a folder named bugs"),
        (("r.md", "--output", "bugs/x.txt"), "no file to write to"),
        (("r.md", "--version", "torch"), "--version torch=2.13.0"),
    ],
)
def test_bad_input_is_an_error_of_one_line(project: Command, words: tuple[str, ...], expected: str) -> None:
    (project.folder / "r.md").write_text(REPORT)
    done = project.call("bug", "import", *words)
    assert done.returncode == 2 and expected in done.stderr and len(done.stderr.splitlines()) == 1


CASE = "tp2-tensorwise-ac.full-dim.32-layers.1-heads.4-kvheads.4-ffn.32-v64-gb2-s2-f64"
FAULT = ("--inject", "fault:amax_not_reduced_over_tp")
BUG = f"""[bug]
title = "Scale of a shard"
link = "https://github.com/NVIDIA/Megatron-LM/issues/442"
status = "fixed"
symptom = "wrong_numbers"
hardware = "8 x A100"
detected_by = ["scales"]
planted = ["amax_not_reduced_over_tp"]
[bug.versions]
torch = "2.4.0"
[case]
id = "{CASE}"
"""


FAR, GOOD = (f"fsdp2-tensorwise-v2048-s3-{seed}f32-tol.0.05" for seed in ("seed4-", ""))


@pytest.fixture
def real(project: Command, warm: ForkServers) -> Inside:
    """The project, with ranks that run torch."""
    return Inside(project.folder, {"FP8_HARNESS_PROGRAM": DEFAULT_PROGRAM}, fork_servers=warm)


def write_bug(project: Command, text: str) -> None:
    path = project.folder / "cases" / "bugs" / "megatron-442.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def test_a_bug_is_reproduced_with_its_fault(real: Inside) -> None:
    write_bug(real, BUG)
    there = real.run("-q", "bug", "repro", "megatron-442", "--inject", "planted")
    assert there.returncode == 1, there.stderr
    assert f"found     {RULES.amax.name}" in there.stdout
    assert "hardware: 8 x A100 reported, the virtual FP8 device here" in there.stdout


def test_the_answer_is_an_exit_code(project: Command) -> None:
    bug = BUG.replace(CASE, FAR)
    write_bug(project, bug)
    there = project.call("-q", "bug", "repro", "megatron-442", "--json", "repro.json")
    assert (there.returncode, there.stdout.splitlines()[0]) == (1, f"reproduced: {FAR}"), there.stderr
    assert project.call("-q", "bug", "repro", "megatron-442", "--exit-code").returncode == 1
    signature = json.loads((project.folder / "repro.json").read_text())["found"]["signature"]
    where = ", ".join(f'"{place}"' for place in signature["where"])
    other = f'signature = {{kind = "parity", what = "{signature["what"]}", where = [{where}], first_step = 1}}\n'
    write_bug(project, bug.replace("[bug.versions]", f"{other}[bug.versions]"))
    answer = project.call("-q", "bug", "repro", "megatron-442", "--exit-code")
    assert (answer.returncode, answer.stdout.splitlines()[0]) == (125, f"another failure: {FAR}")
    write_bug(project, BUG.replace(CASE, GOOD))
    gone = project.call("-q", "bug", "repro", "megatron-442", "--exit-code")
    assert (gone.returncode, gone.stdout.splitlines()[0]) == (0, f"not reproduced: {GOOD}"), gone.stderr
    assert project.call("bug", "repro", "no-such-bug", "--exit-code").returncode == 125
    assert project.call("bug", "repro", "no-such-bug").returncode == 2


def test_a_failure_is_made_small_and_what_it_needs_is_told(real: Inside) -> None:
    words = ("bug", "shrink", CASE, *FAULT)
    done = real.run(*words, "--json", "shrunk.json", "--output", "small.toml")
    assert done.returncode == 0, done.stderr
    shrunk = json.loads((real.folder / "shrunk.json").read_text())
    axes = own_axes(parse_case_id(shrunk["case"]))
    assert (axes["tp"], axes["steps"], "checkpointing" in axes) == (2, 1, False)
    assert "needs\n  tp 2\n    with tp 1: no failure" in done.stdout  # 2 heads allow no other degree
    assert "does not depend on" in done.stdout and "checkpointing full -> none" in " ".join(done.stdout.split())
    assert shrunk["case"] in real.call("list", "small.toml").stdout
    again = real.run("-q", *words)
    assert f"smallest case: {shrunk['case']}" in again.stdout and " 0 run now" in again.stdout


PACKAGE = "fp8_harness_toy"
PLAIN = "single-tensorwise-v2048-s3-f32-tol.0.05"


def wheel(folder: Path, version: str, text: str = "", package: str = PACKAGE) -> None:
    """A wheel of a package with one module."""
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{package}.py", f"VERSION = {version!r}\n{text}")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def environment(folder: Path, version: str, text: str = "", package: str = PACKAGE) -> Path:
    """A virtual environment with this version of the module, and no harness. Its wheel is in the same folder."""
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    wheel(folder, version, text, package)
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl") as file:
        file.extractall(packages)
    return folder


def test_an_environment_has_its_version_and_everything_else(tmp_path: Path) -> None:
    wheel(tmp_path, "0.3")
    notes: list[str] = []
    versions = Versions(PACKAGE, tmp_path / "versions", index=str(tmp_path), note=notes.append)
    made = versions.environment("0.3")
    code = f"import {PACKAGE}, harness, msgspec; print({PACKAGE}.VERSION, harness.__file__)"
    done = subprocess.run([made.python, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["0.3", str(Path(sys.modules["harness"].__file__ or ""))]
    assert notes[0] == f"{PACKAGE} 0.3: installing it into {made.folder}, which is kept"
    (tmp_path / f"{PACKAGE}-0.3-py3-none-any.whl").unlink()
    assert versions.environment("0.3") == made and sum("installing it" in line for line in notes) == 1
    with pytest.raises(NotInstalled, match=r"0\.4"):
        versions.environment("0.4")
    assert not (tmp_path / "versions" / f"{PACKAGE}-0.4").exists()


def test_a_case_runs_with_another_version_and_its_failure_is_looked_for(project: Command) -> None:
    wheels = project.folder / "wheels"
    wheels.mkdir()
    for version in ("0.1", "0.2", "0.3"):
        wheel(wheels, version, f"def apply(): assert VERSION < '0.3', 'version is not below {version}'\n")
    (project.folder / "broken.py").write_text(f"from {PACKAGE} import apply\n")
    (wheels / f"{PACKAGE}-0.2-py3-none-any.whl").write_text("not read: --env has this version")
    environment(project.folder / "mine", "0.2", "def apply(): assert VERSION < '0.3'\n")
    words = ("-q", "bug", "repro", PLAIN, "--index", "wheels", "--inject", "broken.py:apply", "--env", "0.2=mine")
    bad = project.call(*words, "--with", f"{PACKAGE}==0.3", "--json", "bad.json")
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert json.loads((project.folder / "bad.json").read_text())["answer"] == "reproduced"
    looked_for = (*words, "--exit-code", "--like", "bad.json")
    for version, code in (("0.1", 0), ("0.2", 0), ("0.3", 1), ("0.4", 125)):
        done = project.call(*looked_for, "--with", f"{PACKAGE}=={version}")
        assert done.returncode == code, done.stdout + done.stderr
    assert project.call(*words, "--with", PACKAGE).returncode == 2


def test_git_bisects_versions_and_revisions(project: Command) -> None:
    """The two recipes of docs/plugins/bugs.md: a list of versions in git, and a repository of one's own."""
    wheels = project.folder / "wheels"
    wheels.mkdir()
    repository = project.folder / "repository"
    repository.mkdir()
    run_git(repository, "init", "-q")
    for version in ("0.1", "0.2", "0.3"):
        wheel(wheels, version, f"def apply(): assert VERSION < '0.3', 'version is not below {version}'\n")
        (repository / "version").write_text(version)
        (repository / "mine.py").write_text(f"def apply(): assert {version} < 0.2\n")
        run_git(repository, "add", ".")
        run_git(repository, "commit", "-m", version)
    (project.folder / "broken.py").write_text(f"from {PACKAGE} import apply\n")
    repro = f"{sys.executable} -m harness -q --root {project.folder} bug repro {PLAIN} --exit-code"
    versions = f"--with {PACKAGE}==$(cat version) --index {wheels} --inject {project.folder}/broken.py:apply"
    for words, found in ((versions, "0.3"), ("--inject mine.py:apply", "0.2")):
        run_git(repository, "bisect", "start", "HEAD", "HEAD~2")
        done = project.process("git", "-C", str(repository), "bisect", "run", "sh", "-c", f"{repro} {words}")
        assert f"\n    {found}\n" in done.stdout and "is the first bad commit" in done.stdout, done.stdout + done.stderr
        run_git(repository, "bisect", "reset")
