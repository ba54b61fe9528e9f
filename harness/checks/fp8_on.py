"""Is FP8 on, exactly where the case asks for it? Converted linears, filters, executed matmuls, the virtual device."""

from __future__ import annotations

from harness.checks.check import Check
from harness.checks.ranks import group_ranks
from harness.checks.rule import Rules, Stage
from harness.checks.witnesses import Witnesses
from harness.matrix.case import Case
from harness.plural import counted
from harness.request import default_arithmetic
from harness.trace import Run
from harness.verdict import Finding

NAME = "fp8_on"

_TRANSPORTS = {"collectives", "gloo"}  # of the collectives on a CPU: the shared fabric, or torch's gloo


_rule = Rules("fp8_on")
NO_RANK = _rule("no-rank", Stage.MODEL, "no rank left a trace", located=True)
CONVERTS_NOTHING = _rule("converts-nothing", Stage.MODEL, "the case asks for FP8 but converts no linear", located=True)
NOT_CONVERTED = _rule("not-converted", Stage.MODEL, "{module} was not converted to FP8 on {ranks}", located=True)
CONVERTED = _rule("converted", Stage.MODEL, "{module} was converted to FP8 on {ranks}", located=True)
TWICE = _rule("twice", Stage.MODEL, "{module} is recorded twice on {ranks}", located=True)
FILTERS = _rule("filters", Stage.MODEL, "filter_fqns {entries} match no linear on {ranks}", located=True)
NOT_SCALED = _rule("not-scaled", Stage.MODEL, "{ranks} ran without scaled matmuls", located=True)
SCALED = _rule("scaled", Stage.MODEL, "{ranks} ran scaled matmuls although the case asks for none", located=True)
NO_STEP = _rule("no-step", Stage.MODEL, "no step was recorded on {ranks}", located=True)
LACKS_PARTS = _rule(
    "lacks-parts", Stage.MODEL, "the virtual FP8 device lacks {parts} on {ranks}", key=("parts",), located=True
)
FOREIGN_PARTS = _rule(
    "foreign-parts", Stage.MODEL, "parts of the virtual FP8 device are installed on {device} on {ranks}", located=True
)


def check_fp8_on(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Findings when the wrong linears are converted on any rank, or when FP8 is not used at all."""
    fqns = witnesses.expect.converted_fqns
    if not run.traces:
        return [NO_RANK.finding(expected=counted(case.world_size, "rank"), found="0")]
    if case.float8.enabled and not fqns:
        return [CONVERTS_NOTHING.finding(expected="at least 1 linear", found="none")]
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
            *((fqn, NOT_CONVERTED, "converted") for fqn in sorted(set(expected) - set(found))),
            *((fqn, CONVERTED, "not converted") for fqn in sorted(set(found) - set(expected))),
            *((fqn, TWICE, "once") for fqn in sorted({fqn for fqn in found if found.count(fqn) > 1})),
        ]
        findings += [rule.finding(ranks=ranks, module=fqn, expected=wanted) for fqn, rule, wanted in wrong]
    return findings


def _filters(run: Run) -> list[Finding]:
    return [
        FILTERS.finding(
            ranks=ranks,
            entries=", ".join(entries),
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
        rule, expected = (NOT_SCALED, "at least 1") if enabled else (SCALED, "0")
        findings.append(rule.finding(ranks=wrong, expected=expected))
    if idle:
        findings.append(NO_STEP.finding(ranks=idle, expected="at least 1 step"))
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
            expected = ", ".join(sorted(needed))
            findings.append(LACKS_PARTS.finding(ranks=ranks, parts=missing, expected=expected, found=found))
        if _excluded(device, exact=exact, parts=set(parts)):
            expected = "the exact scaled_mm alone" if exact else "nothing" if device != "cpu" else "no scaled_mm"
            findings.append(FOREIGN_PARTS.finding(ranks=ranks, device=device, expected=expected, found=found))
    return findings


def _needed(case: Case, device: str, parts: set[str], *, exact: bool) -> set[str]:
    transport = _TRANSPORTS & parts or {"collectives"}
    needed = transport if device == "cpu" and case.world_size > 1 else set()
    return needed | {"scaled_mm"} if exact and case.float8.enabled else needed


def _excluded(device: str, *, exact: bool, parts: set[str]) -> set[str]:
    """What must not be installed: on a GPU everything but the matmul that was asked for."""
    matmul = set() if exact else parts & {"scaled_mm"}
    return matmul if device == "cpu" else matmul | parts - {"scaled_mm"}


CHECK = Check(
    name=NAME,
    question="Is FP8 on, exactly where the case asks for it?",
    blind="A linear that is converted and called, and computes in high precision inside of its own code.",
    function=check_fp8_on,
    rules=_rule.declared,
    needs_linears=True,
)
