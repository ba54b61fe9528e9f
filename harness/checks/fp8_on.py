"""Is FP8 really on, exactly where the case says? Converted linears, filters, scaled matmuls, the virtual device."""

from __future__ import annotations

from harness.checks.ranks import by_value, rank_names
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case
from harness.trace import RankTrace, Run
from harness.verdict import Finding

NAME = "fp8_on"


def check_fp8_on(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Findings when a linear, a filter entry or a scaled matmul is missing or too much, on any rank and step."""
    fqns, calls = (witnesses.expected_fqns, witnesses.expected_scaled_mm) if case.float8.enabled else ((), 0)
    if not run.traces:
        return [_finding("no rank left a trace: nothing was compared", expected=f"{case.world_size} ranks", found="0")]
    if case.float8.enabled and not (fqns and calls):
        return [_finding("the case asks for FP8 but converts no linear", expected="at least 1 linear", found="none")]
    return [
        *_converted(run, fqns),
        *_filters(run),
        *_calls(run, calls),
        *_virtual(case, run),
    ]


def _converted(run: Run, expected: tuple[str, ...]) -> list[Finding]:
    """Exactly the expected linears, each once. One finding for every linear that is not as expected."""
    findings = []
    for found, ranks in by_value(run, lambda trace: tuple(sorted(trace.converted_fqns))).items():
        wrong = [
            *((fqn, "was not converted to FP8", "converted") for fqn in sorted(set(expected) - set(found))),
            *((fqn, "was converted to FP8", "not converted") for fqn in sorted(set(found) - set(expected))),
            *((fqn, "is recorded twice", "once") for fqn in sorted({fqn for fqn in found if found.count(fqn) > 1})),
        ]
        findings += [
            Finding(
                check=NAME, message=f"{fqn} {what} on {rank_names(ranks)}", rank=ranks[0], module=fqn, expected=promised
            )
            for fqn, what, promised in wrong
        ]
    return findings


def _filters(run: Run) -> list[Finding]:
    return [
        _finding(
            f"filter entries {', '.join(entries)} match no linear on {rank_names(ranks)}",
            ranks[0],
            expected="every entry of filter_fqns names at least one linear",
        )
        for entries, ranks in by_value(run, lambda trace: trace.unmatched_filters).items()
        if entries
    ]


def _calls(run: Run, expected: int) -> list[Finding]:
    """The first step with a wrong number of scaled matmuls, once for every group of ranks that agree."""

    def first_wrong(trace: RankTrace) -> tuple[int, int] | None:
        return next(
            ((step.step, step.scaled_mm_calls) for step in trace.steps if step.scaled_mm_calls != expected), None
        )

    findings = [
        Finding(
            check=NAME,
            message=f"{wrong[1]} scaled matmuls at step {wrong[0]} on {rank_names(ranks)}, expected {expected}",
            step=wrong[0],
            rank=ranks[0],
            expected=f"{expected} calls a step",
            found=f"{wrong[1]} calls",
        )
        for wrong, ranks in by_value(run, first_wrong).items()
        if wrong is not None
    ]
    idle = [trace.rank for trace in run.traces if not trace.steps]
    if idle:
        findings.append(_finding(f"no step was counted on {rank_names(idle)}", min(idle), expected="at least 1 step"))
    return findings


def _virtual(case: Case, run: Run) -> list[Finding]:
    """On CPU the stand-ins that the case needs must be in place; on a GPU there must be none."""
    needed = {"collectives"} if case.world_size > 1 else set()
    if case.float8.enabled:
        needed.add("scaled_mm")
    findings = []
    for (device, parts), ranks in by_value(run, lambda trace: (trace.device, tuple(sorted(trace.virtual)))).items():
        found = ", ".join(parts) or "nothing"
        if device == "cpu" and not needed <= set(parts):
            lacking = ", ".join(sorted(needed - set(parts)))
            message = f"the virtual FP8 device lacks {lacking} on {rank_names(ranks)}"
            findings.append(_finding(message, ranks[0], ", ".join(sorted(needed)), found))
        if device != "cpu" and parts:
            message = f"parts of the virtual FP8 device replace the real one on {rank_names(ranks)} ({device})"
            findings.append(_finding(message, ranks[0], "nothing is replaced", found))
    return findings


def _finding(message: str, rank: int | None = None, expected: str | None = None, found: str | None = None) -> Finding:
    return Finding(check=NAME, message=message, rank=rank, expected=expected, found=found)
