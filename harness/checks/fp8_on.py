"""Is FP8 on, exactly where the case asks for it? Converted linears, executed matmuls, the virtual device, refusals.

A matmul whose sizes the hardware does not support must raise the named error. If it trains, something else computed it
(a fallback, an emulation, a wrong shard). Refusing an aligned matmul is just as wrong.
"""

import re
from collections.abc import Iterator

from harness.checks.check import Rules, Stage, Witnesses, group_ranks, merge_ranks
from harness.expect.expectations import MATMULS, Expectations
from harness.matrix.case import Case
from harness.matrix.dims.pp import held
from harness.request import default_arithmetic
from harness.text import counted
from harness.trace import RankTrace, Run
from harness.verdict import Finding, Value

_TRANSPORTS = {"collectives", "gloo"}  # of the collectives on a CPU: the shared-memory backend, or torch's gloo

_rule = Rules(
    "fp8_on",
    Stage.MODEL,
    located=True,
    only={
        "a damaged trace": "no-rank twice no-step lacks-parts foreign-parts",
        "a case that asks for it": "converts-nothing filters",
    },
)
NO_RANK = _rule("no-rank", "no rank left a trace")
CONVERTS_NOTHING = _rule("converts-nothing", "the case asks for FP8 but converts no linear")
_OF_ALL = "{count} of {total:n linear|linears} "
NOT_CONVERTED = _rule("not-converted", f"{_OF_ALL}were not converted to FP8 on {{ranks}}: {{names}}")
CONVERTED = _rule("converted", f"{_OF_ALL}were converted to FP8 although excluded, on {{ranks}}: {{names}}")
TWICE = _rule("twice", f"{_OF_ALL}are recorded twice on {{ranks}}: {{names}}")
FILTERS = _rule("filters", "filter_fqns {entries} match no linear on {ranks}")
NOT_SCALED = _rule("not-scaled", "{ranks} ran without scaled matmuls")
SCALED = _rule("scaled", "{ranks} ran scaled matmuls although the case asks for none")
NO_STEP = _rule("no-step", "no step was recorded on {ranks}")
LACKS_PARTS = _rule("lacks-parts", "the virtual FP8 device lacks {parts} on {ranks}", key=("parts",))
FOREIGN_PARTS = _rule("foreign-parts", "parts of the virtual FP8 device are installed on {device} on {ranks}")


@_rule.judged_by(
    blind="A converted linear that computes in high precision inside its own code.",
    needs_linears=True,
)
def check_fp8_on(case: Case, run: Run, witnesses: Witnesses) -> Iterator[Finding]:
    """Is FP8 on, exactly where the case asks for it?"""
    fqns = witnesses.expect.converted_fqns
    if not run.traces:
        yield NO_RANK.finding(expected=counted(case.world_size, "rank"), found="0")
    elif case.float8.enabled and not fqns:
        yield CONVERTS_NOTHING.finding(expected="at least 1 linear", found="none")
    else:
        yield from _converted(case, run, fqns)
        wanted = "every entry of filter_fqns matches at least one linear"
        for entries, ranks in group_ranks(run, lambda trace: trace.unmatched_filters).items():
            if entries:
                yield FILTERS.finding(ranks=ranks, entries=", ".join(entries), expected=wanted)
        yield from _executed(case, run)
        yield from _virtual_device(case, run)


def _converted(case: Case, run: Run, converted: tuple[str, ...]) -> Iterator[Finding]:
    kinds = group_ranks(run, lambda trace: (tuple(sorted(trace.converted_fqns)), held(case, trace.rank, converted)))
    for (found, wanted_here), ranks in kinds.items():
        expected = set(wanted_here)
        for rule, fqns, wanted in (
            (NOT_CONVERTED, expected - set(found), "converted"),
            (CONVERTED, set(found) - expected, "not converted"),
            (TWICE, {fqn for fqn in found if found.count(fqn) > 1}, "once"),
        ):
            if fqns:
                names = sorted(fqns if len(fqns) < 3 else {fqn.rpartition(".")[2] for fqn in fqns})
                texts: dict[str, Value] = {"names": ", ".join(names), "fqns": ", ".join(sorted(fqns))}
                total = {"count": len(fqns), "total": len(expected | set(found))}
                yield rule.finding(ranks=ranks, module=min(fqns), expected=wanted, values=texts | total)


def _executed(case: Case, run: Run) -> Iterator[Finding]:
    """Yield ranks without scaled matmuls, or with them in BF16; their exact number is the check `matmuls`."""
    enabled = case.float8.enabled
    wrong = [trace.rank for trace in run.traces if any((step.scaled_mm_calls > 0) != enabled for step in trace.steps)]
    idle = [trace.rank for trace in run.traces if not trace.steps]
    if wrong:
        rule, expected = (NOT_SCALED, "at least 1") if enabled else (SCALED, "0")
        yield rule.finding(ranks=wrong, expected=expected)
    if idle:
        yield NO_STEP.finding(ranks=idle, expected="at least 1 step")


def _virtual_device(case: Case, run: Run) -> Iterator[Finding]:
    """The parts of the virtual device that the case needs must be installed, and none that its arithmetic rules out."""
    keys = group_ranks(run, lambda trace: (trace.device, trace.arithmetic, tuple(sorted(trace.virtual))))
    for (device, asked, parts), ranks in keys.items():
        exact = (asked or default_arithmetic(device)) == "exact"
        found = ", ".join(parts) or "nothing"
        needed, excluded = _parts(case, device, set(parts), exact=exact)
        if missing := ", ".join(sorted(needed - set(parts))):
            expected = ", ".join(sorted(needed))
            yield LACKS_PARTS.finding(ranks=ranks, parts=missing, expected=expected, found=found)
        if excluded:
            expected = "the exact scaled_mm alone" if exact else "nothing" if device != "cpu" else "no scaled_mm"
            yield FOREIGN_PARTS.finding(ranks=ranks, device=device, expected=expected, found=found)


def _parts(case: Case, device: str, parts: set[str], *, exact: bool) -> tuple[set[str], set[str]]:
    """Return what must be installed, and what of these parts must not: on a GPU all but the matmul asked for."""
    needed = {"scaled_mm"} if exact and case.float8.enabled else set[str]()
    if device != "cpu":
        return needed, parts - ({"scaled_mm"} if exact else set())
    if case.world_size > 1:
        needed |= _TRANSPORTS & parts or {"collectives"}
    if case.float8.traits.kernel != "float8":
        needed.add("casts")
    return needed, set() if exact else parts & {"scaled_mm"}


# The number of scaled matmuls

_matmuls = Rules("matmuls", Stage.EXECUTION)
NUMBER = _matmuls(
    "number", "wrong number of scaled matmuls at step {step}: {calls} instead of {wanted}", formula=MATMULS
)


def _not_counted(expect: Expectations, device: str) -> str:
    if expect.has_formulas or expect.case.compile == "none":
        return ""
    return "calls of linears are not counted in compiled runs; see `profile`"


@_matmuls.judged_by(
    blind="An extra matmul that hides a missing one; `scales` and `fp8_on` know their linears.",
    not_judged=_not_counted,
    formula=MATMULS,
    needs_linears=True,
)
def check_matmuls(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does every rank execute the expected number of scaled matmuls?"""

    def first_mismatch(trace: RankTrace) -> list[Finding]:
        fewest, most = witnesses.expect.of(trace.rank).scaled_mm_calls
        wanted = f"{most}" if fewest == most else f"{fewest} to {most}"
        for step in trace.steps:
            calls, expected = step.scaled_mm_calls, f"{wanted} calls a step"
            if not fewest <= calls <= most:
                found = f"{calls} calls"
                return [NUMBER.finding(step=step.step, expected=expected, found=found, calls=calls, wanted=wanted)]
        return []

    return merge_ranks(run, first_mismatch)


# torch's wording in the size checks of `_scaled_mm` (CUDA and meta registrations) and in its stride checks, and
# torchao's in its casts to MXFP8.
REFUSED = re.compile(r"divisible by (?:16\b|inner block size\b)|multiple of (?:16|32)\b")


_alignment = Rules(
    "alignment", Stage.MODEL, only={"an own target": "sizes", "a damaged trace": "other-error no-end none-refused"}
)
REFUSED_ALIGNED = _alignment("refused", "torch rejects the case on {ranks} although every matmul is aligned")
REFUSED_SIZES = _alignment(
    "sizes",
    "torch rejects the case on {ranks}: a size of a converted linear, or its tokens, is not a multiple of {multiple}",
)
TRAINED = _alignment("trained", "trained on {ranks} instead of raising the expected error ({refusal}: {reason})")
OTHER_ERROR = _alignment("other-error", "rank {rank} raised another error than the expected one ({refusal})")
NO_END = _alignment("no-end", "{ranks} neither trained nor failed")
NONE_REFUSED = _alignment("none-refused", "no rank raised the expected error: every failure follows from another one")


@_alignment.judged_by(
    blind="An error of a kernel whose limits differ from those that torch registers.", explains_failures=True
)
def check_alignment(case: Case, run: Run, witnesses: Witnesses) -> Iterator[Finding]:
    """Is a misaligned FP8 matmul refused, and only a misaligned one?"""
    refusal = witnesses.expect.refusal
    if refusal is None:
        refused = [failure for failure in run.causes if REFUSED.search(failure.message)]
        if refused:
            rule = REFUSED_ALIGNED if witnesses.expect.has_formulas else REFUSED_SIZES
            ranks, multiple = [failure.rank for failure in refused], case.float8.traits.multiple
            first, found = ranks[0], refused[0].message
            yield rule.finding(rank=first, ranks=ranks, expected="training", found=found, multiple=multiple)
        return
    expected, trained = f"an error: {refusal.reason}", [trace.rank for trace in run.traces]
    if trained:
        names = {"refusal": refusal.name, "reason": refusal.reason, "pattern": refusal.pattern}
        yield TRAINED.finding(ranks=trained, expected=expected, found="no error", values=names)
    # Ranks that failed on their own with another error. A rank stopped because of another one may report anything: with
    # uneven shards only some ranks hold a misaligned shard, and the others wait for them and are stopped.
    for failure in run.causes:
        if failure.kind != "raised" or not re.search(refusal.pattern, failure.message):
            found = f"{failure.kind}: {failure.message}"
            names = {"refusal": refusal.name, "pattern": refusal.pattern}
            yield OTHER_ERROR.finding(rank=failure.rank, expected=expected, found=found, values=names)
    yield from _no_outcome(case, run)


def _no_outcome(case: Case, run: Run) -> Iterator[Finding]:
    """Yield ranks that neither trained nor failed, and a run in which no rank failed on its own."""
    ended = {failure.rank for failure in run.failures} | {trace.rank for trace in run.traces}
    missing = set(range(case.world_size)) - ended
    if missing:
        yield NO_END.finding(ranks=missing, expected=f"{case.world_size} ranks with the expected error")
    elif run.failures and not run.causes:
        yield NONE_REFUSED.finding(expected="at least 1 rank with the expected error", found="0")
