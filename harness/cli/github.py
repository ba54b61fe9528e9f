"""What `--github` adds to a run: annotations and the summary of the job."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import click

from harness.report.ci import annotation_lines, job_summary
from harness.result import RunResult

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"  # the file that GitHub makes the summary of


@contextlib.contextmanager
def workflow_commands_off(file: TextIO, *, on: bool) -> Iterator[None]:
    """Keep the runner from reading printed text, such as output of ranks, as workflow commands; no-op unless `on`."""
    token = secrets.token_hex(16)
    if on:
        click.echo(f"::stop-commands::{token}", file=file)
    try:
        yield
    finally:
        if on:
            click.echo(f"::{token}::", file=file)


def report_to_github(result: RunResult, file: TextIO) -> None:
    """Print the annotations, and append to the summary where GitHub wants one."""
    click.echo(annotation_lines(result), nl=False, file=file)
    path = os.environ.get(SUMMARY_VARIABLE)
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as summary:
            summary.write(job_summary(result))
    except OSError as error:
        click.echo(f"fp8-harness: warning: {path}: no job summary written: {error.strerror}.", err=True)
