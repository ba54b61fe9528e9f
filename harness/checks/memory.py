"""Does every rank save the expected bytes for its backward pass, and is nothing else alive? See `expect/memory.py`.

In compiled runs saved memory is compared also with the marks of checkpointing in the graphs: what is to be computed
again must not be saved. What is alive at a moment of a step are the storages in the record of saved memory, one by one;
later steps are compared with the second, which needs no formula.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec.structs import replace

from harness.checks.check import Rules, Stage, Witnesses, merge_ranks
from harness.expect import memory
from harness.expect.expectations import LIVE_MEMORY, SAVED_MEMORY, Expectations
from harness.matrix.case import Case, Checkpointing, CheckpointMode
from harness.text import counted
from harness.trace import RankTrace, Run
from harness.trace.counts import MOMENTS, LiveMemory, LiveTensor, Moment
from harness.verdict import Finding

MODES: tuple[CheckpointMode, ...] = ("none", "full", "selective_op", "selective_layer")

_rule = Rules("memory", Stage.MEMORY, only={"another torch": "limits"})
NO_MARKS = _rule("no-marks", "the graphs of the blocks have no checkpointing tags", stage=Stage.MODEL)
KEPT = _rule(
    "kept",
    "{count:n result that checkpointing recomputes is|results that checkpointing recomputes are} saved for backward",
)
LIMITS = _rule("limits", "compiled blocks save {much} bytes for backward", key=("much",), formula=SAVED_MEMORY)
OTHER_MODE = _rule(
    "other-checkpointing",
    "saved activations fit checkpointing {mode}, not {asked}: wrong number of {dtype} bytes",
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
    judged_on = device if expect.case.compile == "none" else "cpu"  # elsewhere the marks are checked alone
    return memory.undescribed(expect.case, judged_on)


def _partly(expect: Expectations, device: str) -> str:
    compiled = expect.case.compile != "none"
    return f"the number of bytes: {memory.NOT_OF_THIS_DEVICE}" if compiled and not memory.describes(device) else ""


@_rule.judged_by(
    blind="Wrong values in tensors of the right size; memory outside of autograd, which `live_memory` counts.",
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
        partitions = trace.graphs.partitions if trace.graphs is not None else ()
        expected = {expect.case.checkpointing.wraps(layer) for layer in range(expect.case.model.shape.layers)}
        found = {partition.marked > 0 for partition in partitions}
        if found != expected:
            yield NO_MARKS.finding(expected=_marks(expected), found=_marks(found))
        kept = [tensor for partition in partitions for tensor in partition.kept]
        if kept:
            most = max(kept, key=lambda tensor: tensor.nbytes)
            largest = f"{most.operator} {most.node}, {most.dtype}{list(most.shape)}, is the largest"
            yield KEPT.finding(count=len(kept), expected="none of them is saved", found=largest)
    if memory.describes(trace.device):
        yield from (_wrong_bytes if expect.saves_exactly else _beyond_limits)(expect, trace)


def _marks(marked: set[bool]) -> str:
    words = {True: "graphs with operators to compute again", False: "graphs without"}
    return " and ".join(words[is_marked] for is_marked in sorted(marked, reverse=True)) or "no graphs"


def _steps(expect: Expectations, trace: RankTrace) -> list[int]:
    return sorted({*range(1, expect.case.train.steps + 1), *(record.step for record in trace.saved_memory or ())})


def _beyond_limits(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    """Yield the first step in which more or less is saved than any choice of the partitioner explains."""
    recorded = {record.step: record.saved_bytes for record in trace.saved_memory or ()}
    for step in _steps(expect, trace):
        limits, saved = expect.saved_limits(step=step, rank=trace.rank), recorded.get(step, 0)
        if not limits.least <= saved <= limits.most:
            much, wanted = "too few" if saved < limits.least else "too many", f"{limits.least} to {limits.most} bytes"
            yield LIMITS.finding(much=much, step=step, expected=wanted, found=f"{saved} bytes")
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
    """Return the other checkpointing that saves exactly these bytes; empty if none does."""
    for mode in MODES:
        other = Expectations(replace(expect.case, checkpointing=Checkpointing(mode=mode)))
        is_other = mode != expect.case.checkpointing.mode and other.saves_exactly
        if is_other and other.saved_bytes(step=step, rank=trace.rank, calls=trace.expert_calls(step)) == saved:
            return mode
    return ""


S = TypeVar("S", LiveTensor, memory.LiveStorage)

_live = Rules("live_memory", Stage.MEMORY, only={"a damaged trace": "no-scan"})
NO_SCAN = _live("no-scan", "no record of live memory {when}")
TOO_MUCH = _live("too-much", "{tensors} is alive {when} for no known reason", key=("when",), formula=LIVE_MEMORY)
TOO_LITTLE = _live("too-little", "{purpose} is not alive {when}", key=("purpose", "when"), formula=LIVE_MEMORY)
SCALARS = _live("scalars", "wrong number of scalars alive {when}", key=("when",), formula=LIVE_MEMORY)


def _not_described(case: Case, device: str) -> str:
    if case.layout.pp > 1:
        return "pipeline stages keep send and receive buffers, and `leaks` checks that they do not grow"
    return memory.undescribed(case, device)


@_live.judged_by(
    blind="A tensor that replaces another of the same dtype and size; memory inside of an operator.",
    not_judged=lambda expect, device: _not_described(expect.case, device),
    records=("saved_memory",),
    formula=LIVE_MEMORY,
)
def check_live_memory(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Is anything alive that no saved tensor, weight, gradient or optimizer state explains?"""
    return merge_ranks(run, lambda trace: _unexpected(witnesses.expect, trace))


def _unexpected(expect: Expectations, trace: RankTrace) -> Iterator[Finding]:
    """For every moment the first step in which a storage is alive too much or too little."""
    alive = _census(trace)
    for moment, when in MOMENTS.items():
        for step in range(1, expect.case.train.steps + 1):
            expected = memory.expected_live(expect.case, rank=trace.rank, moment=moment, step=step)
            live = alive.get((moment, step))
            if live is None:
                yield NO_SCAN.finding(when=when, step=step, expected="one", found="none")
                break
            scalars = memory.expected_scalars(expect.case, moment=moment, step=step)
            finding = _difference(live, expected, scalars, step, when)
            if finding is not None:
                yield finding
                break


def _difference(
    live: LiveMemory, expected: tuple[memory.LiveStorage, ...], scalars: int, step: int, when: str
) -> Finding | None:
    """Return None if the storages are the expected ones."""
    extra, lost = _beyond(live.tensors, expected), _beyond(expected, live.tensors)
    wanted, got = _amount(expected, scalars), _amount(live.tensors, live.scalars)
    if extra:
        tensors, holder = _largest_of(extra)
        return TOO_MUCH.finding(step=step, tensors=tensors, holder=holder, when=when, expected=wanted, found=got)
    if lost:
        return TOO_LITTLE.finding(step=step, purpose=lost[0].purpose, when=when, expected=wanted, found=got)
    return None if live.scalars == scalars else SCALARS.finding(step=step, when=when, expected=wanted, found=got)


# Leaks

SETTLED = 2  # the first step that all later ones must repeat: the optimizer and precomputed scales have their state

_leaks = Rules("leaks", Stage.MEMORY, only={"a damaged trace": "no-scan"})
NO_SCAN_OF_LEAKS = _leaks("no-scan", "no record of live memory {when}")
GROWS = _leaks("grows", "live memory grows: {tensors} is alive {when} and was not in step {settled}", key=("when",))
MORE_SCALARS = _leaks("scalars", "live memory grows by scalars {when}", key=("when",))
SHRINKS = _leaks("shrinks", "live memory shrinks {when}", key=("when",))


@_leaks.judged_by(
    blind="What is too much from the first step on, which `live_memory` sees; what grows by less than a storage.",
    records=("saved_memory",),
)
def check_leaks(case: Case, run: Run, witnesses: Witnesses) -> list[Finding]:
    """Does a later step have anything more or less alive than the second?"""
    return merge_ranks(run, lambda trace: _changes(case, trace))


def _changes(case: Case, trace: RankTrace) -> Iterator[Finding]:
    """For every moment the first step that has something else alive than the second, but buckets."""
    alive = {
        (moment, step): replace(live, tensors=tuple(_beyond(live.tensors, memory.in_buckets(case, step, moment))))
        for (moment, step), live in _census(trace).items()
    }
    for moment, when in MOMENTS.items():
        first = alive.get((moment, SETTLED))
        for step in range(SETTLED, case.train.steps + 1):
            live = alive.get((moment, step))
            if first is None or live is None:
                yield NO_SCAN_OF_LEAKS.finding(when=when, step=step, expected="one", found="none")
                break
            if _contents(live) != _contents(first):
                yield _change(first, live, step, when)
                break


def _change(first: LiveMemory, live: LiveMemory, step: int, when: str) -> Finding:
    expected = f"{_amount(first.tensors, first.scalars)}, as in step {SETTLED}"
    got = _amount(live.tensors, live.scalars)
    extra = _beyond(live.tensors, first.tensors)
    if not extra:
        rule = MORE_SCALARS if live.scalars > first.scalars else SHRINKS
        return rule.finding(step=step, when=when, expected=expected, found=got)
    tensors, holder = _largest_of(extra)
    return GROWS.finding(
        step=step, tensors=tensors, holder=holder, when=when, settled=SETTLED, expected=expected, found=got
    )


# The census


def _census(trace: RankTrace) -> Mapping[tuple[Moment, int], LiveMemory]:
    return {(live.moment, record.step): live for record in trace.saved_memory or () for live in record.live}


def _contents(live: LiveMemory) -> tuple[int, list[tuple[str, int]]]:
    """Return the scalars, and dtype and bytes of all other storages: equal where as much is alive."""
    return live.scalars, sorted((tensor.dtype, tensor.nbytes) for tensor in live.tensors)


def _beyond(storages: Iterable[S], others: Iterable[LiveTensor | memory.LiveStorage]) -> list[S]:
    """Return what is left when every storage is paired with another of its dtype and size."""
    unpaired = Counter((other.dtype, other.nbytes) for other in others)
    left = []
    for storage in storages:
        unpaired[storage.dtype, storage.nbytes] -= 1
        if unpaired[storage.dtype, storage.nbytes] < 0:
            left.append(storage)
    return left


def _largest_of(tensors: list[LiveTensor]) -> tuple[str, str]:
    """Return the largest tensor in words, and the module that holds it; of equal ones one that a module holds."""
    most = max(tensors, key=lambda tensor: (tensor.nbytes, bool(tensor.holder)))
    others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    holder = most.holder or "no module"
    return f"{most.dtype}{list(most.shape)} of {holder}{others}", holder


def _amount(storages: Iterable[LiveTensor | memory.LiveStorage], scalars: int) -> str:
    return f"{sum(storage.nbytes for storage in storages)} bytes, and {counted(scalars, 'scalar')}"
