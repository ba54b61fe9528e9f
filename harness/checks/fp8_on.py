"""Is FP8 on, exactly where the case asks for it? Converted linears, filters, executed matmuls, the virtual device."""

from __future__ import annotations

from functools import partial

from harness.checks.ranks import format_ranks, group_ranks
from harness.checks.witnesses import Witnesses
from harness.matrix.case import Case
from harness.plural import counted
from harness.request import default_arithmetic
from harness.trace import Run
from harness.verdict import Finding

NAME = "fp8_on"

_TRANSPORTS = {"collectives", "gloo"}  # of the collectives on a CPU: the shared fabric, or torch's gloo

_finding = partial(Finding, check=NAME)


def check_fp8_on(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Findings when the wrong linears are converted on any rank, or when FP8 is not used at all."""
    fqns = witnesses.expect.converted_fqns
    if not run.traces:
        return [_finding(message="no rank left a trace", expected=counted(case.world_size, "rank"), found="0")]
    if case.float8.enabled and not fqns:
        message = "the case asks for FP8 but converts no linear"
        return [_finding(message=message, expected="at least 1 linear", found="none")]
    return [
        *_converted(run, fqns),
        *_filters(run),
        *_executed(case, run),
        *_virtual_device(case, run),
    ]


def _converted(run: Run, expected: tuple[str, ...]) -> list[Finding]:
    """Exactly the expected linears, each once. One finding for every linear that is not as expected."""
    findings = []
    for found, ranks in group_ranks(run, lambda trace: tuple(sorted(trace.converted_fqns))).items():
        wrong = [
            *((fqn, "was not converted to FP8", "converted") for fqn in sorted(set(expected) - set(found))),
            *((fqn, "was converted to FP8", "not converted") for fqn in sorted(set(found) - set(expected))),
            *((fqn, "is recorded twice", "once") for fqn in sorted({fqn for fqn in found if found.count(fqn) > 1})),
        ]
        findings += [
            _finding(message=f"{fqn} {what} on {format_ranks(ranks)}", rank=ranks[0], module=fqn, expected=wanted)
            for fqn, what, wanted in wrong
        ]
    return findings


def _filters(run: Run) -> list[Finding]:
    return [
        _finding(
            message=f"filter_fqns {', '.join(entries)} match no linear on {format_ranks(ranks)}",
            rank=ranks[0],
            expected="every entry of filter_fqns matches at least one linear",
        )
        for entries, ranks in group_ranks(run, lambda trace: trace.unmatched_filters).items()
        if entries
    ]


def _executed(case: Case, run: Run) -> list[Finding]:
    """Scaled matmuls in every step of every rank, or none at all; their exact number is the check `matmuls`."""
    enabled = case.float8.enabled
    wrong = [trace.rank for trace in run.traces if any((step.scaled_mm_calls > 0) != enabled for step in trace.steps)]
    idle = [trace.rank for trace in run.traces if not trace.steps]
    findings = []
    if wrong:
        what = "ran without scaled matmuls" if enabled else "ran scaled matmuls although the case asks for none"
        expected = "at least 1" if enabled else "0"
        findings.append(_finding(message=f"{format_ranks(wrong)} {what}", rank=min(wrong), expected=expected))
    if idle:
        message = f"no step was recorded on {format_ranks(idle)}"
        findings.append(_finding(message=message, rank=min(idle), expected="at least 1 step"))
    return findings


def _virtual_device(case: Case, run: Run) -> list[Finding]:
    """The parts of the virtual device that the case needs must be installed, and none that its arithmetic rules out."""
    findings = []
    keys = group_ranks(run, lambda trace: (trace.device, trace.arithmetic, tuple(sorted(trace.virtual))))
    for (device, asked, parts), ranks in keys.items():
        exact = (asked or default_arithmetic(device)) == "exact"
        found = ", ".join(parts) or "nothing"
        needed = _needed(case, device, set(parts), exact=exact)
        if missing := ", ".join(sorted(needed - set(parts))):
            message = f"the virtual FP8 device lacks {missing} on {format_ranks(ranks)}"
            expected = ", ".join(sorted(needed))
            findings.append(_finding(message=message, rank=ranks[0], expected=expected, found=found))
        if _excluded(device, exact=exact, parts=set(parts)):
            message = f"parts of the virtual FP8 device are installed on {device} on {format_ranks(ranks)}"
            expected = "the exact scaled_mm alone" if exact else "nothing" if device != "cpu" else "no scaled_mm"
            findings.append(_finding(message=message, rank=ranks[0], expected=expected, found=found))
    return findings


def _needed(case: Case, device: str, parts: set[str], *, exact: bool) -> set[str]:
    transport = _TRANSPORTS & parts or {"collectives"}
    needed = transport if device == "cpu" and case.world_size > 1 else set()
    return needed | {"scaled_mm"} if exact and case.float8.enabled else needed


def _excluded(device: str, *, exact: bool, parts: set[str]) -> set[str]:
    """What must not be installed: on a GPU everything but the matmul that was asked for."""
    matmul = set() if exact else parts & {"scaled_mm"}
    return matmul if device == "cpu" else matmul | parts - {"scaled_mm"}
