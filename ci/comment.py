"""Puts the comments in folders on the pull request, or edits those that are there: `python3 ci/comment.py FOLDER…`.

For GitHub and GitLab, with what the standard library has. Each `comment.md` begins with a hidden marker, by which
the comment is found again. Where the token may only read, as in pull requests from forks, it says so and is done: the
table is in the job summary, and no comment is worth a failed job.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = re.compile(r"<!-- fp8-harness [\w.-]+ -->")
PAGE = 100  # comments that one request returns
DENIED = (401, 403, 404)


@dataclass(frozen=True)
class Host:
    """The comments of one pull request. `each`: the address of a comment, less its id."""

    comments: str
    each: str
    edit: str  # the method of a request that edits
    headers: Mapping[str, str]

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
    """The pull request of the event; None where there is none. After `workflow_run` the open one of its branch."""
    event = json.loads(Path(variables["GITHUB_EVENT_PATH"]).read_text())
    repository = f"{variables['GITHUB_API_URL']}/repos/{variables['GITHUB_REPOSITORY']}"
    headers = {"Authorization": f"Bearer {variables['GITHUB_TOKEN']}", "Accept": "application/vnd.github+json"}
    if "workflow_run" in event:  # of a fork it does not name its pull requests
        run = event["workflow_run"]
        head = urllib.parse.quote(f"{run['head_repository']['owner']['login']}:{run['head_branch']}")
        pulls = ask("GET", f"{repository}/pulls?state=open&head={head}", headers)
        numbers = [pull["number"] for pull in pulls if pull["head"]["sha"] == run["head_sha"]]
    else:
        numbers = [event["pull_request"]["number"]] if "pull_request" in event else []
    issues = f"{repository}/issues"
    return Host(f"{issues}/{numbers[0]}/comments", f"{issues}/comments", "PATCH", headers) if numbers else None


def gitlab(variables: Mapping[str, str]) -> Host | None:
    """The merge request; None where there is none, or no token: the token of a job cannot write notes."""
    if not {"CI_MERGE_REQUEST_IID", "FP8_GITLAB_TOKEN"} <= set(variables):
        return None
    project = f"{variables['CI_API_V4_URL']}/projects/{variables['CI_PROJECT_ID']}"
    notes = f"{project}/merge_requests/{variables['CI_MERGE_REQUEST_IID']}/notes"
    return Host(notes, notes, "PUT", {"PRIVATE-TOKEN": variables["FP8_GITLAB_TOKEN"]})


def post(folder: Path, variables: Mapping[str, str]) -> str:
    """Comment where this runs. Returns what was done."""
    file = folder / "comment.md"
    text = file.read_text() if file.is_file() else ""
    if not MARKER.fullmatch(text.partition("\n")[0]):
        return "there is no comment of fp8-harness to post"
    try:
        host = gitlab(variables) if "GITLAB_CI" in variables else github(variables)
        return "there is no pull request to comment on" if host is None else host.put(text)
    except urllib.error.HTTPError as error:
        why = "the token may not comment here" if error.code in DENIED else "the server refused"
        return f"no comment, {why} (HTTP {error.code}): see the job summary and the artifacts"
    except OSError as error:
        return f"no comment: {error}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(post(Path(name), os.environ))
