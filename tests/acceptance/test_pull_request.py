"""The steps of the pipelines that comment on pull requests, run as they are, in a clone of a user's trainer."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tests.acceptance.conftest import REPOSITORY
from tests.acceptance.test_own_trainer import EXAMPLE, make_environment
from tests.forge import Forge, forge_at

SHARDED, FORGOTTEN = '"mlp.down": RowwiseParallel(),', '"mlp.down": RowwiseParallel(output_layouts=Partial()),'
ACTIONS = ("parity", "parity-comment")
OFFLINE = "python -m pip install --quiet --no-deps --no-index --no-build-isolation"
INPUTS = {
    "target": "fp8_target",
    "install": f"{OFFLINE} --config-settings editable_mode=compat -e .",
    "layouts": "fsdp2,tp2",
    "options": "--steps 1 --set sequence_parallel=false --set loss_parallel=false",
}


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@dataclass
class Job:
    """A job on a runner without a network, with the project checked out: its head forgets to sum over TP ranks."""

    folder: Path
    harness: Path
    forge: Forge
    base: str
    head: str
    outcomes: list[int] = field(default_factory=list)  # exit codes of steps
    log: str = ""

    @property
    def project(self) -> Path:
        return self.folder / "project"

    def step(self, script: str, variables: Mapping[str, str]) -> None:
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB", "GITLAB", "CI"))}
        kept |= {"FP8_HARNESS_STATE": str(self.folder / "state"), **variables}
        done = subprocess.run(
            command,
            cwd=self.project,
            env=kept,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.outcomes.append(done.returncode)
        self.log += done.stdout

    @property
    def comments(self) -> dict[str, str]:
        """The variables of the job that comments: the environment that it makes is there."""
        return {"PATH": f"{self.harness / '.venv/bin'}:{os.environ['PATH']}"}

    def left(self, name: str) -> str:
        return (self.project / "fp8-parity" / name).read_text()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("runner")
    harness, project = folder / "harness", folder / "project"
    shutil.copytree(REPOSITORY / "ci", harness / "ci")
    shutil.copy(REPOSITORY / "pyproject.toml", harness)
    make_environment(harness / ".venv")
    shutil.copy(harness / "ci/constraints.txt", harness / ".venv/pins.txt")  # all that it installs is there
    for name in ("tiny_gpt", "fp8_target.py", "pyproject.toml"):
        copy = shutil.copytree if (EXAMPLE / name).is_dir() else shutil.copy
        (project).mkdir(exist_ok=True)
        copy(EXAMPLE / name, project / name)
    git(project, "init", "--quiet", "--initial-branch", "main")
    git(project, "add", ".")
    git(project, "commit", "--quiet", "--message", "base")
    base = git(project, "rev-parse", "HEAD")
    file = project / "tiny_gpt/parallel.py"
    text = file.read_text()
    assert SHARDED in text
    file.write_text(text.replace(SHARDED, FORGOTTEN).replace("import Replicate", "import Partial, Replicate"))
    git(project, "commit", "--quiet", "--all", "--message", "head")
    with forge_at(Forge()) as forge:
        yield Job(folder, harness, forge, base, git(project, "rev-parse", "HEAD"))


def filled(text: str, values: Mapping[str, str]) -> str:
    """A text of a workflow with the values of its expressions, of which the first of `a || b` that is not empty."""

    def value(match: re.Match[str]) -> str:
        return next((values[name.strip()] for name in match[1].split("||") if values[name.strip()]), "")

    return re.sub(r"\$\{\{(.*?)\}\}", value, text)


def test_the_action_comments_once_and_shows_the_first_wrong_line(job: Job) -> None:
    folder = job.harness / "ci/github"
    measures, comments = (yaml.safe_load((folder / name / "action.yml").read_text()) for name in ACTIONS)
    inputs = measures["inputs"] | comments["inputs"]
    values = {f"inputs.{name}": str(declared.get("default", "")) for name, declared in inputs.items()}
    values |= {f"inputs.{name}": value for name, value in INPUTS.items()}
    values |= {"inputs.token": "secret", "inputs.result": "failure"}
    values |= {"runner.temp": str(job.folder), "github.event.pull_request.head.sha": job.head}
    values["github.event.pull_request.base.sha"] = job.base
    event, summary = job.folder / "event.json", job.folder / "summary.md"
    event.write_text(json.dumps({"pull_request": {"number": 1, "head": {"sha": job.head}}}))
    names = {
        "ACTIONS": "true",
        "ACTION_PATH": str(job.harness / "ci/github/parity"),
        "API_URL": job.forge.address,
        "EVENT_PATH": str(event),
        "OUTPUT": str(job.folder / "output"),
        "REPOSITORY": "you/tiny-gpt",
        "RUN_ID": "42",
        "SERVER_URL": "https://github.com",
        "STEP_SUMMARY": str(summary),
    }
    runner = {f"GITHUB_{name}": value for name, value in names.items()}
    steps = [step for action in (measures, comments) for step in action["runs"]["steps"] if "run" in step]
    for step in steps:
        given = {name: filled(value, values) for name, value in step.get("env", {}).items()}
        if "pip install" not in step["run"]:  # the comment is made in an environment that has the harness
            job.step(filled(step["run"], values), runner | job.comments | given)
    assert job.outcomes == [0, 1, 0], job.log
    assert not [step for step in measures["runs"]["steps"] if "TOKEN" in str(step)], "where the project's code runs"
    root = (job.folder / "output").read_text().partition("=")[2].strip()
    assert Path(root) == job.harness.resolve(), "what is cached"
    assert_told(job, summary.read_text(), job.forge.comments[0]["body"])
    line = next(line for line in job.log.splitlines() if line.startswith("::error "))
    source = (job.project / "tiny_gpt/parallel.py").read_text()
    changed = source[: source.index(FORGOTTEN)].count("\n") + 1
    assert line.startswith(
        f"::error file=tiny_gpt/parallel.py,line={changed},title=FP8 parity%3A tp2-nosp-nolp is wrong::"
    )
    assert "1 now wrong" in job.forge.comments[0]["body"] and "runs/42" in job.forge.comments[0]["body"]
    page = (job.project / "fp8-parity/report.html").read_bytes()
    assert b"Layouts" in page and b"single-rank reference" in page


def assert_told(job: Job, *texts: str) -> None:
    """Every place has the same text, and the files of the job say the same."""
    assert len(job.forge.comments) <= 1 and len(set(texts)) == 1, job.log
    text = texts[0]
    assert text.startswith("<!-- fp8-harness fp8_target -->\n## parity: 1 layout is wrong: tp2-nosp-nolp"), text
    for words in ("| fsdp2 | equal |", "CPU only; not covered:", f"{job.head[:12]} against {job.base[:12]}"):
        assert words in text
    rows = {row["layout"]: row for row in json.loads(job.left("table.json"))["rows"]}
    assert {name: row["change"] for name, row in rows.items()} == {"fsdp2": "same bits", "tp2-nosp-nolp": "now wrong"}
    suite = ElementTree.fromstring(job.left("junit.xml"))
    assert (suite.get("tests"), suite.get("failures")) == ("7", "1")  # two layouts, five single steps
    left = git(job.project, "status", "--porcelain").splitlines()
    assert all("cache__" in line or "egg-info" in line or ".fp8-harness" in line for line in left), left


@pytest.fixture(scope="module")
def gitlab(job: Job) -> dict[str, Any]:
    """The jobs of the template with their variables.

    The harness is cloned as they say, into a folder that has an environment; the commenting job has one too.
    """
    jobs: dict[str, Any] = yaml.safe_load((REPOSITORY / "ci/gitlab/parity.gitlab-ci.yml").read_text())
    git(job.harness, "init", "--quiet")
    git(job.harness, "add", "--all", "ci", "pyproject.toml")
    git(job.harness, "commit", "--quiet", "--message", "harness")
    code = job.project / ".fp8-harness/code"
    code.mkdir(parents=True)
    make_environment(code / ".venv")
    shutil.copy(job.harness / "ci/constraints.txt", code / ".venv/pins.txt")
    for pipeline in jobs.values():
        pipeline["variables"] |= {
            "FP8_HARNESS": str(job.harness),
            "FP8_HARNESS_REF": "HEAD",
            "FP8_HARNESS_STATE": str(job.folder / "fp8-harness"),
            "FP8_BASE": job.base,
            "GITLAB_CI": "true",
            "CI_API_V4_URL": job.forge.address,
            "CI_PROJECT_DIR": str(job.project),
            "CI_PROJECT_ID": "1",
            "CI_COMMIT_SHA": job.head,
            "CI_PIPELINE_URL": "https://gitlab.com/you/tiny-gpt/-/pipelines/1",
            "CI_MERGE_REQUEST_DIFF_BASE_SHA": job.base,
            "CI_MERGE_REQUEST_IID": "1",
        }
    return jobs


def run_gitlab(job: Job, gitlab: Mapping[str, Any], **variables: str) -> None:
    job.forge.comments.clear()
    job.outcomes.clear()
    measures, comments = gitlab["fp8-parity"], gitlab["fp8-parity-comment"]
    assert comments["environment"]["name"] == "fp8-comment" and "environment" not in measures, "who gets the token"
    for name in ("before_script", "script"):
        job.step(
            "\n".join(measures[name]), {name: str(value) for name, value in measures["variables"].items()} | variables
        )
    job.step(
        "\n".join(line for name in ("before_script", "script") for line in comments[name] if "pip install" not in line),
        comments["variables"] | job.comments | {"FP8_GITLAB_TOKEN": "secret"},
    )
    shutil.rmtree(job.project / "fp8-harness")


@pytest.mark.sweep  # the base is kept from the action; what decides is what the action runs
def test_gitlab_gets_the_same_as_a_note_and_a_quality_report(job: Job, gitlab: Mapping[str, Any]) -> None:
    variables = {f"FP8_{name.upper()}": value for name, value in INPUTS.items()}
    run_gitlab(job, gitlab, **variables)
    assert job.outcomes == [0, 1, 0], job.log
    assert_told(job, job.forge.comments[0]["body"])
    (entry,) = json.loads(job.left("code-quality.json"))
    assert entry["location"]["path"] == "tiny_gpt/parallel.py" and "relative error" in entry["description"]


def test_gitlab_gets_a_note_when_the_target_raises(job: Job, gitlab: Mapping[str, Any]) -> None:
    run_gitlab(job, gitlab, FP8_TARGET="no_such_target", FP8_INSTALL="true")
    assert job.outcomes == [0, 2, 0], job.log
    (note,) = job.forge.comments
    assert note["body"].startswith("<!-- fp8-harness no_such_target -->") and "no table, exit code 2" in note["body"]


def test_buildkite_gets_it_as_an_annotation(job: Job) -> None:
    """Without what the other tests made: there the target raises before anything is judged."""
    (step,) = yaml.safe_load((REPOSITORY / "ci/buildkite/parity.yml").read_text())["steps"]
    agent = job.folder / "bin/buildkite-agent"
    agent.parent.mkdir(exist_ok=True)
    agent.write_text('#!/bin/sh\necho "$@" > "$SAID"; cat >> "$SAID"\n')
    agent.chmod(0o755)
    given = {**step["env"], "FP8_BASE": job.base, "FP8_TARGET": "no_such_target", "FP8_INSTALL": "true"}
    given |= {"BUILDKITE": "true", "SAID": str(job.folder / "said"), "PATH": f"{agent.parent}:{os.environ['PATH']}"}
    job.outcomes.clear()
    own = [line for line in step["commands"] if "fetch" not in line and "checkout" not in line and "init" not in line]
    job.step("\n".join(own).replace("../fp8-harness", str(job.harness)), given)
    assert job.outcomes == [2], job.log
    said = (job.folder / "said").read_text()
    assert said.startswith("annotate --context fp8-harness --style warning\n<!-- fp8-harness no_such_target -->")
    assert "no table, exit code 2" in said and "no_such_target" in said
    assert not (job.project / "fp8-parity/table.json").exists(), "what an earlier job left"
