"""Comments on the pull request, or edits the comment that is there: `python3 -P ci/comment.py FOLDER…`.

A folder is what `ci/pull_request.py` left in a job that ran the code of the pull request. This runs in another job,
which alone has a token that may comment, and runs nothing of the pull request. Of a folder it reads values, by their
types, and makes the table of them. It posts none that contradicts itself or how the job ended, and none of a fork that
changes what runs in jobs. The numbers are those that the code of the pull request let be measured: nothing here can
prove more.

For GitHub and GitLab. Where the token may only read, as in pull requests from forks, it says so and is done: the table
is in the job summary, and no comment is worth a failed job.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from harness.errors import HarnessError
from harness.jsonform import read_json
from harness.plugins.parity.commands import parity_markdown
from harness.plugins.parity.layouts import Parity, exit_code_of
from harness.running.stored import read_results
from harness.text import code_span
from harness.verdict import ExitCode

OUTCOME, TABLE, RUN = "outcome.json", "table.json", "run.json"  # of a folder
COMMENT_BYTES = 60_000  # GitHub takes 65,536 characters
TITLES: Mapping[int, str] = {
    ExitCode.GOOD: "no layout is wrong",
    ExitCode.INFRA: "infrastructure failed, not this change: run it again",
    ExitCode.CHANGED: "layouts differ from what holds with verified versions",
}
FOLDERS = 5  # a comment for each
PAGE, PAGES = 100, 30  # what one request returns, and how many requests GitHub answers for the files of a pull request
DENIED = (401, 403, 404)
RUNS_JOBS = re.compile(r"\.github/|\.gitlab-ci|(?:.*/)?\.gitlab-ci")  # a file that changes what a job runs


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended, in its own words."""

    target: Annotated[str, msgspec.Meta(pattern=r"^[\w.]{1,200}\Z")]
    exit_code: int
    base: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{7,64})?\Z")] = ""


@dataclass(frozen=True)
class Host:
    """The comments of one pull request. `each`: the address of a comment, less its id."""

    comments: str
    each: str
    edit: str  # the method of a request that edits
    headers: Mapping[str, str]
    head: str  # the commit that was measured
    page: str  # of the pipeline
    files: str = ""  # the address of the files of a pull request from a fork; empty for one of this repository

    def put(self, text: str) -> str:
        """Edit the first own comment with the marker of this text, or add one. Returns what was done."""
        marker = text.partition("\n")[0]
        for comment_id in self._marked(marker):
            try:
                self._ask(self.edit, f"{self.each}/{comment_id}", text)
            except urllib.error.HTTPError as error:
                if error.code not in DENIED:
                    raise
                continue  # somebody else's: it only has our marker
            return f"edited comment {comment_id}"
        return f"added comment {self._ask('POST', self.comments, text)['id']}"

    def changes_jobs(self) -> bool:
        """True if a fork changes what runs in the jobs, or so much that GitHub does not list it."""
        for page in range(1, PAGES + 1) if self.files else ():
            files = self._ask("GET", f"{self.files}?per_page={PAGE}&page={page}")
            names = (name for file in files for name in (file["filename"], file.get("previous_filename", "")))
            if any(map(RUNS_JOBS.match, names)):
                return True
            if len(files) < PAGE:
                return False
        return bool(self.files)

    def _marked(self, marker: str) -> Iterator[int]:
        page, full = 1, True
        while full:
            comments = self._ask("GET", f"{self.comments}?per_page={PAGE}&page={page}")
            yield from (
                comment["id"]
                for comment in comments
                if comment["body"].startswith(marker) and comment.get("user", {}).get("type", "Bot") == "Bot"
            )
            page, full = page + 1, len(comments) == PAGE

    def _ask(self, method: str, address: str, text: str | None = None) -> Any:
        return ask(method, address, self.headers, None if text is None else {"body": text})


def ask(method: str, address: str, headers: Mapping[str, str], body: object = None) -> Any:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, content, {**headers, "Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def github(variables: Mapping[str, str]) -> Host | None:
    """The pull request of the event, or None. After `workflow_run` the open one of its branch."""
    event = json.loads(Path(variables["GITHUB_EVENT_PATH"]).read_text())
    repository = f"{variables['GITHUB_API_URL']}/repos/{variables['GITHUB_REPOSITORY']}"
    headers = {"Authorization": f"Bearer {variables['GITHUB_TOKEN']}", "Accept": "application/vnd.github+json"}
    server = f"{variables['GITHUB_SERVER_URL']}/{variables['GITHUB_REPOSITORY']}/actions/runs"
    if "workflow_run" in event:  # of a fork it does not name its pull requests
        run = event["workflow_run"]
        head, run_id = run["head_sha"], run["id"]
        branch = urllib.parse.quote(f"{run['head_repository']['owner']['login']}:{run['head_branch']}")
        pulls = ask("GET", f"{repository}/pulls?state=open&head={branch}", headers)
        numbers = [pull["number"] for pull in pulls if pull["head"]["sha"] == head]
    else:
        numbers = [event["pull_request"]["number"]] if "pull_request" in event else []
        head, run_id = event["pull_request"]["head"]["sha"] if numbers else "", variables["GITHUB_RUN_ID"]
    if not numbers:
        return None
    issues, pull = f"{repository}/issues", f"{repository}/pulls/{numbers[0]}"
    files = f"{pull}/files" if "workflow_run" in event else ""
    where = f"{issues}/{numbers[0]}/comments", f"{issues}/comments", "PATCH"
    return Host(*where, headers, head, f"{server}/{run_id}", files)


def gitlab(variables: Mapping[str, str]) -> Host | None:
    """The merge request, or None, or no token: the token of a job cannot write notes."""
    if not {"CI_MERGE_REQUEST_IID", "FP8_GITLAB_TOKEN"} <= set(variables):
        return None
    project = f"{variables['CI_API_V4_URL']}/projects/{variables['CI_PROJECT_ID']}"
    notes = f"{project}/merge_requests/{variables['CI_MERGE_REQUEST_IID']}/notes"
    headers = {"PRIVATE-TOKEN": variables["FP8_GITLAB_TOKEN"]}
    return Host(notes, notes, "PUT", headers, variables["CI_COMMIT_SHA"], variables["CI_PIPELINE_URL"])


def title_of(code: int) -> str:
    """What an exit code says where there is no table."""
    return TITLES.get(code, f"no table, exit code {code}")


def comment(folder: Path, *, head: str, page: str, ended: str = "") -> str:
    """What the pull request shows, with the marker by which it is found again.

    `ended`: how the job did, where that is known: "success", or anything else. HarnessError if the files are not
    what `ci/pull_request.py` writes, or contradict each other or the end of the job.
    """
    outcome = read_json(folder / OUTCOME, Outcome, command="ci/pull_request.py")
    where = str(folder)
    if ended and (ended == "success") != (outcome.exit_code == 0):
        raise HarnessError(f"says exit code {outcome.exit_code}, and the job ended with {ended}.", where=where)
    if (folder / TABLE).exists():
        parity, run = read_json(folder / TABLE, Parity, command="parity --json"), read_results(folder / RUN)
        if [row.case_id for row in parity.every] != [result.case_id for result in run.results]:
            raise HarnessError("the table and the results are of other cases.", where=where)
        if not exit_code_of(parity.every, run) == parity.exit_code == outcome.exit_code:
            raise HarnessError(f"exit code {outcome.exit_code} is not that of the results.", where=where)
        table = parity_markdown(parity, run).strip()
    else:
        table = f"## parity: {title_of(outcome.exit_code)}\n\nSee the log of the job."
    if len(table.encode()) > COMMENT_BYTES:
        table = f"{table.partition('<details')[0][:COMMENT_BYTES]}\n\nThe rest is too long: see the report."
    against = f" against {outcome.base[:12]}" if outcome.base else ""
    report = f" · [report]({page})" if page else ""
    facts = f"fp8-harness · {code_span(outcome.target)} · {head[:12]}{against}{report}"
    return f"<!-- fp8-harness {outcome.target} -->\n{table}\n\n<sub>{facts}</sub>\n"


def post(folders: Sequence[Path], variables: Mapping[str, str]) -> Iterator[str]:
    """Comment where this runs. Returns what was done, for each folder."""
    try:
        host = gitlab(variables) if "GITLAB_CI" in variables else github(variables)
        if host is None:
            yield "there is no pull request to comment on"
        elif host.changes_jobs():
            yield "no comment: the pull request comes from a fork and changes what runs in jobs; see its job summary"
        else:
            yield from (_posted(host, folder, variables.get("FP8_RESULT", "")) for folder in folders[:FOLDERS])
    except urllib.error.HTTPError as error:
        why = "the token may not comment here" if error.code in DENIED else "the server refused"
        yield f"no comment, {why} (HTTP {error.code}): see the job summary and the artifacts"
    except OSError as error:
        yield f"no comment: {error}"


def _posted(host: Host, folder: Path, ended: str) -> str:
    if not (folder / OUTCOME).is_file():
        return f"{folder}: there is nothing of fp8-harness to post"
    try:
        return host.put(comment(folder, head=host.head, page=host.page, ended=ended))
    except HarnessError as error:
        return f"no comment: {error.text}"


if __name__ == "__main__":
    for said in post(list(map(Path, sys.argv[1:])), os.environ):
        print(said)
