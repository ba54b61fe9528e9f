"""What `predict` shows: costs, layouts, how fast it is here, and what FP8 gains, which is a page with plots too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from harness.matrix.caseid import parse_case_id
from harness.matrix.targets import is_llama
from harness.performance.cost import CostReport, Metrics, Row, Speed, speed
from harness.performance.machine import Peak, peak_of_device
from harness.performance.routed import IMBALANCE, Routed
from harness.plural import binary_bytes, counted
from harness.report.case import flop_words, speedup_words
from harness.report.sections import Block, Facts, Items, Section, Table

if TYPE_CHECKING:
    from harness.performance.advice import Advice
    from harness.performance.gains import Conversion, Plot
    from harness.performance.layouts import Ranked, Simulation
    from harness.studies.simulation import Verification
    from harness.studies.speed import CaseSpeed, SpeedReport

SIMULATED = "simulated, not gated: a CPU computes float8 with the virtual device"
_COUNTING = (
    "a multiplication and an addition are 2 FLOPs; attention counts as not causal, its backward as twice its forward",
    "FLOPs of a token are torchtitan's: 6 for every active parameter but the embedding's, and attention",
)
_AXES = {"dp_replicate": "replicas", "dp_shard": "FSDP", "tp": "TP"}  # of layouts with predictions
_MEMORY = {
    "parameters": ("parameters", "as FSDP2 pads them"),
    "optimizer": ("optimizer", "its states"),
    "saved": ("saved for backward", "eager blocks"),
    "kept": ("logits, weights that stay gathered", ""),
    "before_backward": ("between forward and backward", "exact"),
    "gradients": ("gradients", "after backward"),
    "peak": ("peak", "at least, of "),
}
_PARTS = {
    "matmul_s": "matmuls",
    "cast_s": "casts",
    "padding_s": "padding of operands",
    "attention_s": "attention",
    "memory_s": "norms, activations, loss, optimizer, copies",
    "tensor_parallel_s": "collectives of tensor parallelism",
    "data_parallel_s": "what FSDP's collectives add",
    "other_s": "other",
    "dispatch_s": "dispatch, behind which kernels run",
    "total_s": "step",
}


def cost_sections(report: CostReport) -> Iterator[Block]:
    """What a step costs by formula, or what a run of it measured, and the speed of one device."""
    if report.formula is not None:
        yield from _formula_sections(report.formula)
    if report.rows:
        yield Section(blocks=(_measured_table(report.rows), *_most_memory(report)))
    if report.speed is not None:
        rows = tuple(_speed_rows(report.speed, report.peak, report.device))
        yield Section(title=f"speed of one device{_simulated(report.device)}", blocks=(Table(rows=rows, right=(1,)),))
    yield Section(title="assumed", blocks=(Items(_COUNTING),))


def _formula_sections(found: Metrics) -> Iterator[Block]:
    of = f"rank {found.rank} of {found.world_size}, step {found.step}, {counted(found.tokens, 'token')}"
    refused = () if found.refusal is None else (f"torch refuses this case: {found.refusal}",)
    yield Section(blocks=(found.case_id, f"{of}: by formula, nothing was run", *refused))
    total = sum(each.flops for each in found.work)
    rows = [
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
    multiplied = ("part", "role", "precision", "FLOPs", "executed", "calls", "share")
    yield Table(columns=multiplied, rows=tuple(rows), right=(3, 4, 5, 6))
    of_token = sum(found.flops_per_token.values())
    shares = ", ".join(f"{flops / of_token:.1%} in {name}" for name, flops in found.flops_per_token.items())
    saved = "as the compiler chooses" if found.saved_bytes is None else binary_bytes(found.saved_bytes)
    facts = (
        ("FLOPs of a token", f"{flop_words(of_token)}: {shares}"),
        *_parameters(found),
        *((f"executed {words}", f"{each.calls} calls") for words, each in found.executed.items()),
        ("casts to float8", str(found.casts)),
        ("saved for backward", f"{saved}, with the attention of a CPU"),
        *([("bubble", f"{found.bubble:.1%} of a step, if stages take equally long")] if found.bubble else []),
    )
    yield Facts(facts)
    named = (*found.wire.items(), *((f"all along {axis}", sent) for axis, sent in found.wire_of_axis.items()))
    sent = tuple((words, str(each.calls), binary_bytes(each.payload_bytes)) for words, each in named)
    columns = ("sent by this rank", "calls", "bytes")
    yield Table(columns=columns, rows=sent, right=(1, 2)) if sent else "sent: nothing"


def _parameters(found: Metrics) -> Iterator[tuple[str, str]]:
    if found.active_parameters < found.parameters:
        yield "parameters", f"{found.parameters:,}, of which a token meets {found.active_parameters:,}"
        yield "experts", "as if tokens were spread evenly"


def _measured_table(rows: Iterable[Row]) -> Table:
    def shown(value: int | None) -> str:
        return "-" if value is None else f"{value:,}"

    return Table(
        columns=("all ranks and steps", "measured", "formula", ""),
        rows=tuple(
            (each.what, shown(each.measured), shown(each.formula), each.judged)
            for each in rows
            if (each.measured, each.formula) != (None, None)
        ),
        right=(1, 2),
    )


def _most_memory(report: CostReport) -> Iterator[str]:
    if report.peak_memory_bytes is not None:
        memory = "of the allocator" if report.device != "cpu" else "growth of the resident set"
        yield f"most memory of a rank: {binary_bytes(report.peak_memory_bytes)} ({memory}, not compared)"


def _simulated(device: str) -> str:
    return f"  ({SIMULATED})" if device == "cpu" else ""


def _speed_rows(found: Speed, peak: Peak | None, device: str) -> Iterator[tuple[str, str, str]]:
    """Tokens, FLOPs and MFU with the definition of each; why there is no MFU where there is none."""
    yield "tokens/s", f"{found.tokens_per_s:,.0f}" if found.tokens_per_s >= 1000 else f"{found.tokens_per_s:.4g}", ""
    yield "TFLOP/s", f"{found.tflops:,.2f}" if found.tflops >= 0.01 else f"{found.tflops:.2g}", ""
    if peak is None:
        yield "MFU", "-", f"the peaks of {device or 'the device'} are not known: none is guessed"
        return
    for name, definition in (
        ("mfu_bf16_peak", f"all work over {peak.bfloat16:g} TFLOP/s, the BF16 peak of {peak.name}"),
        ("mfu_fp8_peak", f"all work over {peak.float8 or 0:g} TFLOP/s, its FP8 peak"),
        ("mfu_weighted", "time of the work at the peak of its precision, over its time"),
    ):
        share = getattr(found, name)
        absent = "it has no peak in a precision of this case"
        yield (name, "-", absent) if share is None else (name, f"{share:.2%}", definition)


def layout_sections(found: Simulation, verification: Verification | None = None) -> Iterator[Block]:
    """A case on its ranks, refusals first, and what simulated ranks were found to do."""
    nodes = f"{counted(found.nodes, 'node')} of {found.gpus_per_node} {found.device}"
    tokens = f"{counted(found.tokens, 'token')} of a data-parallel rank and step"
    of = f"{counted(found.world_size, 'rank')} on {nodes}, {tokens}: by formula, nothing was run"
    reasons = (
        *(f"REFUSED {each.name}: {each.text}" for each in found.refused),
        *(f"warning {each.name}: {each.text}" for each in found.warnings),
    )
    yield Section(blocks=(found.case, of, Items(reasons)))
    for table in (_matmul_table(found), _shard_table(found), _wire_table(found), _memory_table(found)):
        yield table if table.rows else "sent: nothing"
    if found.experts is not None:
        yield _experts(found.experts)
    yield _time(found)
    yield Section(title="assumed", blocks=(Items(found.assumptions),))
    if verification is not None:
        yield _verification(verification)


def _experts(found: Routed) -> Facts:
    longer = "" if found.more_s is None else f"{found.more_s:.3g} s a step more"
    larger = "" if not found.more_bytes else f"{binary_bytes(found.more_bytes)} more saved for backward"
    more = ", ".join(filter(None, (longer, larger)))
    return Facts(
        (
            ("parameters", f"{found.parameters:,}, of which a token meets {found.active_parameters:,}"),
            ("experts of a rank", f"{found.local_experts}, which get {found.rows:,} rows in a forward of a block"),
            ("sent to them and back", f"{binary_bytes(found.sent_bytes)} in a step of this rank"),
            (f"with {IMBALANCE} times as many rows", more or "nothing more"),
        )
    )


def _time(found: Simulation) -> str:
    if found.step_s is None or found.tokens_s is None:
        return f"no time is predicted: the data sheet of {found.device} has no peak in the dtype of this case"
    return f"predicted: {found.step_s:.3g} s a step, {found.tokens_s:,.0f} tokens/s and device"


def _matmul_table(found: Simulation) -> Table:
    return Table(
        columns=("matmul", "role", "m", "n", "k", "precision", "16", "layers", "TP ranks"),
        rows=tuple(
            (
                each.linear,
                each.role,
                *map(str, (each.m, each.n, each.k)),
                each.precision,
                "REFUSED" if each.refused else "yes" if each.aligned else "no",
                str(each.layers),
                str(each.tp_ranks),
            )
            for each in found.matmuls
        ),
        right=(2, 3, 4, 7, 8),
    )


def _shard_table(found: Simulation) -> Table:
    def shown(sizes: Sequence[int]) -> str:
        return str(sizes[0]) if len(sizes) == 1 else f"uneven: {', '.join(map(str, sizes))}"

    return Table(
        columns=("weight", "rows on TP ranks", "columns", "rows on FSDP ranks", "padding", "empty"),
        rows=tuple(
            (
                each.weight,
                shown(each.tp_rows),
                str(each.columns),
                shown(each.fsdp_rows),
                f"{each.padding:.1%}" if each.padding else "",
                str(each.empty_ranks or ""),
            )
            for each in found.shards
        ),
        right=(2, 4, 5),
    )


def _wire_table(found: Simulation) -> Table:
    return Table(
        columns=("sent along", "ranks", "calls", "of amax", "inputs", "sent in rings", ""),
        rows=tuple(
            (
                each.axis,
                str(each.ranks),
                f"{each.calls:,}",
                f"{each.amax_reductions:,}",
                binary_bytes(each.payload_bytes),
                binary_bytes(each.sent_bytes),
                "between nodes" if each.crosses_nodes else "",
            )
            for each in found.wire
        ),
        right=(1, 2, 3, 4, 5),
    )


def _memory_table(found: Simulation) -> Table:
    notes = {"peak": binary_bytes(found.device_bytes)}
    return Table(
        columns=("memory", *(f"rank {each.rank}" for each in found.memory), ""),
        rows=tuple(
            (name, *(binary_bytes(getattr(each, field)) for each in found.memory), note + notes.get(field, ""))
            for field, (name, note) in _MEMORY.items()
        ),
        right=tuple(range(1, len(found.memory) + 1)),
    )


def _verification(found: Verification) -> Section:
    ranks = ", ".join(map(str, found.ranks))
    equal = f"{counted(len(found.compared), 'number')} of ranks {ranks} compared in {found.seconds:.0f} s"
    rows = tuple(
        f"{f'as recorded in {each.known}' if each.known else 'DIFFERS'}: rank {each.rank}, {each.what}: "
        f"{each.found:,}, formula {each.formula:,}"
        for each in found.compared
        if each.differs or each.known
    )
    shares = ", ".join(f"{peak:.2f}" for peak in found.peaks)
    peaks = (f"peak over its lower bound: {shares} (not compared)",) if found.peaks else ()
    return Section(blocks=(f"simulated: {equal}, {len(found.differing) or 'none'} differ", Items(rows), *peaks))


def sweep_sections(ranked: Sequence[Ranked]) -> Iterator[Block]:
    """The layouts that nothing refuses as a table, those that are refused by their reasons, and all reasons."""
    columns = (*_AXES.values(), "predicted s", "tokens/s", "peak at least", "sent", "between nodes", "")
    rows = tuple(_layout_row(each) for each in ranked if not each.refused)
    reasons = {reason.name: reason.text for each in ranked for reason in (*each.refused, *each.warnings)}
    yield Table(columns=columns, rows=rows, right=tuple(range(len(columns) - 1)))
    yield Items(tuple(_refused_lines(ranked)))
    yield Items(tuple(f"{name}: {text}" for name, text in reasons.items()))


def _layout_row(each: Ranked) -> tuple[str, ...]:
    notes = [*(() if each.fits else ("does not fit",)), *(reason.name for reason in each.warnings)]
    return (
        *(str(each.layout.mesh[axis]) for axis in _AXES),
        f"{each.step_s:.3g}" if each.step_s else "-",
        f"{each.tokens_s:,.0f}" if each.tokens_s else "-",
        *map(binary_bytes, (each.peak_bytes, each.sent_bytes, each.between_nodes_bytes)),
        ", ".join(notes),
    )


def _refused_lines(ranked: Sequence[Ranked]) -> Iterator[str]:
    """One line for equal reasons at one degree of the innermost axis."""
    groups: dict[tuple[int, str], list[str]] = {}
    for each in ranked:
        if each.refused:
            names = ", ".join(reason.name for reason in each.refused)
            *outer, inner = (each.layout.mesh[axis] for axis in _AXES)
            groups.setdefault((inner, names), []).append(" x ".join(map(str, outer)))
    *outside, inside = _AXES.values()
    for (degree, names), found in groups.items():
        yield f"REFUSED {inside} {degree} with {' x '.join(outside)} {', '.join(found)}: {names}"


def speedup_page(found: Advice, drawn: Sequence[Plot]) -> bytes:
    """The sections with plots and their values, in one HTML file that loads nothing."""
    from harness.report.html.page import rendered

    head, *sections = speedup_sections(found)
    values = tuple(
        Table(
            title=plot.title,
            columns=(plot.across, *plot.lines),
            rows=tuple(
                (str(place), *(f"{values[at]:.4g}" for values in plot.lines.values()))
                for at, place in enumerate(plot.places)
            ),
            folded=True,
        )
        for plot in drawn
    )
    return rendered(
        "advice.html",
        ("plots.js",),
        data={"told": drawn},
        title=f"fp8-harness: does FP8 pay on {found.device}?",
        lines=head.blocks,
        sections=(*sections, Section(name="values", title="Values of the plots", blocks=values)),
    )


def speedup_sections(found: Advice) -> Iterator[Section]:
    """What was asked, recommendations, all tables, and what is assumed."""
    of_bf16 = f"BF16 is predicted to train {found.tokens_s:,.0f} tokens/s and device."
    yield Section(blocks=(f"{found.case} on {found.device}: predicted, not measured", of_bf16))
    yield Section(name="advice", title="Recommendations", blocks=(Items(found.recommendations),))
    yield _table_section("speed", "Times as fast as BF16", _VARIANTS, _variant_rows(found))
    yield _table_section("step", f"One step, {found.recipe}", _STEP, _step_rows(found))
    title = f"Linears in one rank and step, {found.recipe}; gain: of all matmuls with casts"
    yield _table_section("linears", title, _LINEARS, map(linear_row, found.linears))
    rows = (row for each in found.linears for row in _matmul_rows(each))
    yield _table_section("matmuls", "Matmuls of these linears", _MATMULS, rows)
    yield _table_section("vocabulary", "Vocabulary", _VOCABULARY, _vocabulary_rows(found))
    yield Section(name="assumptions", title="Assumptions", blocks=(Items(found.assumptions),))


_VARIANTS = ("recipe", "compiled", "eager", "tokens/s", "known fault, or rule that refuses it")
_STEP = ("part of a step", "BF16 ms", "FP8 ms")
_LINEARS = ("linear", "float8", "BF16 ms", "FP8 ms", "casts ms", "gain")
_MATMULS = ("linear", "matmul", "m", "n", "k", "16", "BF16 us", "FP8 us")
_VOCABULARY = ("vocabulary", "shards", "float8 takes it", "rows added", "memory added", "output ms")


def _table_section(name: str, title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Section:
    return Section(name=name, title=title, blocks=(Table(columns=columns, rows=tuple(rows)),))


def _variant_rows(found: Advice) -> Iterator[tuple[str, ...]]:
    for each in found.variants:
        if each.refused:
            yield each.name, "refused", "refused", "-", each.refused
        else:
            yield each.name, f"{each.compiled:.2f}", f"{each.eager:.2f}", f"{each.tokens_s:,.0f}", each.fault


def _step_rows(found: Advice) -> Iterator[tuple[str, ...]]:
    for field, name in _PARTS.items():
        times_ms = [getattr(step, field) * 1e3 for step in (found.bf16, found.float8)]
        if any(times_ms):
            yield name, *map(_short, times_ms)


def linear_row(each: Conversion) -> tuple[str, ...]:
    """A linear of all blocks: whether it is converted, its milliseconds and its gain."""
    kept = "refused" if each.converted and each.refused else "yes" if each.converted else "kept"
    times = map(_short, (each.bf16_ms, each.float8_ms, each.cast_ms + each.padding_ms))
    return f"{each.name} x{each.count}", kept, *times, f"{each.gain:.2f}"


def _matmul_rows(each: Conversion) -> Iterator[tuple[str, ...]]:
    for matmul in each.matmuls:
        taken = "yes" if matmul.aligned else "refused" if matmul.refused else "no"
        sizes = map(str, (matmul.m, matmul.n, matmul.k))
        yield each.name, matmul.role, *sizes, taken, _short(matmul.bf16_us), _short(matmul.float8_us)


def _vocabulary_rows(found: Advice) -> Iterator[tuple[str, ...]]:
    for each in found.vocabulary:
        yield (
            each.name,
            ", ".join(map(str, each.shards)),
            f"no: {', '.join(map(str, each.refused))} is no multiple of {each.multiple}" if each.refused else "yes",
            str(each.added_rows),
            f"{_short(each.added_bytes / 1e6)} MB",
            "-" if each.refused else _short(each.output_ms),
        )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def speed_sections(report: SpeedReport) -> Iterator[Block]:
    """A section for every case that was timed against its twin, and how the interval was made."""
    yield from map(_case_section, report.cases)
    yield f"{report.method}; {report.warmup} steps of every job warm up"


def _case_section(found: CaseSpeed) -> Section:
    from harness.running.conditions import worst

    if found.speedup is None:
        failed = found.failed
        why = "not timed" if failed is None else f"not timed: {failed.case_id} {failed.verdict.phrase}"
        return Section(title=found.case_id, blocks=(why,))
    conditions = worst([pair.conditions for pair in found.pairs]).words
    return Section(
        title=f"{found.case_id}{_simulated(found.device)}",
        blocks=(speedup_words(found.speedup), conditions, _rates(found)),
    )


def _rates(found: CaseSpeed) -> Table:
    """Tokens, FLOPs and MFU of one device, of the case and of its twin."""
    times = found.speedup
    assert times is not None, "the case was timed"
    of_both = ((found.case_id, times.tokens_per_s), (found.twin_id, times.twin_tokens_per_s))
    if not is_llama(parse_case_id(found.case_id).target):  # FLOPs of another model are not known
        return Table(rows=tuple((name, f"{rate:,.1f} tokens/s") for name, rate in of_both))
    peak = peak_of_device(found.device)
    case, twin = (_speed_rows(speed(parse_case_id(name), rate, peak), peak, found.device) for name, rate in of_both)
    return Table(
        columns=("of one device", "FP8", "BF16", ""),
        rows=tuple(
            (name, value, other, definition)
            for (name, value, definition), (_, other, _) in zip(case, twin, strict=True)
        ),
        right=(1, 2),
    )
