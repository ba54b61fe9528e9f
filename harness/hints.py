"""The commands that messages suggest, one function each: what it prints works as it is, where it is printed."""

from __future__ import annotations

import shlex

_PROGRAM = "fp8-harness"


def rerun_failed(*, root: str | None) -> str:
    """Runs what was not good, or never ran, in the last run of a project."""
    return _command("run", *_root(root), "--rerun-failed")


def _root(root: str | None) -> tuple[str, ...]:
    """What the user gave as --root, if anything."""
    return () if root is None else ("--root", root)


def _command(*words: str) -> str:
    return shlex.join([_PROGRAM, *words])
