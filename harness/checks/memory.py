"""Does every rank save the expected bytes for its backward pass? Saved memory against `expect/saved_memory.py`.

In compiled runs also against the marks of checkpointing in the graphs: what is to be computed again must not be saved.
"""

from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace

from harness.checks.check import Check, Witnesses
from harness.checks.findings import merge_ranks
from harness.checks.rule import Rules, Stage
from harness.expect.expectations import SAVED_MEMORY, Expectations
from harness.expect.saved_memory import NOT_OF_THIS_DEVICE, describes, undescribed
from harness.matrix.case import Case, Checkpointing, CheckpointMode
from harness.trace import RankTrace, Run
from harness.verdict import Finding

MODES: tuple[CheckpointMode, ...] = ("none", "full", "selective_op", "selective_layer")

_rule = Rules("memory", Stage.MEMORY)
NO_MARKS = _rule("no-marks", "the graphs of the blocks do not have the marks of checkpointing", stage=Stage.MODEL)
KEPT = _rule(
    "kept",
    "{count:n result that checkpointing computes again is|results that checkpointing computes again are} saved "
    "for backward",
)
LIMITS = _rule("limits", "compiled blocks save {much} bytes for backward", key=("much",), formula=SAVED_MEMORY)
OTHER_MODE = _rule(
    "other-checkpointing",
    "saved memory fits checkpointing {mode}, not {asked}: wrong number of {dtype} bytes",
    stage=Stage.MODEL,
    key=("mode", "asked"),
    formula=SAVED_MEMORY,
)
OUTLIVES = _rule(
    "float8-outlives-forward",
    "float8 tensors outlive the forward pass: too many {dtype} bytes saved for backward",
    key=("dtype",),
    formula=SAVED_MEMORY,
)
BYTES = _rule("bytes", "wrong number of {dtype} bytes saved for backward", key=("dtype",), formula=SAVED_MEMORY)


def _not_judged(expect: Expectations, device: str) -> str:
    judged_on = device if expect.case.compile == "none" else "cpu"  # elsewhere the marks are judged alone
    return undescribed(expect.case, judged_on)


def _partly(expect: Expectations, device: str) -> str:
    compiled = expect.case.compile != "none"
    return f"the number of bytes: {NOT_OF_THIS_DEVICE}" if compiled and not describes(device) else ""


@partial(
    Check,
    declares=_rule,
    blind="Tensors of the right size with other values; what is kept outside of autograd, which `live_memory` counts.",
    not_judged=_not_judged,
    partly=_partly,
    records=("saved_memory",),
    compiled_records=("graphs", "saved_memory"),
    formula=SAVED_MEMORY,
)
def check_memory(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does every rank save the expected bytes for its backward pass?"""
    return merge_ranks(run, lambda trace: _findings(witnesses.expect, trace))


def _findings(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    if expect.case.compile != "none":
        yield from _against_marks(expect.case, trace)
    if describes(trace.device):
        yield from (_wrong_bytes if expect.saves_exactly else _beyond_limits)(expect, trace)


def _against_marks(case: Case, trace: RankTrace) -> Iterator[Finding]:
    partitions = trace.graphs.partitions if trace.graphs is not None else ()
    expected = {case.checkpointing.wraps(layer) for layer in range(case.model.shape.layers)}
    found = {partition.marked > 0 for partition in partitions}
    if found != expected:
        yield NO_MARKS.finding(expected=_marks(expected), found=_marks(found))
    kept = [tensor for partition in partitions for tensor in partition.kept]
    if kept:
        most = max(kept, key=lambda tensor: tensor.nbytes)
        largest = f"{most.operator} {most.node}, {most.dtype}{list(most.shape)}, is the largest"
        yield KEPT.finding(count=len(kept), expected="none of them is saved", found=largest)


def _marks(marked: set[bool]) -> str:
    words = {True: "graphs with operators to compute again", False: "graphs without"}
    return " and ".join(words[is_marked] for is_marked in sorted(marked, reverse=True)) or "no graphs"


def _steps(expect: Expectations, trace: RankTrace) -> list[int]:
    return sorted({*range(1, expect.case.train.steps + 1), *(record.step for record in trace.saved_memory or ())})


def _beyond_limits(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    """The first step in which more or less is saved than any choice of the partitioner explains."""
    recorded = {record.step: record.saved_bytes for record in trace.saved_memory or ()}
    for step in _steps(expect, trace):
        limits, saved = expect.saved_limits(step=step, rank=trace.rank), recorded.get(step, 0)
        if not limits.least <= saved <= limits.most:
            much = "too few" if saved < limits.least else "too many"
            yield LIMITS.finding(
                much=much, step=step, expected=f"{limits.least} to {limits.most} bytes", found=f"{saved} bytes"
            )
            return


def _wrong_bytes(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    """For every dtype the first step with wrong bytes, by the likely cause when the bytes show one."""
    reported: set[str] = set()
    recorded = {record.step: record.by_dtype for record in trace.saved_memory or ()}
    for step in _steps(expect, trace):
        expected = expect.saved_bytes(step=step, rank=trace.rank, calls=trace.expert_calls(step))
        found = recorded.get(step, {})
        for dtype in sorted((expected.keys() | found.keys()) - reported):
            wanted, got = expected.get(dtype, 0), found.get(dtype, 0)
            if wanted != got:
                reported.add(dtype)
                mode = _mode_of(expect, step, trace, found)
                outlives = dtype.startswith("float8") and got > wanted
                rule = OTHER_MODE if mode else OUTLIVES if outlives else BYTES
                values = {"mode": mode, "asked": expect.case.checkpointing.mode} if mode else {}
                texts = f"{wanted} bytes", f"{got} bytes"
                yield rule.finding(step=step, expected=texts[0], found=texts[1], dtype=dtype, values=values)


def _mode_of(expect: Expectations, step: int, trace: RankTrace, saved: dict[str, int]) -> str:
    """The other checkpointing that saves exactly these bytes; empty where none does."""
    for mode in MODES:
        other = Expectations(replace(expect.case, checkpointing=Checkpointing(mode=mode)))
        is_other = mode != expect.case.checkpointing.mode and other.saves_exactly
        if is_other and other.saved_bytes(step=step, rank=trace.rank, calls=trace.expert_calls(step)) == saved:
            return mode
    return ""
