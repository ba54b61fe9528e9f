"""Writes what an export consists of: the script, planted faults as files, and what was found for the draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.bugs.export.fault import exported_fault
from harness.bugs.export.script import Script, script
from harness.bugs.named_case import NamedCase
from harness.bugs.shrink import Attempt
from harness.durable import write_whole
from harness.errors import HarnessError
from harness.matrix.caseid import case_id
from harness.matrix.faults import PREFIX
from harness.result import CaseResult
from harness.running.injection import Injection
from harness.verdict import FailureSignature, Finding


class Exported(NamedTuple):
    """A script that was written, and what it is about."""

    title: str
    case_id: str
    signature: FailureSignature
    finding: Finding | None  # the first; None for a refusal that torch must raise
    script: Script
    file: Path
    patches: tuple[str, ...]  # FILE.py:FUNCTION of what makes the case fail


class _Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    needed: tuple[Attempt, ...]


def export(named: NamedCase, result: CaseResult, injections: Sequence[Injection], folder: Path) -> Exported:
    """Write the script of a case that failed, and the planted faults that make it fail. HarnessError if it did not."""
    case, signature = named.case, result.failure_signature
    if signature is None:
        raise HarnessError(
            "it does not fail, so there is nothing to export.",
            where=case_id(case),
            fix="give the case, and by --inject the fault, with which it fails.",
        )
    title = named.bug.bug.title if named.bug is not None else _title(signature, result)
    checks = {finding.check for finding in result.findings if finding.judged}
    made = script(case, signature, title=title, checks=checks)
    file = folder / f"{named.bug.id if named.bug is not None else case_id(case)}.py"
    patches = tuple(_patch(injection, folder) for injection in injections)
    write_whole(file, made.text.encode())
    return Exported(title, case_id(case), signature, next(iter(result.findings), None), made, file, patches)


def read_neighbours(path: Path) -> tuple[Attempt, ...]:
    """The cases next to the smallest one in the JSON of `bug shrink`. HarnessError for another file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Shrunk, strict=False).needed
    except (OSError, msgspec.DecodeError) as error:
        fix = "give what `bug shrink` wrote by --json FILE.json."
        raise HarnessError(f"cannot read: {error}.", where=f"--shrunk {path}", fix=fix) from error


def _patch(injection: Injection, folder: Path) -> str:
    """FILE.py:FUNCTION that does the same as an injection; of a planted fault, a new file in `folder`."""
    if not injection.text.startswith(PREFIX):
        return injection.target
    fault = injection.text.removeprefix(PREFIX)
    write_whole(folder / f"{fault}.py", exported_fault(fault).encode())
    return f"{folder / fault}.py:{fault}"


def _title(signature: FailureSignature, result: CaseResult) -> str:
    if not signature.check:
        return signature.what
    return next(finding.first_line for finding in result.findings if finding.judged)
