"""The metrics of a case as text and JSON: by formula, and beside them what a run of it measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

import msgspec

from harness.errors import HarnessError
from harness.matrix.case import Case
from harness.matrix.targets import is_llama
from harness.measured import Measured, Multiplied, Sent
from harness.performance.cost import Metrics, Speed, speed, tokens_per_device
from harness.performance.machine import Peak, peak_of_device
from harness.plural import binary_bytes, counted
from harness.report.case import flop_words
from harness.report.wording import aligned
from harness.result import CaseResult

SCHEMA = 1
SIMULATED = "simulated, not gated: a CPU computes float8 with the virtual device"
ASSUMPTIONS = (
    "a multiplication and an addition are 2 FLOPs; attention counts as not causal, its backward as twice its forward",
    "FLOPs of a token are torchtitan's: 6 for every parameter but the embedding's, and attention",
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A number of all ranks and steps: what a run measured, and the formula. None: it says nothing of it."""

    what: str
    measured: int | None
    formula: int | None

    @property
    def differs(self) -> bool:
        """True where both are known and not equal."""
        return None not in (self.measured, self.formula) and self.measured != self.formula


class MetricsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `predict cost` answers. `rows` and `step_s` are of a run, if any. `device`: what torch calls it."""

    schema: int = SCHEMA
    formula: Metrics | None
    rows: tuple[Row, ...] = ()
    peak_memory_bytes: int | None = None
    step_s: tuple[float, ...] = ()
    device: str = ""
    peak: Peak | None = None
    speed: Speed | None = None

    @property
    def differing(self) -> tuple[Row, ...]:
        """Where the run and the formula disagree."""
        return tuple(row for row in self.rows if row.differs)


def run_report(case: Case, result: CaseResult) -> MetricsReport:
    """What a run of the case measured. HarnessError where no rank finished."""
    found, traces = result.measured, () if result.run is None else result.run.traces
    if found is None or not traces:
        raise HarnessError("nothing was measured: no rank finished.", where=result.case_id)
    device = traces[0].device
    peak = peak_of_device(device)
    timed = found.step_s[1:] or found.step_s  # the first step warms up, where there are others
    rate = tokens_per_device(case, median(timed)) if is_llama(case.target) else None  # FLOPs of others are not known
    return MetricsReport(
        formula=None,
        rows=measured_rows(found),
        peak_memory_bytes=found.peak_memory_bytes,
        step_s=found.step_s,
        device=device,
        peak=peak,
        speed=None if rate is None else speed(case, rate, peak),
    )


def measured_rows(found: Measured) -> tuple[Row, ...]:
    """Every number that formulas predict, as it was measured and as they say."""
    return (
        *_counts("matmul", found.flops, found.expected_flops, unit="FLOPs", field="flops"),
        *_counts("matmul", found.flops, found.expected_flops, unit="calls", field="calls"),
        Row(what="casts to float8", measured=found.cast_calls, formula=found.expected_cast_calls),
        *_counts("wire", found.wire, found.expected_wire, unit="bytes", field="payload_bytes"),
        *_counts("wire", found.wire, found.expected_wire, unit="calls", field="calls"),
        Row(what="bytes saved for backward", measured=found.saved_bytes, formula=found.expected_saved_bytes),
    )


def _counts(
    of: str, found: Mapping[str, Multiplied | Sent], wanted: Mapping[str, Multiplied | Sent], *, unit: str, field: str
) -> Iterator[Row]:
    for words in sorted({*found, *wanted}):
        # what a run lacks is 0 where something of its kind was recorded; a formula may leave kinds out
        missing = 0 if found else None
        yield Row(
            what=f"{unit} of {words}",
            measured=getattr(found[words], field) if words in found else missing,
            formula=getattr(wanted[words], field) if words in wanted else None,
        )


def metrics_text(report: MetricsReport) -> str:
    """The whole report as plain text."""
    parts = [
        *(_formula_parts(report.formula) if report.formula is not None else ()),
        *([_run_part(report)] if report.rows else []),
        *([_speed_part(report, report.speed)] if report.speed is not None else []),
        "\n".join(f"assumed: {each}" for each in ASSUMPTIONS),
    ]
    return "\n\n".join(parts) + "\n"


def _formula_parts(found: Metrics) -> Iterator[str]:
    of = f"rank {found.rank} of {found.world_size}, step {found.step}, {counted(found.tokens, 'token')}"
    lines = [found.case_id, f"{of}: by formula, nothing was run"]
    if found.refusal is not None:
        lines.append(f"torch refuses this case: {found.refusal}")
    yield "\n".join(lines)
    total = sum(each.flops for each in found.work)
    rows = [("", "role", "precision", "FLOPs", "executed", "calls", "share")]
    rows += [
        (
            each.part,
            each.role,
            each.precision,
            flop_words(each.flops),
            flop_words(each.executed_flops),
            str(each.executions),
            f"{each.flops / total:.1%}",
        )
        for each in found.work
    ]
    executed = sum(each.executed_flops for each in found.work)
    rows.append(("all", "", "", flop_words(total), flop_words(executed), "", "100.0%"))
    yield aligned(rows, right=(3, 4, 5, 6))
    of_token = sum(found.flops_per_token.values())
    shares = ", ".join(f"{flops / of_token:.1%} in {name}" for name, flops in found.flops_per_token.items())
    saved = "as the compiler chooses" if found.saved_bytes is None else binary_bytes(found.saved_bytes)
    yield aligned(
        [
            ("FLOPs of a token", f"{flop_words(of_token)}: {shares}"),
            *((f"executed {words}", f"{each.calls} calls") for words, each in found.executed.items()),
            ("casts to float8", str(found.casts)),
            ("saved for backward", f"{saved}, with the attention of a CPU"),
        ]
    )
    yield _wire_part(found)


def _wire_part(found: Metrics) -> str:
    if not found.wire:
        return "sent: nothing"
    named = [*found.wire.items(), *((f"all along {axis}", sent) for axis, sent in found.wire_of_axis.items())]
    rows = [("sent by this rank", "calls", "bytes")]
    rows += [(words, str(sent.calls), binary_bytes(sent.payload_bytes)) for words, sent in named]
    return aligned(rows, right=(1, 2))


def _run_part(report: MetricsReport) -> str:
    rows = [("all ranks and steps", "measured", "formula", "")]
    rows += [
        (row.what, _count(row.measured), _count(row.formula), _judged(row))
        for row in report.rows
        if (row.measured, row.formula) != (None, None)
    ]
    lines = [aligned(rows, right=(1, 2))]
    if report.peak_memory_bytes is not None:
        memory = "of the allocator" if report.device != "cpu" else "growth of the resident set"
        lines.append(f"most memory of a rank: {binary_bytes(report.peak_memory_bytes)} ({memory}, not compared)")
    return "\n".join(lines)


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _judged(row: Row) -> str:
    if None in (row.measured, row.formula):
        return ""
    return "DIFFERS" if row.differs else "equal"


def _speed_part(report: MetricsReport, speed: Speed) -> str:
    simulated = f"  ({SIMULATED})" if report.device == "cpu" else ""
    return "\n".join([f"speed of one device{simulated}", aligned(list(speed_rows(speed, report.peak, report.device)))])


def speed_rows(speed: Speed, peak: Peak | None, device: str) -> Iterable[Sequence[str]]:
    """Tokens, FLOPs and MFU with the definition of each; why there is no MFU where there is none."""
    yield "tokens/s", f"{speed.tokens_per_s:,.0f}" if speed.tokens_per_s >= 1000 else f"{speed.tokens_per_s:.4g}", ""
    yield "TFLOP/s", f"{speed.tflops:,.2f}" if speed.tflops >= 0.01 else f"{speed.tflops:.2g}", ""
    if peak is None:
        yield "MFU", "-", f"the peaks of {device or 'the device'} are not known: none is guessed"
        return
    for name, share, definition in (
        (
            "mfu_bf16_peak",
            speed.mfu_bf16_peak,
            f"all work over {peak.bfloat16:g} TFLOP/s, the BF16 peak of {peak.name}",
        ),
        ("mfu_fp8_peak", speed.mfu_fp8_peak, f"all work over {peak.float8 or 0:g} TFLOP/s, its FP8 peak"),
        ("mfu_weighted", speed.mfu_weighted, "time of the work at the peak of its precision, over its time"),
    ):
        shown = "-" if share is None else f"{share:.2%}"
        yield name, shown, definition if share is not None else "it has no peak in a precision of this case"
