"""Does the run learn what BF16 learns? The loss of every step against the stored single-rank BF16 golden.

First come the conditions under which the comparison means nothing (no golden, other data, other hardware, ranks that
disagree, a loss that never changes), then the comparison.
"""

import math
from collections.abc import Iterator, Mapping

from harness.checks.assembly import largest
from harness.checks.check import Rules, Stage, Witnesses, group_ranks
from harness.checks.comparison import Compared, first_wrong, reported
from harness.checks.failures import why_unfinished
from harness.evidence.golden import Golden, hardware_classes, update_command
from harness.evidence.tolerance import NONE_DERIVED, Tolerance
from harness.matrix.case import Case
from harness.matrix.caseid import family_id
from harness.text import counted, format_ranks
from harness.trace import RankTrace, Run
from harness.verdict import Finding

COARSE = "its losses were rounded to bfloat16: compute the loss from logits in float32"
SHOWN_ROWS = 12  # of the table in a message


_rule = Rules(
    "loss_vs_golden",
    Stage.BF16,
    only={
        "a missing reference": "no-golden no-tolerance proves-nothing family hardware steps",
        "a damaged trace": "no-rank steps-of-ranks",
    },
)
NO_GOLDEN = _rule(
    "no-golden",
    "no golden is stored for {family}, and its BF16 reference did not finish{why}; to see why run `{command}`",
    stage=Stage.RUN,
    judged=False,
)
NO_TOLERANCE = _rule(
    "no-tolerance", "no loss tolerance {why}; set `loss_tolerance` in the case", stage=Stage.RUN, judged=False
)
NO_RANK = _rule("no-rank", "no rank left a trace", stage=Stage.RUN)
FAMILY = _rule("family", "the golden belongs to another family", stage=Stage.DATA)
HARDWARE = _rule("hardware", "{ranks} ran on other hardware than the golden", stage=Stage.DATA)
DATA = _rule("data", "{ranks} trained on other data or initial weights than the golden", stage=Stage.DATA)
STEPS = _rule("steps", "the {who} does not have the steps of the case", key=("who",))
STEPS_OF_RANKS = _rule("steps-of-ranks", "{ranks} did not record every step of the golden")
DISAGREE = _rule("ranks-disagree", "ranks report different global losses from step {step} on")
FROZEN = _rule("frozen", "the loss is the same at every step on {ranks}: the model did not learn")
PROVES_NOTHING = _rule(
    "proves-nothing",
    "the golden moves less than the tolerance allows, so a model that never trains would pass; {remedy}",
    stage=Stage.RUN,
    judged=False,
)
_OFF = "the loss differs by {difference:+.3g} from the golden at step {step}, tolerance {allowed:.3g}"
LOSS = _rule("loss", _OFF, numeric=True)


@_rule.judged_by(
    blind="Most faults of FP8 training: two thirds of the injected ones leave the loss within the tolerance."
)
def check_loss_vs_golden(case: Case, run: Run, witnesses: Witnesses) -> Iterator[Finding]:
    """Does the run learn what BF16 learns?"""
    golden, tolerance = witnesses.golden, witnesses.tolerance
    if golden is None:
        family, device = family_id(case), next((trace.device for trace in run.traces), "cpu")
        why, command = why_unfinished(witnesses.reference), update_command(family, device)
        yield NO_GOLDEN.finding(family=family, why=why, command=command, expected="a golden")
    elif tolerance is None:
        why = f"{NONE_DERIVED}{why_unfinished(witnesses.underived)}"
        yield NO_TOLERANCE.finding(why=why, expected="a tolerance")
    elif incomparable := [*_incomparable(case, run, golden)] or [*_other_steps(case, run, golden, tolerance)]:
        yield from incomparable
    else:
        yield from _disagreement(run)
        yield from _frozen(run)
        yield from [*_distance(run, golden, tolerance)] or _proves_nothing(golden, tolerance)


def _incomparable(case: Case, run: Run, golden: Golden) -> Iterator[Finding]:
    """Yield the golden must be of the same family, hardware class and data as every rank."""
    if not run.traces:
        yield NO_RANK.finding(expected=f"{case.world_size} ranks", found="0")
    elif golden.family != family_id(case):
        yield FAMILY.finding(expected=family_id(case), found=golden.family)
    else:
        hardware = group_ranks(run, lambda trace: _hardware(trace, golden))
        data = group_ranks(run, lambda trace: trace.data_digest)
        for rule, expected, groups in ((HARDWARE, golden.hardware, hardware), (DATA, golden.data_digest, data)):
            for found, ranks in groups.items():
                if found != expected:
                    yield rule.finding(ranks=ranks, expected=expected, found=found)


def _hardware(trace: RankTrace, golden: Golden) -> str:
    classes = hardware_classes(trace.device or "unnamed device", trace.architecture)
    return golden.hardware if golden.hardware in classes else classes[0]


def _other_steps(case: Case, run: Run, golden: Golden, tolerance: Tolerance) -> Iterator[Finding]:
    """Golden, tolerance and every rank must have the steps of the case."""
    steps = case.train.steps
    expected = counted(steps, "step")
    for who, count in (("golden", len(golden.losses)), ("tolerance", len(tolerance.per_step))):
        if count != steps:
            yield STEPS.finding(who=who, expected=expected, found=counted(count, "step"))
    for taken, ranks in group_ranks(run, lambda trace: tuple(step.step for step in trace.steps)).items():
        if taken != tuple(range(1, steps + 1)):
            yield STEPS_OF_RANKS.finding(ranks=ranks, expected=expected, found=counted(len(taken), "step"))


def _disagreement(run: Run) -> Iterator[Finding]:
    """Yield the first step at which ranks report different losses: the loss is global, so every bit must be equal."""
    traces = run.by_rank
    for steps in zip(*(trace.steps for trace in traces), strict=True):
        groups: dict[str, list[int]] = {}
        for trace, step in zip(traces, steps, strict=True):
            groups.setdefault(float(step.loss).hex(), []).append(trace.rank)
        if len(groups) > 1:
            rank, expected = list(groups.values())[1][0], "the same loss on every rank: the mean over the global batch"
            found = "; ".join(f"{format_ranks(ranks)}: {float.fromhex(loss)!r}" for loss, ranks in groups.items())
            yield DISAGREE.finding(step=steps[0].step, rank=rank, expected=expected, found=found)
            return


def _frozen(run: Run) -> Iterator[Finding]:
    """Yield the ranks whose loss never changes."""
    losses = {trace.rank: {step.loss for step in trace.steps} for trace in run.by_rank if len(trace.steps) > 1}
    frozen = [rank for rank, seen in losses.items() if len(seen) == 1]
    if frozen:
        loss = repr(run.by_rank[0].steps[0].loss)
        yield FROZEN.finding(ranks=frozen, expected="a loss that changes", found=loss)


def _proves_nothing(golden: Golden, tolerance: Tolerance) -> Iterator[Finding]:
    """Within a tolerance that is wider than the progress of the golden, a loss proves nothing."""
    if len(golden.losses) < 2:
        return
    progress = [abs(loss - golden.losses[0]) for loss in golden.losses]
    if all(moved <= allowed for moved, allowed in zip(progress, tolerance.per_step, strict=True)):
        remedy = COARSE if all(map(_is_bfloat16, golden.losses)) else "train more steps"
        expected, found = f"allowed below {max(progress):g}", f"{max(tolerance.per_step):g}"
        yield PROVES_NOTHING.finding(remedy=remedy, expected=expected, found=found)


def _is_bfloat16(loss: float) -> bool:
    """Return True if bfloat16 represents the number: a mantissa of 8 bits."""
    return math.isfinite(loss) and (math.frexp(loss)[0] * 256).is_integer()


def _distance(run: Run, golden: Golden, tolerance: Tolerance) -> Iterator[Finding]:
    """Yield the ranks whose loss leaves the tolerance, with the table of the steps of the first."""
    expected = dict(enumerate(golden.losses, 1))
    compared = [*reported(LOSS, run, "loss", expected, lambda step, _: tolerance.per_step[step - 1])]
    wrong = first_wrong(compared)
    if wrong is not None:
        told = wrong.told
        rows = [row for row in compared if row.ranks == told.ranks]
        bad = [row.distance for row in rows if not row.good]
        basis = f"{len(bad)} of {counted(len(rows), 'step')} outside the tolerance {tolerance.key}"
        details = f"{_table(rows, expected, rows.index(told))}\n{basis}: {tolerance.evidence}"
        off, text = told.of - expected[told.step], f"{told.expected} ± {told.allowed!r}"
        yield wrong.finding(run, difference=off, details=details, expected=text, size=largest(bad))


def _table(rows: list[Compared], golden: Mapping[int, float], first_bad: int) -> str:
    """Return the steps around the first bad one, aligned; bad ones are marked at the end of the line."""
    start = max(0, min(first_bad - 2, len(rows) - SHOWN_ROWS))
    head = f"{'step':>6}  {'golden':>12}  {'found':>12}  {'difference':>12}  {'allowed':>10}"
    lines = [_line(row, golden[row.step]) for row in rows[start : start + SHOWN_ROWS]]
    left_out = len(rows) - len(lines)
    return "\n".join([head, *lines, *([f"({left_out} more steps)"] if left_out else [])])


def _line(row: Compared, golden: float) -> str:
    mark, off = "" if row.good else "  <", row.of - golden
    difference = f"{off:+.6f}" if math.isfinite(off) else str(off)
    return f"{row.step:>6}  {golden:>12.6f}  {row.of:>12.6f}  {difference:>12}  {row.allowed:>10.6f}{mark}"
