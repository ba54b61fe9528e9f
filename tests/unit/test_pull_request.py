"""What a pull request is told: its one comment, found again; and the line of the sources to look at."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from runpy import run_path
from types import ModuleType

import pytest

from harness.errors import HarnessError
from harness.report.ci import annotation
from tests.builders import a_finding, make_failure, make_result, run_of
from tests.forge import BOT, USER, Forge, forge_at

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parents[2]
COMMENT = ROOT / "ci/comment.py"
MARKER = "<!-- fp8-harness my.target -->"


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forge]:
    monkeypatch.setenv("no_proxy", "*")
    with forge_at(Forge()) as running_forge:
        yield running_forge


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    return importlib.import_module("pull_request")


def comment(folder: Path, text: str, **variables: str) -> str:
    """What `ci/comment.py` says of this comment."""
    (folder / "comment.md").write_text(text)
    return run_path(str(COMMENT))["post"](folder, variables)


def github(folder: Path, forge: Forge, event: Mapping[str, object]) -> dict[str, str]:
    file = folder / "event.json"
    file.write_text(json.dumps(event))
    names = {"EVENT_PATH": str(file), "API_URL": forge.address, "REPOSITORY": "a/b", "TOKEN": "secret"}
    return {f"GITHUB_{name}": value for name, value in names.items()}


def test_a_pull_request_has_one_comment_which_is_edited(tmp_path: Path, forge: Forge) -> None:
    forge.add(f"{MARKER}\nby somebody who wants it to be edited", user=USER)
    for number in range(150):  # more than one page
        forge.add(f"comment {number}, not on its first line: {MARKER}", user=BOT)
    variables = github(tmp_path, forge, {"pull_request": {"number": 7}})
    assert "added comment 152" in comment(tmp_path, f"{MARKER}\nfirst", **variables)
    (tmp_path / "comment.md").write_text(f"{MARKER}\nsecond")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB", "GITLAB", "CI"))}
    command = [sys.executable, "-I", str(COMMENT), str(tmp_path)]  # as a job runs it
    assert "edited comment 152" in subprocess.check_output(command, env=kept | variables, text=True, timeout=60)
    assert forge.comments[151]["body"] == f"{MARKER}\nsecond" and len(forge.comments) == 152
    assert "added comment 153" in comment(tmp_path, "<!-- fp8-harness other -->\n", **variables), "another target"
    assert {request.partition("?")[0] for request in forge.asked} == {
        "GET /repos/a/b/issues/7/comments",
        "POST /repos/a/b/issues/7/comments",
        "PATCH /repos/a/b/issues/comments/152",
    }


@pytest.mark.parametrize("denied", ["POST", "GET"])
def test_a_token_that_may_only_read_leaves_the_summary(tmp_path: Path, forge: Forge, denied: str) -> None:
    forge.denies = (denied,)
    said = comment(tmp_path, f"{MARKER}\n", **github(tmp_path, forge, {"pull_request": {"number": 7}}))
    assert "HTTP 403" in said and "job summary" in said and not forge.comments


def test_after_a_fork_the_pull_request_is_that_of_its_branch_and_commit(tmp_path: Path, forge: Forge) -> None:
    run = {"head_sha": "c0ffee", "head_branch": "fix", "head_repository": {"owner": {"login": "fork"}}}
    variables = github(tmp_path, forge, {"workflow_run": run})
    forge.pulls = [{"number": 9, "head": {"label": "fork:fix", "sha": "older"}}]
    assert "no pull request" in comment(tmp_path, f"{MARKER}\n", **variables)
    forge.pulls.append({"number": 8, "head": {"label": "fork:fix", "sha": "c0ffee"}})
    assert "added comment 1" in comment(tmp_path, f"{MARKER}\n", **variables)
    assert "POST /repos/a/b/issues/8/comments" in forge.asked


def test_a_note_of_gitlab_is_edited_where_it_is_ours(tmp_path: Path, forge: Forge) -> None:
    forge.add(f"{MARKER}\nby somebody else")
    forge.others = (1,)
    api = {"CI_API_V4_URL": forge.address, "CI_PROJECT_ID": "5", "CI_MERGE_REQUEST_IID": "3", "GITLAB_CI": "true"}
    assert "no pull request" in comment(tmp_path, f"{MARKER}\n", **api), "without a token"
    api["FP8_GITLAB_TOKEN"] = "secret"
    assert "added comment 2" in comment(tmp_path, f"{MARKER}\nfirst", **api)
    assert "edited comment 2" in comment(tmp_path, f"{MARKER}\nsecond", **api)
    assert "PUT /projects/5/merge_requests/3/notes/2" in forge.asked


def test_what_is_no_comment_of_the_harness_is_not_posted(tmp_path: Path, forge: Forge) -> None:
    variables = github(tmp_path, forge, {"pull_request": {"number": 7}})
    assert "no comment of fp8-harness" in comment(tmp_path, "buy this\n", **variables)
    gone = variables | {"GITHUB_API_URL": "http://127.0.0.1:9"}
    assert "no comment: " in comment(tmp_path, f"{MARKER}\n", **gone)
    assert "no pull request" in comment(tmp_path, f"{MARKER}\n", **github(tmp_path, forge, {"pusher": {}}))
    assert not forge.asked


SOURCES = {
    "net/model.py": """
class Attention:
    def __init__(self):
        self.wq = Linear()
class Norm:
    def __init__(self):
        self.bias = Parameter()
class Block:
    def __init__(self):
        self.attention = Attention()
        self.norm = Norm()
class Model:
    def __init__(self):
        self.layers = ModuleDict()
        for index in range(2):
            self.layers[str(index)] = Block()
""",
    "net/other.py": "class Other:\n    def __init__(self):\n        self.wq = Linear()\n",
    "net/broken.py": "class (:\n",
    "fp8_target.py": "import torch\n\ndef build(case, world):\n    return None\n",
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("layers.0.attention.wq", 4),
        ("layers.0._orig_mod.attention.wq.bias", 4),
        ("layers.1.norm.bias", 7),
        ("layers.1.norm", 11),
        ("attention.unknown", 10),
    ],
)
def test_a_module_is_found_where_it_is_made(repository: Path, script: ModuleType, module: str, line: int) -> None:
    case = make_result("single-rowwise-v2048-f32", findings=(a_finding(module=module),))
    place = script.place_of(case, "fp8_target")
    assert (place.file, place.line) == ("net/model.py", line)


def test_without_a_module_it_is_where_the_target_raised_or_is_built(repository: Path, script: ModuleType) -> None:
    case = make_result("single-rowwise-v2048-f32", findings=(a_finding(module="wq"),))
    assert script.place_of(case, "fp8_target") == script.Place("fp8_target.py", 3), "two classes have one"
    assert script.place_of(case, "reference") is None, "no target of this repository"
    trace = f'  File "{repository}/net/model.py", line 4, in f\n  File "/site/torch/nn.py", line 9, in g\n'
    failed = make_result("single-rowwise-v2048-f32", run=run_of(make_failure(1, "boom", traceback=trace)))
    assert script.place_of(failed, "fp8_target") == script.Place("net/model.py", 4)


def test_an_annotation_has_a_line_where_one_is_known() -> None:
    assert annotation("a: b", "c\nd", file="x,y.py", line=3) == "::error file=x%2Cy.py,line=3,title=a%3A b::c%0Ad"
    assert annotation("t", "m") == "::error title=t::m"


def test_what_is_too_long_for_a_comment_loses_what_is_folded(repository: Path, script: ModuleType) -> None:
    table = f"## parity: 1 layout is wrong\n\n<details><summary>all</summary>{'x' * 70_000}</details>"
    variables = {"FP8_TARGET": "my.target", "FP8_HEAD": "c0ffee"}
    text = script.comment(script.Outcome(1, "", table), "", variables)
    assert (
        text.startswith(f"{MARKER}\n## parity: 1 layout is wrong\n") and len(text) < 1000 and "see the report" in text
    )


@pytest.mark.parametrize(
    ("code", "says"), [(4, "infrastructure failed, not this change"), (2, "no table, exit code 2")]
)
def test_without_a_table_the_code_says_why(script: ModuleType, code: int, says: str) -> None:
    outcome = script.Outcome(code, "Traceback\nfp8-harness: error: no such layout\n", "")
    assert outcome.title.startswith(says) and outcome.message == "fp8-harness: error: no such layout"


def test_a_clone_without_the_base_says_what_to_do(repository: Path, script: ModuleType) -> None:
    with pytest.raises(HarnessError, match="fetch-depth: 0"):
        script.merge_base("0" * 40)
