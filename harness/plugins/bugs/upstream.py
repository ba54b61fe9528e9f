"""Drafts for the trackers of torch, torchao and others: a record for each mechanism, `cases/upstream/NAME.toml`.

    title = "..."                    # what somebody with the symptom searches for
    link = "https://..."             # optional: where it is reported; the draft is a comment there
    symptom = "..."                  # what is wrong, in numbers
    cause = "..."
    at = ["https://.../FILE#L1-L9"]  # permalinks to the lines at fault
    affects = "..."                  # who
    output = "..."                   # what the script prints
    remedy = "..."                   # what avoids it; optional beside a patch
    fix = "cases/fixes/x.py:apply"   # optional: with it the script shows nothing; without it the patch does that
    faults = ["..."]                 # optional: the records of cases/known.toml with this cause
    needs = ["accelerate"]           # optional: packages beside torch and torchao that the script imports

NAME.py needs nothing of this project. It prints what is expected and what it found, and exits with 1 where the fault
shows. NAME.patch changes the sources.
"""

import subprocess
import sys
from pathlib import Path

import msgspec

from harness.matrix.tomlfile import read_toml_file
from harness.project import Project
from harness.sources import installed_version

_TIMEOUT_S = 600.0
_TOLD = ("PyTorch version", "CUDA used to build", "OS:", "Python version", "Is CUDA available", "[pip3] torch")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One mechanism, its script and the change of the sources, "" where there is none."""

    title: str
    symptom: str
    cause: str
    affects: str
    output: str
    at: tuple[str, ...]
    link: str = ""
    remedy: str = ""
    fix: str = ""
    faults: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    script: Path = Path()
    patch: str = ""

    @property
    def name(self) -> str:
        return self.script.stem

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the packages that the script needs and that are not installed."""
        return tuple(package for package in self.needs if installed_version(package) is None)


def read_records(project: Project) -> tuple[Record, ...]:
    """Return the records of the package and of a project, by name. HarnessError with the line for anything invalid."""
    folders = dict.fromkeys((project.shipped, project.root))
    paths = {path.name: path for root in folders for path in (root / "cases" / "upstream").glob("*.toml")}
    return tuple(_record(paths[name]) for name in sorted(paths))


def _record(path: Path) -> Record:
    toml, patch = read_toml_file(path), path.with_suffix(".patch")
    record = toml.record(Record, toml.data)
    if not record.remedy and not patch.exists():
        raise toml.error(what="it has neither a patch nor a remedy.", fix=f"add {patch.name}, or remedy.")
    change = patch.read_text(encoding="utf-8") if patch.exists() else ""
    return msgspec.structs.replace(record, script=path.with_suffix(".py"), patch=change)


def record_named(project: Project, name: str) -> Record | None:
    """Return the record of this name, or of this recorded fault; None where there is none."""
    return next((record for record in read_records(project) if name in (record.name, *record.faults)), None)


def run_script(record: Record) -> tuple[int, str]:
    """Return the exit code of the script, and what it printed."""
    done = subprocess.run(
        [sys.executable, str(record.script)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    return done.returncode, done.stdout.strip()


def draft(record: Record) -> str:
    """Return the issue, or the comment, as Markdown, with the environment as torch's own report tells it."""
    command = [sys.executable, "-m", "torch.utils.collect_env"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    versions = [line for line in told if line.startswith(_TOLD)]
    versions += [f"{package} {installed_version(package) or '(not installed here)'}" for package in record.needs]
    script, patch = record.script.read_text(encoding="utf-8"), f"```diff\n{record.patch}```\n\n" * bool(record.patch)
    parts = {
        "Describe the bug": record.symptom,
        "Reproduce": f"```python\n{script}```\n\nIt exits with code 1 and prints:\n\n```\n{record.output.strip()}\n```",
        "Cause": "\n".join((record.cause.strip(), "", *(f"- {link}" for link in record.at))),
        "Who is affected": record.affects,
        "Fix": f"{patch}{record.remedy}",
        "Versions": "\n".join(("```", *versions, "```", "", "Reproduced on CPU only; it was not run on a GPU.")),
    }
    head = f"Comment on {record.link}" if record.link else f"# {record.title}"
    return "\n\n".join((head, *(f"### {title}\n\n{text.strip()}" for title, text in parts.items()))) + "\n"
