"""How much faster cases are than their BF16 twins, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from harness.matrix.caseid import parse_case_id
from harness.matrix.targets import is_llama
from harness.performance.cost import speed
from harness.performance.machine import peak_of_device
from harness.report.case import speedup_words
from harness.report.metrics import SIMULATED, speed_rows
from harness.report.wording import aligned
from harness.running.conditions import worst
from harness.studies.speed import METHOD, CaseSpeed

SCHEMA = 1


class SpeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `predict measure` answers. `gated`: False on a CPU, whose seconds say nothing of float8."""

    schema: int = SCHEMA
    gated: bool
    method: str = METHOD
    warmup: int  # steps of every job that are not timed
    cases: tuple[CaseSpeed, ...]


def speed_text(report: SpeedReport) -> str:
    """A block for every case, and how the interval was made."""
    return "\n\n".join([*map(_block, report.cases), f"{METHOD}; {report.warmup} steps of every job warm up"]) + "\n"


def _block(found: CaseSpeed) -> str:
    if found.speedup is None:
        failed = found.failed
        why = "not timed" if failed is None else f"not timed: {failed.case_id} {failed.verdict.phrase}"
        return f"{found.case_id}\n  {why}"
    times = found.speedup
    simulated = f"  ({SIMULATED})" if found.device == "cpu" else ""
    lines = [
        f"{found.case_id}{simulated}",
        f"  {speedup_words(times)}",
        f"  {worst([pair.conditions for pair in found.pairs]).words}",
    ]
    return "\n".join([*lines, *(f"  {line}" for line in _rates(found))])


def _rates(found: CaseSpeed) -> Iterator[str]:
    """Tokens, FLOPs and MFU of one device, of the case and of its twin."""
    times = found.speedup
    assert times is not None, "the case was timed"
    of_both = ((found.case_id, times.tokens_per_s), (found.twin_id, times.twin_tokens_per_s))
    if not is_llama(parse_case_id(found.case_id).target):  # FLOPs of another model are not known
        yield from aligned([(name, f"{rate:,.1f} tokens/s") for name, rate in of_both]).splitlines()
        return
    peak = peak_of_device(found.device)
    case, twin = (speed_rows(speed(parse_case_id(name), rate, peak), peak, found.device) for name, rate in of_both)
    rows: Sequence[Sequence[str]] = [
        (name, value, other, definition) for (name, value, definition), (_, other, _) in zip(case, twin, strict=True)
    ]
    yield from aligned([("of one device", "FP8", "BF16", ""), *rows], right=(1, 2)).splitlines()
