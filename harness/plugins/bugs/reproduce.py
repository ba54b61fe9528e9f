"""Does a case show the bug that was reported? Told by the signature of its failure, never by its numbers.

Where the bug file has a signature, the failure must have the same. Where it has none, as after an import, the failure
must be of the reported kind: a crash with the words of the reported error, a hang, NaN, wrong numbers.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from harness.checks.failure_signature import normalized
from harness.matrix.axes import axis_values
from harness.matrix.records import KnownFault
from harness.plugins.bugs.bugfile import Bug
from harness.plugins.bugs.trials import NamedCase, TrialResult
from harness.text import counted
from harness.verdict import ExitCode, FailureSignature, Finding, Verdict

Answer = Literal["reproduced", "another failure", "not reproduced", "cannot tell"]

CANNOT_TELL = 125  # for `git bisect run`: skip this commit
_SHARE = 0.5  # of the words of a reported error that must be in the one that is found
_MEMORY = ("memory", "live_memory", "leaks")
# The checks by which each kind of symptom shows itself; None: any check.
_SHOWN_BY: dict[str, tuple[str, ...] | None] = {
    "nan": ("finite",),
    "wrong_numbers": None,
    "diverges": None,
    "unknown": None,
    "memory": _MEMORY,
    "traffic": ("traffic", "signature"),
    "slow": ("traffic", "matmuls", "recompute", "graphs", "fp8_on", *_MEMORY),
    "metric": ("parity", "loss_vs_golden", "finite"),
    "not_converted": ("fp8_on", "matmuls", "model", "graphs", "scales"),
}
_WORD = re.compile(r"[A-Za-z_]{3,}")


class Reproduced(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, with what was expected and found side by side, and what differs from the report.

    `known`: the recorded upstream faults that show, by name, each with its reason and how much it explains.
    """

    answer: Answer
    expected: str
    found: TrialResult
    known: Mapping[str, str]
    differs: tuple[str, ...]

    @property
    def bisect_code(self) -> int:
        """The exit code that `git bisect run` wants: 0 the bug is gone, 1 it is there, 125 cannot tell."""
        return {"reproduced": 1, "not reproduced": 0}.get(self.answer, CANNOT_TELL)

    @property
    def exit_code(self) -> int:
        """As of a run: 0 nothing fails, 1 something does, 4 the machine failed."""
        if self.answer == "cannot tell":
            return ExitCode.INFRA
        return ExitCode.GOOD if self.answer == "not reproduced" else ExitCode.FAILED


def reproduced(
    named: NamedCase,
    found: TrialResult,
    *,
    installed: Mapping[str, str],
    device: str,
    like: FailureSignature | None = None,
    known: Mapping[str, str] = {},
) -> Reproduced:
    """The answer for one run of a case. `like`: the signature to look for instead of the bug file's."""
    bug = named.bug.bug if named.bug is not None else None
    expected = like or (bug.signature if bug is not None else None)
    return Reproduced(
        answer=_answer(found, expected, bug),
        expected=expected.text if expected is not None else _as_reported(bug),
        found=found,
        known=known,
        differs=_differences(named, installed, device),
    )


def _answer(found: TrialResult, expected: FailureSignature | None, bug: Bug | None) -> Answer:
    if not found.decided:
        return "cannot tell"
    if found.signature is None:
        return "not reproduced"
    if expected is not None and alike(found.signature, expected):
        return "reproduced"
    if expected is not None:  # a case that only differs from an unverified formula breaks nothing that hides a failure
        return "not reproduced" if found.verdict is Verdict.CHANGED else "another failure"
    return "reproduced" if bug is None or shows(bug, found.signature) else "another failure"


def known_in(findings: Sequence[Finding], faults: Sequence[KnownFault]) -> Mapping[str, str]:
    """Those of the recorded faults that show, by name, with reason, link and what of the findings they leave open."""
    shown = [fault for fault in faults if fault.shows(findings)]
    left = sum(not any(fault.explains(finding) for fault in shown) for finding in findings)
    rest = f"; {counted(left, 'finding')} of {len(findings)} not explained by it" if left else ""
    return {fault.name: f"{fault.reason} ({fault.link}){rest}" for fault in shown}


def alike(one: FailureSignature, other: FailureSignature) -> bool:
    """True for equal signatures, and for a crash with the same exception: its calls move between versions of torch."""
    if one.kind == "crash":
        one, other = (msgspec.structs.replace(signature, where=()) for signature in (one, other))
    return one == other


def shows(bug: Bug, signature: FailureSignature) -> bool:
    """True when a failure is of the reported kind; of a crash with a message, when it has the words of it."""
    if bug.symptom == "hang":  # on the virtual device, ranks that call different collectives raise instead
        return signature.kind == "hang" or "CollectiveMismatch" in signature.what
    if bug.symptom in ("crash", "unknown") and signature.kind == "crash":
        words = set(_WORD.findall(normalized(bug.message)))
        return not words or len(words & set(_WORD.findall(signature.what))) >= _SHARE * len(words)
    if bug.symptom == "crash" or signature.kind in ("crash", "hang"):
        return False
    checks = _SHOWN_BY[bug.symptom]
    return checks is None or signature.check in checks


def _as_reported(bug: Bug | None) -> str:
    if bug is None:
        return "any failure"
    return f"{bug.symptom.replace('_', ' ')}{f': {bug.message}' if bug.message else ''}"


def _differences(named: NamedCase, installed: Mapping[str, str], device: str) -> tuple[str, ...]:
    """What the run has otherwise than the report: versions, device, sizes."""
    if named.bug is None:
        return ()
    bug, now = named.bug.bug, axis_values(named.case)
    versions = [
        f"{package}: {version} reported, {installed.get(package, 'not installed')} here"
        for package, version in bug.versions.items()
        if installed.get(package) != version
    ]
    hardware = [f"hardware: {bug.hardware} reported, {device} here"] if bug.hardware else []
    sizes = [f"{name}: {size} reported, {now[name]} here" for name, size in named.bug.full_size.items()]
    return (*versions, *hardware, *sizes)
