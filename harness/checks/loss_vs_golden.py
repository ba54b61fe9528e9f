"""Does the run learn what BF16 learns? The loss of every step against the stored single-rank golden.

First everything that would make the comparison worthless (no golden, other data, other hardware, ranks that disagree,
nothing learned), then the comparison.
"""

from __future__ import annotations

import math

import msgspec

from harness.checks.ranks import by_value, ordered, rank_names
from harness.checks.witnesses import Witnesses
from harness.measured.golden import Golden, hardware_class, update_command
from harness.measured.tolerance import MEASURE, Tolerance
from harness.spec.case import Case
from harness.spec.caseid import family_id
from harness.trace import RankTrace, Run
from harness.verdict import Finding, Verdict

NAME = "loss_vs_golden"
SHOWN_ROWS = 12  # of the table in a message


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the comparison, in nats."""

    step: int
    golden: float
    found: float
    allowed: float

    @property
    def difference(self) -> float:
        """Found minus golden."""
        return self.found - self.golden

    @property
    def good(self) -> bool:
        """True when the loss is as near as allowed. NaN or infinity on any side is never good."""
        return abs(self.difference) <= self.allowed < math.inf


def check_loss_vs_golden(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Findings when the loss leaves the tolerance around the golden, or when the two must not be compared."""
    golden, tolerance = witnesses.golden, witnesses.tolerance
    if golden is None:
        command = update_command(family_id(case))
        return [_finding(f"there is no golden for {family_id(case)}: run `{command}`", expected="a golden")]
    if tolerance is None:
        fix = f"{MEASURE}, or set `loss_tolerance` in the case"
        return [_finding(f"there is no tolerance for this case: {fix}", expected="a tolerance")]
    incomparable = _incomparable(case, run, golden) or _unaligned(case, run, golden, tolerance)
    if incomparable:
        return incomparable
    return [*_agreement(run), *_learning(run, golden, tolerance), *_distance(run, golden, tolerance)]


def _incomparable(case: Case, run: Run, golden: Golden) -> list[Finding]:
    """The golden must be of this family, hardware class and data, on every rank."""
    if not run.traces:
        return [_finding("no rank left a trace: nothing was compared", expected=f"{case.world_size} ranks", found="0")]
    if golden.family != family_id(case):
        return [_finding("the golden belongs to another family", expected=family_id(case), found=golden.family)]
    hardware = by_value(run, lambda trace: hardware_class(trace.device or "unnamed device"))
    data = by_value(run, lambda trace: trace.data_digest)
    return [
        *(
            _finding(f"{rank_names(ranks)} ran on other hardware than the golden", ranks[0], golden.hardware, name)
            for name, ranks in hardware.items()
            if name != golden.hardware
        ),
        *(
            _finding(f"{rank_names(ranks)} trained on other data than the golden", ranks[0], golden.data_digest, digest)
            for digest, ranks in data.items()
            if digest != golden.data_digest
        ),
    ]


def _unaligned(case: Case, run: Run, golden: Golden, tolerance: Tolerance) -> list[Finding]:
    """Case, golden, tolerance and every rank must have the same steps: what is not there cannot be compared."""
    steps = case.train.steps
    findings = [
        _finding(f"the {who} does not have the steps of the case", expected=f"{steps} steps", found=f"{count} steps")
        for who, count in (("golden", len(golden.losses)), ("tolerance", len(tolerance.per_step)))
        if count != steps
    ]
    for numbers, ranks in by_value(run, lambda trace: tuple(step.step for step in trace.steps)).items():
        if numbers != tuple(range(1, steps + 1)):
            message = f"{rank_names(ranks)} did not record every step of the golden"
            findings.append(_finding(message, ranks[0], f"{steps} steps", f"{len(numbers)} steps"))
    return findings


def _agreement(run: Run) -> list[Finding]:
    """The loss is global: every rank must report the same bits. Names the first step where they differ."""
    traces = ordered(run)
    for steps in zip(*(trace.steps for trace in traces), strict=True):
        groups: dict[str, list[int]] = {}
        for trace, step in zip(traces, steps, strict=True):
            groups.setdefault(float(step.loss).hex(), []).append(trace.rank)
        if len(groups) > 1:
            return [_disagreement(steps[0].step, groups)]
    return []


def _disagreement(step: int, groups: dict[str, list[int]]) -> Finding:
    return Finding(
        check=NAME,
        message=f"ranks report different global losses from step {step} on",
        step=step,
        rank=list(groups.values())[1][0],
        expected="the same loss on every rank",
        found="; ".join(f"{rank_names(ranks)}: {float.fromhex(loss)!r}" for loss, ranks in groups.items()),
    )


def _learning(run: Run, golden: Golden, tolerance: Tolerance) -> list[Finding]:
    """A loss that stands still, or a tolerance as wide as all that was learned, proves nothing."""
    if len(golden.losses) < 2:
        return []
    findings = []
    frozen = [trace.rank for trace in ordered(run) if len({step.loss for step in trace.steps}) == 1]
    if frozen:
        message = f"the loss is the same at every step on {rank_names(frozen)}: the model did not learn"
        findings.append(_finding(message, frozen[0], "a loss that changes", f"{ordered(run)[0].steps[0].loss!r}"))
    start = golden.losses[0]
    if all(abs(loss - start) <= allowed for loss, allowed in zip(golden.losses, tolerance.per_step, strict=True)):
        message = "the tolerance is wider than all that the golden learns: a model that never trains would pass"
        moved = max(abs(loss - start) for loss in golden.losses)
        findings.append(_finding(message, None, f"allowed below {moved:g}", f"{max(tolerance.per_step):g}"))
    return findings


def _distance(run: Run, golden: Golden, tolerance: Tolerance) -> list[Finding]:
    """The first rank whose loss leaves the tolerance, with the table of its steps."""
    for trace in ordered(run):
        rows = _rows(trace, golden, tolerance)
        bad = [row for row in rows if not row.good]
        if bad:
            return [_too_far(trace.rank, rows, bad, tolerance)]
    return []


def _rows(trace: RankTrace, golden: Golden, tolerance: Tolerance) -> list[Row]:
    return [
        Row(step=step.step, golden=loss, found=step.loss, allowed=allowed)
        for step, loss, allowed in zip(trace.steps, golden.losses, tolerance.per_step, strict=True)
    ]


def _too_far(rank: int, rows: list[Row], bad: list[Row], tolerance: Tolerance) -> Finding:
    first = bad[0]
    head = f"the loss is {first.difference:+.3g} from the golden at step {first.step}, allowed is {first.allowed:.3g}"
    basis = f"{len(bad)} of {len(rows)} steps are off; tolerance {tolerance.key}: {tolerance.evidence}"
    return Finding(
        check=NAME,
        message=f"{head}\n{_table(rows, rows.index(first))}\n{basis}",
        verdict=Verdict.NUMERIC,
        step=first.step,
        rank=rank,
        expected=f"{first.golden!r} ± {first.allowed!r}",
        found=repr(first.found),
    )


def _table(rows: list[Row], first_bad: int) -> str:
    """The steps around the first bad one, aligned; bad ones end in a mark."""
    start = max(0, min(first_bad - 2, len(rows) - SHOWN_ROWS))
    head = f"{'step':>6}  {'golden':>12}  {'found':>12}  {'difference':>12}  {'allowed':>10}"
    lines = [_line(row) for row in rows[start : start + SHOWN_ROWS]]
    left_out = len(rows) - len(lines)
    return "\n".join([head, *lines, *([f"({left_out} more steps)"] if left_out else [])])


def _line(row: Row) -> str:
    mark = "" if row.good else "  <"
    difference = f"{row.difference:+.6f}" if math.isfinite(row.difference) else str(row.difference)
    return f"{row.step:>6}  {row.golden:>12.6f}  {row.found:>12.6f}  {difference:>12}  {row.allowed:>10.6f}{mark}"


def _finding(message: str, rank: int | None = None, expected: str | None = None, found: str | None = None) -> Finding:
    return Finding(check=NAME, message=message, rank=rank, expected=expected, found=found)
