"""One version of a package: `bug repro` in its environment, and what that says.

The first version that fails decides what is looked for: all others must fail alike (`--like`).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.bugs.bisect import Answer, VersionAnswer
from harness.bugs.journal import key_of
from harness.bugs.reproduce import Reproduced
from harness.matrix.case import Case
from harness.matrix.caseid import case_id
from harness.project import Project
from harness.running.versions import NotInstalled, Versions
from harness.sources import source_digest

_TRIAL_S = 1800.0  # of one case and its witnesses
_HARNESS = Path(__file__).parents[1]
_NOT_IMPORTED = re.compile(r"ModuleNotFoundError|ImportError")
_ANSWERS: dict[int, Answer] = {0: "good", 1: "bad"}


class VersionTrial:
    """Runs one case with versions of one package by `bug repro CASE_WORD WORDS`."""

    def __init__(
        self, project: Project, case_word: str, case: Case, versions: Versions, *, words: Sequence[str] = ()
    ) -> None:
        self._case_word, self._versions, self._words = case_word, versions, tuple(words)
        self._folder = project.state / "versions"
        # What the answers depend on besides the version: the case, the injections, and the harness itself.
        self.depends_on = (case_id(case), versions.package, *words, source_digest(_HARNESS, _HARNESS.rglob("*.py")))

    def run(self, version: str) -> VersionAnswer:
        """Install the version and run the case with it. A version that tells nothing is skipped, with the reason."""
        try:
            return self._repro(self._versions.environment(version).python, version)
        except NotInstalled as error:
            return VersionAnswer(version=version, answer="skipped", why=f"not installed: {error}")
        except subprocess.TimeoutExpired as error:
            return VersionAnswer(version=version, answer="skipped", why=f"took longer than {error.timeout:.0f} s")

    def _repro(self, python: Path, version: str) -> VersionAnswer:
        """What `bug repro --exit-code` answers, and what it says."""
        self._folder.mkdir(parents=True, exist_ok=True)
        result = self._folder / f"{self._versions.package}-{version}.json"
        first = self._folder / f"{key_of(self.depends_on)}.json"
        result.unlink(missing_ok=True)
        like = ("--like", str(first)) if first.exists() else ()
        repro = ("-m", "harness", "bug", "repro", self._case_word, "--exit-code", "-q", "--json", str(result))
        done = subprocess.run(
            [str(python), *repro, *like, *self._words], capture_output=True, text=True, timeout=_TRIAL_S, check=False
        )
        if not result.exists():
            errors = [line for line in done.stderr.splitlines() if line.strip()]
            why = errors[-1] if errors else f"it ended with {done.returncode}"
            return VersionAnswer(version=version, answer="skipped", why=why)
        found = msgspec.json.decode(result.read_bytes(), type=Reproduced).found
        if found.signature is not None and _NOT_IMPORTED.match(found.signature.what):
            why = f"not imported: {found.signature.what}"
            return VersionAnswer(version=version, answer="skipped", why=why)
        answer = _ANSWERS.get(done.returncode, "skipped")
        if answer == "bad" and not like:
            first.write_bytes(result.read_bytes())
        return VersionAnswer(version=version, answer=answer, why=found.text, says=found.message)
