"""What the project ships: the README's example, pipelines for CI, a patch of torch."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path

import click
import jsonschema
import pytest
import yaml
from click.testing import CliRunner, Result

from harness.matrix.casefile import case_file_schema, parse_case_file
from harness.matrix.caseid import case_id, id_words, meaning_of, parse_case_id
from harness.matrix.records import read_quarantine
from harness.matrix.tier import select
from harness.project import find_project
from harness.report.checks import checks_markdown
from harness.report.support import support_markdown
from harness.running.plan import parse_injection
from harness.worker.program import InjectionError, inject
from tests.commands import understood

ROOT = Path(__file__).parents[2]
README, CONCEPTS = (ROOT / "README.md").read_text(), (ROOT / "docs" / "concepts.md").read_text()
TOML = re.findall(r"^```toml\n(.*?)^```", CONCEPTS, flags=re.MULTILINE | re.DOTALL)[0]


def test_the_case_file_is_valid() -> None:
    jsonschema.validate(tomllib.loads(TOML), case_file_schema())
    file = parse_case_file(TOML, where="concepts.toml")
    assert case_id(file.cases[0]) == "tp4-rowwise-ac.full-v2256-f32"
    assert len(select(file, known=()).cases) > 4


def test_the_words_of_the_id_are_explained_as_the_tool_does() -> None:
    shown = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", CONCEPTS, flags=re.MULTILINE))
    assert all(shown[word] == meaning_of(word) for word in id_words("tp4-rowwise-ac.full-v2256-f32"))


def test_the_commands_exist_with_these_options() -> None:
    lines = re.findall(r"^(?:\$ )?fp8-harness ([^#\n]*)", README, flags=re.MULTILINE)
    assert len(lines) > 1 and len(README.split()) <= 450
    for line in lines:
        understood(f"fp8-harness {line}")


@pytest.mark.plugin("torchtitan")
def test_the_generated_pages_are_what_explain_prints() -> None:
    pages = {"checks": checks_markdown(), "support": support_markdown(find_project(str(ROOT)))}
    for name, text in pages.items():
        assert (ROOT / "docs" / f"{name}.md").read_text() == text, f"run `explain --list {name} > docs/{name}.md`"


def test_a_picture_shows_a_command_and_a_layout_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    module = importlib.import_module("pictures")
    pictures = module.read()
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert set(re.findall(r"\(images/(\S+?)\)", pages)) == pictures.keys()
    page = "".join(path.read_text() for path in (ROOT / "harness/report/html/assets").iterdir())
    for name, picture in pictures.items():
        understood(picture.command)
        assert module.digest(module.IMAGES / name) == picture.sha256, "run `python ci/pictures.py`"
        shown = [heading for heading in picture.headings if re.fullmatch(r"[A-Za-z ]+", heading)]
        assert all(heading in page for heading in shown), "run `python ci/pictures.py`: the page has other headings"


SCHEMAS = {"github": "github-workflows", "gitlab": "gitlab-ci", "buildkite": "buildkite"}
KUBERAY = ROOT / "ci/cluster/kuberay.yaml"
BATCHES = sorted((ROOT / "ci/cluster").glob("*.sbatch"))
PIPELINES = sorted(path for name in SCHEMAS for path in (ROOT / "ci" / name).glob("*.yml"))
CALLED = (  # by other repositories
    *(ROOT / "ci/github" / name / "action.yml" for name in ("parity", "parity-comment")),
    ROOT / ".github/workflows/parity.yml",
)


def lint(path: Path, schema: str) -> Result:
    """What check-jsonschema says of a pipeline: exit code 1 where it is not valid."""
    from check_jsonschema import main

    transform = ["--data-transform", "gitlab-ci"] if schema == "gitlab-ci" else []
    return CliRunner().invoke(main, ["--builtin-schema", f"vendor.{schema}", *transform, str(path)])


def texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for element in value.values() if isinstance(value, dict) else value:
            yield from texts(element)


def commands(path: Path) -> list[str]:
    """The commands of a pipeline, with a number for everything that the CI system or the shell fills in."""
    filled = re.compile(r"\$\{\{.*?\}\}|\$\$?\(\(.*?\)\)|\$\$?\w+")
    lines = (line for text in texts(yaml.safe_load(path.read_text())) for line in text.splitlines())
    matches = (re.search(r"fp8-harness .+", line) for line in lines if ".venv/bin/fp8-harness" in line)
    return [filled.sub("1", match[0]) for match in matches if match]


def batch_commands(text: str) -> list[str]:
    """The commands of a batch script without words of its own; each variable stands for a number."""
    joined = text.replace("\\\n", " ")
    filled = re.sub(r"\$\w+", "1", re.sub(r'"\$\{@:-(\w+)\}"', r"\1", joined))
    lines = re.findall(r"^[^#\n]*?(fp8-harness (?:run|baseline|compare) .+)$", filled, flags=re.MULTILINE)
    assert lines
    return lines


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_pipeline_is_valid_and_its_commands_exist(path: Path) -> None:
    done = lint(path, SCHEMAS[path.parent.name])
    assert done.exit_code == 0, done.output
    lines = commands(path)
    # tests/acceptance/test_pull_request.py runs those of parity; the nightly of torchao calls make and a program of ci/
    assert lines or "parity" in path.name or path.stem == "nightly-torchao"
    for line in lines:
        understood(line)


def test_the_workflow_passes_on_every_input_of_the_action() -> None:
    """What another repository calls is valid, and both have the same inputs with the same defaults."""
    action, comments, workflow = (yaml.safe_load(path.read_text()) for path in CALLED)
    for path, schema in zip(CALLED, ("github-actions", "github-actions", "github-workflows"), strict=True):
        assert (done := lint(path, schema)).exit_code == 0, done.output
    inputs = workflow[True]["workflow_call"]["inputs"]  # YAML reads `on` as True
    own = {name: declared.get("default") for name, declared in action["inputs"].items() if name != "token"}
    assert {name: declared.get("default") for name, declared in inputs.items()} == own
    *_, uses = workflow["jobs"]["parity"]["steps"]
    assert uses["uses"] == "$/ci/github/parity"
    assert uses["with"] == {name: f"${{{{ inputs.{name} }}}}" for name in inputs}
    (uses,) = workflow["jobs"]["comment"]["steps"]
    assert uses["uses"] == "$/ci/github/parity-comment" and uses["with"].keys() == comments["inputs"].keys() - {"token"}


def test_the_token_that_comments_is_in_a_job_without_the_code_of_the_pull_request() -> None:
    measures, _, workflow = (yaml.safe_load(path.read_text()) for path in CALLED)
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {} and jobs["parity"]["permissions"] == {"contents": "read"}
    assert jobs["comment"]["permissions"] == {"pull-requests": "write"}
    assert not any("checkout" in step["uses"] for step in jobs["comment"]["steps"])
    assert "token" not in str(measures).lower()


@pytest.mark.parametrize("path", BATCHES, ids=lambda path: path.name)
def test_a_batch_script_is_valid_and_its_commands_exist(path: Path) -> None:
    text = path.read_text()
    subprocess.run(["bash", "-n", path], check=True, timeout=10)
    assert os.access(path, os.X_OK)
    options = re.findall(r"^#SBATCH --([\w-]+)=\S+$", text, flags=re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "time"} <= set(options)
    for line in batch_commands(text):
        understood(line)


def test_the_commands_of_make_exist() -> None:
    given = {"DEVICE": "cpu", "EVIDENCE": "", "or $(TIER_$*),smoke": "pr"}
    text = (ROOT / "Makefile").read_text()
    for name, value in given.items():
        text = text.replace(f"$({name})", value)
    lines = re.findall(r"^\t\S+/(fp8-harness .+)$", text, flags=re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        understood(line)


@pytest.mark.programs
@pytest.mark.parametrize("index", ["", "https://example.org/cpu"])
def test_what_runs_cases_is_installed_by_one_call_of_pip_without_what_tests_need(index: str) -> None:
    command = ["make", "--dry-run", "--always-make", ".venv/.ready", f"TORCH_INDEX={index}"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (line,) = (line.split() for line in lines if " pip install " in line)
    assert line[-4:] == ["-c", "ci/constraints.txt", "-e", "'.[train]'"] and (index in line) is bool(index)


def test_the_job_of_kuberay_has_one_image_and_a_command_that_exists(tmp_path: Path) -> None:
    job = yaml.safe_load(KUBERAY.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    understood(job["spec"]["entrypoint"].replace("/results/", f"{tmp_path}/"))  # a volume of its pods
    cluster = job["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert len({container["image"] for pod in pods for container in pod["containers"]}) == 1
    for pod in pods:
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    pinned = re.findall(r"^ray==(.*)$", (ROOT / "ci/constraints.txt").read_text(), flags=re.MULTILINE)
    assert pinned == [cluster["rayVersion"]]


def test_a_pipeline_that_is_wrong_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "workflow.yml"
    wrong.write_text((ROOT / "ci/github/pull-request.yml").read_text().replace("runs-on:", "run-on:"))
    done = lint(wrong, "github-workflows")
    assert done.exit_code == 1 and "runs-on" in done.output


@pytest.mark.parametrize(
    "line",
    ["fp8-harness run pr --shards 1/2", "fp8-harness baseline updat", "fp8-harness run --shard", "fp8-harness x"],
)
def test_a_command_that_is_wrong_is_found(line: str) -> None:
    with pytest.raises(click.UsageError):
        understood(line)


def test_scripts_of_pipelines_are_there_and_can_be_run() -> None:
    named = {
        name
        for path in (*PIPELINES, ROOT / "ci/pull-request.sh")
        for name in re.findall(r"ci/[\w-]+\.sh", path.read_text())
    }
    assert named == {str(path.relative_to(ROOT)) for path in (ROOT / "ci").glob("*.sh")}
    for name in named:
        assert os.access(ROOT / name, os.X_OK), name
        subprocess.run(["bash", "-n", name], cwd=ROOT, check=True, timeout=10)


@pytest.mark.parametrize(
    ("given", "good"),
    [
        ("2.16.0.dev20261119+cpu", "2.16.0.dev20261119+cpu"),
        ("", "2.13.0+cpu"),  # the first night
        ("2.15.0.dev20260701+cpu", "2.13.0+cpu"),  # which the index has dropped
        ("2.16.0", "2.13.0+cpu"),
    ],
)
def test_a_nightly_is_compared_with_the_last_good_one_that_there_still_is(
    tmp_path: Path, given: str, good: str
) -> None:
    """With a stub of the interpreter, which answers as pip does."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    listed = "Available versions: 2.16.0.dev20261120+cpu, 2.16.0.dev20261119+cpu, 2.16.0.dev20261118+cpu"
    says = (
        f'case "$*" in *"pip index versions --pre --index-url URL torch") echo "{listed}";; *) echo 2.13.0+cpu;; esac'
    )
    python.write_text(f"#!/bin/sh\n{says}\n")
    python.chmod(0o755)
    command = [ROOT / "ci/nightly-versions.sh", "torch", "URL", given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=10, check=True)
    assert done.stdout.split() == ["newest=2.16.0.dev20261120+cpu", f"good={good}"]
    python.write_text("#!/bin/sh\nexit 0\n")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=10, check=False).returncode == 1


@pytest.mark.parametrize("name", ["nightly-torch", "release-gate"])
def test_a_gate_of_versions_names_none(name: str) -> None:
    """A version in the file is yesterday's tomorrow."""
    assert re.findall(r"torch\w*[=, ]+v?\d+\.\d+", (ROOT / f"ci/github/{name}.yml").read_text()) == []


CODE = "# käse\nimport os\ndef apply():\n    os.environ['FP8_TEST_PATCH'] = __file__\ndef fails():\n    int('x')\n"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_the_file_is_not_needed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    file = tmp_path / "patch.py"
    file.write_bytes(f"# coding: {encoding}\n{CODE}".encode(encoding))
    applied, fails = (parse_injection(f"{file}:{name}") for name in ("apply", "fails"))
    content = applied.content
    file.unlink()
    monkeypatch.setenv("FP8_TEST_PATCH", "")
    inject(applied.patch)
    assert os.environ["FP8_TEST_PATCH"] == str(file)
    assert importlib.import_module("injection_patch").__file__ == str(file), "compiled code imports what it calls"
    with pytest.raises(InjectionError, match=f"injection {file}:fails raised ValueError") as raised:
        inject(fails.patch)
    assert "int('x')" in "".join(traceback.format_exception(raised.value)), "tracebacks show lines of the source"
    assert applied.content == content
    file.write_text("def apply(): pass\n")
    assert parse_injection(f"{file}:apply").content != content


def test_only_what_moved_is_installed(tmp_path: Path) -> None:
    """With stubs of python3 and pip, which write down what they are asked for."""
    log, fork, stubs = tmp_path / "log", tmp_path / "ao", tmp_path / "stubs"
    for folder in (tmp_path / "ci", fork, stubs):
        folder.mkdir()
    (tmp_path / "ci/constraints.txt").write_text("torch==2.13.0\n")
    pip = f'#!/bin/sh\necho "$@" >> {log}\n'
    (stubs / "python3").write_text(
        f"#!/bin/sh\nrm -rf .venv; mkdir -p .venv/bin\ncp {stubs}/pip .venv/bin\necho new >> {log}\n"
    )
    (stubs / "pip").write_text(pip)
    for stub in stubs.iterdir():
        stub.chmod(0o755)
    git = ["git", "-C", str(fork), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)

    def installed(*words: str) -> str:
        log.write_text("")
        path = {"PATH": f"{stubs}:{os.environ['PATH']}"}
        command = ["bash", str(ROOT / "ci/environment.sh"), "cpu", *words]
        subprocess.run(command, cwd=tmp_path, env=os.environ | path, check=True, timeout=30)
        lines = log.read_text().splitlines()
        return " ".join("fork" if line.endswith(" ao") else "new" if line == "new" else "" for line in lines).strip()

    def commit() -> None:
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "moved"], check=True)

    commit()
    assert installed("ao").split() == ["new", "fork"]
    assert installed("ao") == ""
    commit()
    assert installed("ao") == "fork"
    assert installed() == "new" and installed() == ""
    assert installed("ao") == "fork"
    (tmp_path / "ci/constraints.txt").write_text("torch==2.15.0\n")
    assert installed("ao").split() == ["new", "fork"]


def test_the_quarantine_of_the_recipe_is_read(tmp_path: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/ci.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    file = tmp_path / "quarantine.toml"
    file.write_text(next(block for block in blocks if "[[quarantine]]" in block))
    (entry,) = read_quarantine(file)
    assert entry.id == case_id(parse_case_id(entry.id))


def test_the_fork_recipe_runs_again_what_failed_within_a_budget() -> None:
    steps = yaml.safe_load((ROOT / "ci/github/torchao-fork.yml").read_text())["jobs"]["cases"]["steps"]
    first = next(step for step in steps if step.get("id") == "first")
    again = next(step for step in steps if step.get("if") == "steps.first.outcome == 'failure'")
    assert first["continue-on-error"] and "--budget-s" in first["run"] and "run --lf" in again["run"]
    assert any("fp8-quarantine.toml" in step.get("run", "") for step in steps)
