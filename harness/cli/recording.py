"""What commands that record evidence want first: a reason, and a tree that is committed."""

import shlex

import click

from harness.errors import HarnessError
from harness.evidence.golden import changed_files
from harness.project import Project
from harness.text import counted

_NAMED_FILES = 5  # of those that differ from the commit


def require_reason(reason: str | None, where: str, made: str) -> str:
    """Return the given reason. Raises `HarnessError` before the run where there is none."""
    if not reason or not reason.strip():
        raise HarnessError("--reason is missing.", where=where, fix=f'add --reason "why the {made} change".')
    return reason


def check_committed(project: Project, made: str, *, allowed: bool) -> None:
    """Raise `HarnessError` before the run if the tree differs from its commit; only warn if `allowed`."""
    changed = changed_files(project.root)
    if not changed:
        return
    more = f" and {len(changed) - _NAMED_FILES} more" if len(changed) > _NAMED_FILES else ""
    names = ", ".join(changed[:_NAMED_FILES]) + more
    differ = "differs" if len(changed) == 1 else "differ"
    what = f"{counted(len(changed), 'tracked file')} {differ} from the commit: {names}."
    why = f"nobody can check out the code of these {made}"
    if not allowed:
        stash = shlex.join(["git", "-C", str(project.root), "stash"])
        fix = f"commit the changes, put them aside by `{stash}`, or give --allow-dirty."
        raise HarnessError(f"{what} So {why}.", where=str(project.root), fix=fix)
    click.echo(f'fp8-harness: warning: {project.root}: {what} The provenance ends in "-dirty": {why}.', err=True)
