"""What a pull request is told: its one comment, found again; and the line of the sources to look at."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.plugins.parity.layouts import Parity, Row, exit_code_of
from harness.report.ci import annotation
from harness.store import run_lines
from harness.studies.layouts import Word
from harness.verdict import ExitCode, Verdict
from tests.builders import a_finding, make_failure, make_result, make_results, run_of
from tests.forge import BOT, USER, Forge, forge_at

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parents[4]
COMMENT = ROOT / "ci/comment.py"
MARKER = "<!-- fp8-harness my.target -->"


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forge]:
    monkeypatch.setenv("no_proxy", "*")
    with forge_at(Forge()) as running_forge:
        yield running_forge


@pytest.fixture(autouse=True)
def _of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module("pull_request")


def left(folder: Path, *words: Word, target: str = "my.target", code: int | None = None, **changes: Any) -> Path:
    """A folder that the job of a pull request left, in which layouts have these words."""
    verdicts: dict[Word, Verdict] = {"wrong": Verdict.NUMERIC, "infra": Verdict.INFRA}
    named = {f"tp{2 ** (at + 1)}-rowwise-v2048-f32": word for at, word in enumerate(words)}
    run = make_results(*(make_result(name, verdicts.get(word, Verdict.PASSED)) for name, word in named.items()))
    rows = tuple(Row(layout=name.partition("-")[0], case_id=name, word=word) for name, word in named.items())
    right = exit_code_of(rows, run)
    table = Parity(case_id=next(iter(named)), rows=rows, left_out=(), exit_code=right, seconds=1.0, software={})
    folder.mkdir(exist_ok=True)
    (folder / "table.json").write_bytes(to_json(replace(table, **changes)))
    (folder / "run.json").write_bytes(run_lines(run))
    outcome = {"target": target, "exit_code": int(right) if code is None else code, "base": "ba5e" * 10}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    return folder


def posted(*folders: Path, **variables: str) -> list[str]:
    """What `ci/comment.py` says of these folders."""
    return list(importlib.import_module("comment").post(folders, variables))


def github(folder: Path, forge: Forge, event: Mapping[str, object]) -> dict[str, str]:
    file = folder / "event.json"
    file.write_text(json.dumps(event))
    names = {"EVENT_PATH": str(file), "API_URL": forge.address, "REPOSITORY": "a/b", "TOKEN": "secret"}
    names |= {"SERVER_URL": "https://github.com", "RUN_ID": "42"}
    return {f"GITHUB_{name}": value for name, value in names.items()}


PULL = {"pull_request": {"number": 7, "head": {"sha": "c0ffee" * 6}}}
FORK = {
    "workflow_run": {
        "id": 43,
        "head_sha": "c0ffee" * 6,
        "head_branch": "fix",
        "head_repository": {"owner": {"login": "fork"}},
    }
}
OF_FORK = {"number": 8, "head": {"label": "fork:fix", "sha": "c0ffee" * 6}}


def test_a_pull_request_has_one_comment_which_is_edited(tmp_path: Path, forge: Forge) -> None:
    forge.add(f"{MARKER}\nby somebody who wants it to be edited", user=USER)
    for number in range(150):  # more than one page
        forge.add(f"comment {number}, not on its first line: {MARKER}", user=BOT)
    variables = github(tmp_path, forge, PULL)
    assert posted(left(tmp_path / "a", "wrong"), **variables) == ["added comment 152"]
    left(tmp_path / "a", "equal")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB", "GITLAB", "CI"))}
    command = [sys.executable, "-P", "-s", str(COMMENT), str(tmp_path / "a")]  # as a job runs it
    assert "edited comment 152" in subprocess.check_output(command, env=kept | variables, text=True, timeout=60)
    body = forge.comments[151]["body"]
    assert body.startswith(f"{MARKER}\n## parity: no layout is wrong\n") and "| tp2 | equal |" in body
    assert "`my.target` · c0ffeec0ffee against ba5eba5eba5e · [report](https://github.com/a/b/actions/runs/42)" in body
    assert len(forge.comments) == 152
    assert posted(left(tmp_path / "b", "equal", target="other"), **variables) == ["added comment 153"]
    assert {request.partition("?")[0] for request in forge.asked} == {
        "GET /repos/a/b/issues/7/comments",
        "POST /repos/a/b/issues/7/comments",
        "PATCH /repos/a/b/issues/comments/152",
    }


@pytest.mark.parametrize("denied", ["POST", "GET"])
def test_a_token_that_may_only_read_leaves_the_summary(tmp_path: Path, forge: Forge, denied: str) -> None:
    forge.denies = (denied,)
    (said,) = posted(left(tmp_path / "a", "equal"), **github(tmp_path, forge, PULL))
    assert "HTTP 403" in said and "job summary" in said and not forge.comments


def test_after_a_fork_the_pull_request_is_that_of_its_branch_and_commit(tmp_path: Path, forge: Forge) -> None:
    variables = github(tmp_path, forge, FORK)
    forge.pulls = [{"number": 9, "head": {"label": "fork:fix", "sha": "older"}}]
    assert "no pull request" in posted(left(tmp_path / "a", "equal"), **variables)[0]
    forge.pulls.append(OF_FORK)
    assert posted(tmp_path / "a", **variables) == ["added comment 1"]
    assert "POST /repos/a/b/issues/8/comments" in forge.asked and "runs/43" in forge.comments[0]["body"]


@pytest.mark.parametrize(
    "name", [".github/workflows/fp8.yml", ".github/actions/x/action.yml", ".gitlab-ci.yml", "ci/.gitlab-ci-x.yml"]
)
@pytest.mark.parametrize("before", [0, 250])
def test_a_fork_that_changes_what_runs_in_jobs_gets_no_comment(
    tmp_path: Path, forge: Forge, name: str, before: int
) -> None:
    forge.pulls = [OF_FORK]
    others = [{"filename": f"net/{number}.py"} for number in range(before)]
    for file in ({"filename": name}, {"filename": "x", "previous_filename": name}):
        forge.files = [*others, file]
        (said,) = posted(left(tmp_path / "a", "equal"), **github(tmp_path, forge, FORK))
        assert "comes from a fork and changes what runs in jobs" in said and not forge.comments
    forge.files = [{"filename": "net/.github/x"}]
    assert posted(tmp_path / "a", **github(tmp_path, forge, FORK)) == ["added comment 1"]


def test_of_a_fork_too_many_files_are_no_proof_and_what_it_writes_is_inert(tmp_path: Path, forge: Forge) -> None:
    forge.pulls, forge.files = [OF_FORK], [{"filename": "a"}] * 3000
    assert "comes from a fork" in posted(left(tmp_path / "a", "equal"), **github(tmp_path, forge, FORK))[0]
    evil = Row(layout="@user", case_id="tp2-rowwise-v2048-f32", word="equal", why="![x](//e.vil) </sub> #12")
    assert posted(left(tmp_path / "a", "equal", rows=(evil,)), **github(tmp_path, forge, PULL)) == ["added comment 1"]
    body = forge.comments[0]["body"]
    assert "| `@user` | equal |" in body and "!\\[x\\](//e.vil) &lt;/sub&gt; `#12`" in body


@pytest.mark.parametrize(
    ("made", "result", "why"),
    [
        ({"code": 0}, "", "exit code 0 is not that of the results"),
        ({"exit_code": ExitCode.GOOD, "code": 0}, "", "exit code 0 is not that of the results"),
        ({}, "success", "says exit code 1, and the job ended with success"),
        ({"rows": ()}, "", "the table and the results are of other cases"),
        ({"target": "a -->\n# GO"}, "", "not written by `ci/pull_request.py`"),
    ],
)
def test_a_folder_that_contradicts_itself_or_its_job_is_not_posted(
    tmp_path: Path, forge: Forge, made: Mapping[str, Any], result: str, why: str
) -> None:
    variables = github(tmp_path, forge, PULL) | {"FP8_RESULT": result}
    (said,) = posted(left(tmp_path / "a", "wrong", **made), **variables)
    assert why in said and not forge.comments


def test_a_green_table_over_bad_results_is_not_posted(tmp_path: Path, forge: Forge) -> None:
    folder = left(tmp_path / "a", "equal")
    bad = make_results(make_result("tp2-rowwise-v2048-f32", Verdict.CRASH))
    (folder / "run.json").write_bytes(run_lines(bad))
    assert "is not that of the results" in posted(folder, **github(tmp_path, forge, PULL))[0]
    (folder / "run.json").write_bytes(run_lines(bad).replace(b"crash", b"passed", 1))
    assert "its checksum is another one" in posted(folder, **github(tmp_path, forge, PULL))[0]
    (folder / "comment.md").write_text(f"{MARKER}\n## parity: no layout is wrong\n")
    assert not forge.comments, "text that the job wrote is never posted"


def test_a_note_of_gitlab_is_edited_where_it_is_ours(tmp_path: Path, forge: Forge) -> None:
    forge.add(f"{MARKER}\nby somebody else")
    forge.others = (1,)
    api = {"CI_API_V4_URL": forge.address, "CI_PROJECT_ID": "5", "CI_MERGE_REQUEST_IID": "3", "GITLAB_CI": "true"}
    api |= {"CI_COMMIT_SHA": "c0ffee" * 6, "CI_PIPELINE_URL": "https://gitlab.com/a/b/-/pipelines/1"}
    folder = left(tmp_path / "a", "equal")
    assert "no pull request" in posted(folder, **api)[0], "without a token"
    api["FP8_GITLAB_TOKEN"] = "secret"
    assert posted(folder, **api) == ["added comment 2"] and posted(folder, **api) == ["edited comment 2"]
    assert "PUT /projects/5/merge_requests/3/notes/2" in forge.asked


def test_what_is_posted_without_a_table(tmp_path: Path, forge: Forge) -> None:
    variables = github(tmp_path, forge, PULL)
    assert "nothing of fp8-harness to post" in posted(tmp_path, **variables)[0]
    gone = variables | {"GITHUB_API_URL": "http://127.0.0.1:9"}
    assert "no comment: " in posted(left(tmp_path / "a", "equal"), **gone)[0]
    assert "no pull request" in posted(tmp_path / "a", **github(tmp_path, forge, {"pusher": {}}))[0]
    assert not forge.asked
    (tmp_path / "outcome.json").write_text('{"target": "my.target", "exit_code": 4}')
    assert posted(tmp_path, **github(tmp_path, forge, PULL)) == ["added comment 1"]
    assert "## parity: infrastructure failed, not this change: run it again\n" in forge.comments[0]["body"]


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
    with pytest.raises(HarnessError, match="fetch-depth: 0"):
        script.merge_base("0" * 40)


def test_a_layout_that_was_right_in_the_base_is_wrong_at_a_line_of_the_difference(
    repository: Path, script: ModuleType
) -> None:
    base = committed()
    case = make_result("single-rowwise-v2048-f32", findings=(a_finding(module="layers.0.attention.wq"),))
    assert script.place_of(case, "fp8_target", base) == script.Place("net/model.py", 4), "no Python file differs"
    for name, line in (("aaa.py", 3), ("net/model.py", 19)):
        with (repository / name).open("a") as file:
            file.write("import os\n")
        committed()
        with (repository / name).open("a") as file:
            file.write("# why\nos.nice(1)\n")
        committed()
        assert script.place_of(case, "fp8_target", base) == script.Place(name, line)


def committed() -> str:
    """The commit of all that is in the current folder."""
    subprocess.run(["git", "add", "."], check=True)
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", *who, "commit", "--quiet", "--allow-empty", "-m", "m"], check=True)
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def test_an_annotation_has_a_line_where_one_is_known() -> None:
    assert annotation("a: b", "c\nd", file="x,y.py", line=3) == "::error file=x%2Cy.py,line=3,title=a%3A b::c%0Ad"
    assert annotation("t", "m") == "::error title=t::m"


def test_what_is_too_long_for_a_comment_loses_what_is_folded(tmp_path: Path, script: ModuleType) -> None:
    folder = left(tmp_path / "a", "wrong")
    finding = a_finding(message="x" * 70_000)
    run = make_results(make_result("tp2-rowwise-v2048-f32", Verdict.NUMERIC, findings=(finding,)))
    (folder / "run.json").write_bytes(run_lines(run))
    text = script.comment(folder, head="c0ffee", page="")
    assert text.startswith(f"{MARKER}\n## parity: 1 layout is wrong: tp2\n") and "see the report" in text
    assert len(text) < 1000


@pytest.mark.parametrize(
    ("code", "says"), [(4, "infrastructure failed, not this change"), (2, "no table, exit code 2")]
)
def test_without_a_table_the_code_says_why(script: ModuleType, code: int, says: str) -> None:
    outcome = script.Outcome(code, "Traceback\nfp8-harness: error: no such layout\n")
    assert outcome.title.startswith(says) and outcome.message == "fp8-harness: error: no such layout"
