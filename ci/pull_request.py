"""Compares the layouts of a pull request with those of its base, and tells the CI system where this runs.

`ci/pull-request.sh` calls it in the folder of the project. It writes `fp8-parity/`: outcome.json, table.json and
run.json, of which `ci/comment.py` makes the comment in another job; report.html, junit.xml, and code-quality.json for
GitLab. GitHub gets a job summary and an annotation, Buildkite an annotation of the build. It ends with the exit code of
`parity`. Variables:

FP8_TARGET, FP8_LAYOUTS, FP8_RECIPE, FP8_DTYPE, FP8_BUDGET_S: options of `parity`, of which only the target is needed
FP8_OPTIONS: other options of `parity`
FP8_BASE: revision to compare with, from where the histories part; without it there is no comparison
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from comment import OUTCOME, RUN, TABLE, comment, title_of
from comment import Outcome as Ended
from source_lines import Place, built_at, changed_at, made_at, raised_at, sources

from harness.errors import HarnessError
from harness.jsonform import to_json
from harness.project import is_project
from harness.report.case import headline
from harness.report.ci import annotation
from harness.report.sections import Verbatim, markdown
from harness.result import CaseResult
from harness.running.stored import read_results
from harness.verdict import ExitCode

FOLDER = Path("fp8-parity")
_FILES = {"json": TABLE, "html": "report.html", "junit": "junit.xml"}
_OUTPUTS = {f"--{name}": FOLDER / file for name, file in _FILES.items()}


@dataclass(frozen=True)
class Outcome:
    """How `parity` ended. `wrong`: layouts, those that were right before first; `case`: the result of the first.

    `since`: the commit in which that one was right.
    """

    code: int
    said: str
    wrong: Sequence[str] = ()
    case: CaseResult | None = None
    since: str = ""

    @property
    def title(self) -> str:
        """What reviewers read first."""
        if self.wrong:
            return f"{', '.join(self.wrong)} {'are' if len(self.wrong) > 1 else 'is'} wrong"
        return title_of(self.code)

    @property
    def message(self) -> str:
        """What is wrong first, on one line."""
        if self.case is not None:
            return f"{self.case.case_id}: {headline(self.case)}"
        return self.said.strip().rpartition("\n")[2]


def main(variables: Mapping[str, str]) -> int:
    """Write the files, tell, and return the exit code."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    for path in (*_OUTPUTS.values(), FOLDER / RUN):
        path.unlink(missing_ok=True)
    _make_project()
    base = merge_base(variables.get("FP8_BASE", ""))
    outcome = parity(_asked(variables), base)
    ended = Ended(target=variables["FP8_TARGET"], exit_code=outcome.code, base=base)
    (FOLDER / OUTCOME).write_bytes(to_json(ended))
    head = variables.get("FP8_HEAD") or _git("rev-parse", "HEAD")
    text = comment(FOLDER, head=head, page=_page(variables))
    if not (FOLDER / TABLE).exists():
        text += markdown([Verbatim("\n".join(outcome.said.splitlines()[-20:]), "text")])
    tell(outcome, text, variables)
    return outcome.code


def _make_project() -> None:
    """`parity` needs nothing stored, but a place for it."""
    if not any(map(is_project, (Path.cwd(), *Path.cwd().parents))):
        for name in ("cases", "golden"):
            Path(name).mkdir(exist_ok=True)


def merge_base(revision: str) -> str:
    """The commit from which HEAD and this revision part. HarnessError if the clone lacks it."""
    if not revision:
        return ""
    done = subprocess.run(["git", "merge-base", "HEAD", revision], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        fix = "check out the whole history: `fetch-depth: 0` on GitHub, `GIT_DEPTH: 0` on GitLab."
        raise HarnessError(f"no common commit of HEAD and {revision} is here.", where="FP8_BASE", fix=fix)
    return done.stdout.strip()


def _asked(variables: Mapping[str, str]) -> list[str]:
    names = ("target", "layouts", "recipe", "dtype", "budget-s")
    values = {name: variables.get(f"FP8_{name.upper().replace('-', '_')}") for name in names}
    given = [word for name, value in values.items() if value for word in (f"--{name}", value)]
    return [*given, *shlex.split(variables.get("FP8_OPTIONS", ""))]


def parity(asked: Sequence[str], base: str) -> Outcome:
    """Run it, and write all files but the comment."""
    against = ("--against", base) if base else ()
    words = [word for name, path in _OUTPUTS.items() for word in (name, str(path))]
    code, said = _run("-q", "parity", *asked, *against, *words)
    if not _OUTPUTS["--json"].exists():
        return Outcome(code, said)
    results = FOLDER / RUN
    _run("show", "last", "--no-github", "--json", str(results))
    rows = [row for row in json.loads(_OUTPUTS["--json"].read_text())["rows"] if row["word"] == "wrong"]
    rows.sort(key=lambda row: row.get("change") == "wrong in both")
    cases = {result.case_id: result for result in read_results(results).results}
    first = cases.get(rows[0]["case_id"]) if rows else None
    since = base if rows and rows[0].get("change") != "wrong in both" else ""
    return Outcome(code, said, [row["layout"] for row in rows], first, since)


def _run(*words: str) -> tuple[int, str]:
    """The exit code of a command of `fp8-harness`, and what it printed, which goes to the log of the job as well."""
    print(shlex.join(("fp8-harness", *words)), flush=True)
    command = [sys.executable, "-P", "-m", "harness", *words]  # -P: a folder harness/ of the project is not ours
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout, flush=True)
    return done.returncode, done.stdout


def _page(variables: Mapping[str, str]) -> str:
    if "GITHUB_RUN_ID" in variables:
        names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
        return "{}/{}/actions/runs/{}".format(*(variables[name] for name in names))
    return variables.get("CI_PIPELINE_URL") or variables.get("BUILDKITE_BUILD_URL") or ""


def tell(outcome: Outcome, text: str, variables: Mapping[str, str]) -> None:
    """What the CI system shows besides the comment and the files of the job."""
    place = None if outcome.case is None else place_of(outcome.case, variables["FP8_TARGET"], outcome.since)
    if "GITHUB_ACTIONS" in variables:
        file, line = ("", 0) if place is None else (place.file, place.line)
        if outcome.code != ExitCode.GOOD:
            print(annotation(f"FP8 parity: {outcome.title}", outcome.message, file=file, line=line))
        with Path(variables["GITHUB_STEP_SUMMARY"]).open("a") as summary:
            summary.write(text)
    if "GITLAB_CI" in variables:
        issues = [] if place is None else [_code_quality(outcome.message, place)]
        (FOLDER / "code-quality.json").write_text(json.dumps(issues))
    if "BUILDKITE" in variables:
        style = "success" if outcome.code == ExitCode.GOOD else "error" if outcome.wrong else "warning"
        command = ["buildkite-agent", "annotate", "--context", "fp8-harness", "--style", style]
        subprocess.run(command, input=text, text=True, check=True)


def place_of(wrong: CaseResult, target: str, since: str = "") -> Place | None:
    """The line that raised, changed since that commit, makes the wrong module, or builds the target."""
    files = sources()
    raised = (raised_at(failure.traceback, files) for failure in wrong.failures)
    module = wrong.findings[0].module if wrong.findings else None
    made = made_at(module or "", files) or built_at(target, files)
    changed = changed_at(since, files, made.file if made else "") if since else None
    place = next(filter(None, raised), None) or changed or made
    return None if place is None else Place(_git("rev-parse", "--show-prefix") + place.file, place.line)


def _code_quality(message: str, place: Place) -> Mapping[str, object]:
    """What GitLab shows at a line of a merge request."""
    fingerprint = hashlib.sha256(f"{message} {place}".encode()).hexdigest()
    location = {"path": place.file, "lines": {"begin": place.line}}
    texts = {"description": message, "check_name": "fp8-harness", "severity": "major", "fingerprint": fingerprint}
    return {**texts, "location": location}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    try:
        sys.exit(main(os.environ))
    except HarnessError as error:
        print(f"ci/pull_request.py: {error.text}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
