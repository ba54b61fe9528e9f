"""What `predict` shows: costs, layouts, speed on this machine, and FP8 speedup."""

from collections.abc import Iterable, Iterator, Sequence

from harness.matrix.caseid import parse_case_id
from harness.plugins.predict.conditions import worst
from harness.plugins.predict.cost import CostReport, Metrics, Row, Speed, speed
from harness.plugins.predict.gains import CaseSpeed, Conversion, Gains, SpeedReport
from harness.plugins.predict.layouts import IMBALANCE, Ranked, Routed, Simulation, Verification
from harness.plugins.predict.machine import Peak, peak_of_device
from harness.registry import is_llama
from harness.report.case import flop_words, speedup_words
from harness.report.sections import Block, Facts, Items, Section, Table, Verbatim
from harness.text import binary_bytes, counted

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
    """Show what a step costs by formula, or what a run of it measured, and the speed of one device."""
    if report.formula is not None:
        yield from _formula_sections(report.formula)
    if report.rows:
        yield Section(blocks=(_measured_table(report.rows), *_most_memory(report)))
    if report.speed is not None:
        rows = tuple(_speed_rows(report.speed, report.peak, report.device))
        yield Section(title=f"speed of one device{_simulated(report.device)}", blocks=(Table(rows=rows, right=(1,)),))
    yield Section(title="assumed", blocks=(Items(_COUNTING),))


def _formula_sections(metrics: Metrics) -> Iterator[Block]:
    of = f"rank {metrics.rank} of {metrics.world_size}, step {metrics.step}, {counted(metrics.tokens, 'token')}"
    refused = () if metrics.refusal is None else (f"torch rejects this case: {metrics.refusal}",)
    yield Section(blocks=(metrics.case_id, f"{of}: by formula, nothing was run", *refused))
    total = sum(work.flops for work in metrics.work)
    rows = []
    for work in metrics.work:
        shown = flop_words(work.flops), flop_words(work.executed_flops), str(work.executions)
        rows.append((work.part, work.role, work.precision, *shown, f"{work.flops / total:.1%}"))
    executed = sum(work.executed_flops for work in metrics.work)
    rows.append(("all", "", "", flop_words(total), flop_words(executed), "", "100.0%"))
    multiplied = ("part", "role", "precision", "FLOPs", "executed", "calls", "share")
    yield Table(columns=multiplied, rows=tuple(rows), right=(3, 4, 5, 6))
    of_token = sum(metrics.flops_per_token.values())
    shares = ", ".join(f"{flops / of_token:.1%} in {name}" for name, flops in metrics.flops_per_token.items())
    saved = "as the compiler chooses" if metrics.saved_bytes is None else binary_bytes(metrics.saved_bytes)
    facts = (
        ("FLOPs of a token", f"{flop_words(of_token)}: {shares}"),
        *_parameters(metrics),
        *((f"executed {words}", f"{products.calls} calls") for words, products in metrics.executed.items()),
        ("casts to float8", str(metrics.casts)),
        ("saved for backward", f"{saved}, with the attention of a CPU"),
        *([("bubble", f"{metrics.bubble:.1%} of a step, if stages take equally long")] if metrics.bubble else []),
    )
    yield Facts(facts)
    named = (*metrics.wire.items(), *((f"all along {axis}", sent) for axis, sent in metrics.wire_of_axis.items()))
    sent = tuple((words, str(traffic.calls), binary_bytes(traffic.payload_bytes)) for words, traffic in named)
    columns = ("sent by this rank", "calls", "bytes")
    yield Table(columns=columns, rows=sent, right=(1, 2)) if sent else "sent: nothing"


def _parameters(metrics: Metrics) -> Iterator[tuple[str, str]]:
    if metrics.active_parameters < metrics.parameters:
        yield "parameters", f"{metrics.parameters:,}, of which a token meets {metrics.active_parameters:,}"
        yield "experts", "as if tokens were spread evenly"


def _measured_table(rows: Iterable[Row]) -> Table:
    def shown(value: int | None) -> str:
        return "-" if value is None else f"{value:,}"

    return Table(
        columns=("all ranks and steps", "measured", "formula", ""),
        rows=tuple(
            (row.what, shown(row.measured), shown(row.formula), row.judged)
            for row in rows
            if (row.measured, row.formula) != (None, None)
        ),
        right=(1, 2),
    )


def _most_memory(report: CostReport) -> Iterator[str]:
    if report.peak_memory_bytes is not None:
        memory = "of the allocator" if report.device != "cpu" else "growth of the resident set"
        yield f"most memory of a rank: {binary_bytes(report.peak_memory_bytes)} ({memory}, not compared)"


def _simulated(device: str) -> str:
    return f"  ({SIMULATED})" if device == "cpu" else ""


def _speed_rows(speeds: Speed, peak: Peak | None, device: str) -> Iterator[tuple[str, str, str]]:
    """Tokens, FLOPs and MFU with the definition of each; why there is no MFU where there is none."""
    yield "tokens/s", f"{speeds.tokens_per_s:,.0f}" if speeds.tokens_per_s >= 1000 else f"{speeds.tokens_per_s:.4g}", ""
    yield "TFLOP/s", f"{speeds.tflops:,.2f}" if speeds.tflops >= 0.01 else f"{speeds.tflops:.2g}", ""
    if peak is None:
        yield "MFU", "-", f"the peaks of {device or 'the device'} are not known: none is guessed"
        return
    for name, definition in (
        ("mfu_bf16_peak", f"all work over {peak.bfloat16:g} TFLOP/s, the BF16 peak of {peak.name}"),
        ("mfu_fp8_peak", f"all work over {peak.float8 or 0:g} TFLOP/s, its FP8 peak"),
        ("mfu_weighted", "time of the work at the peak of its precision, over its time"),
    ):
        share = getattr(speeds, name)
        absent = "it has no peak in a precision of this case"
        yield (name, "-", absent) if share is None else (name, f"{share:.2%}", definition)


def layout_sections(simulation: Simulation, verification: Verification | None = None) -> Iterator[Block]:
    """Show a case on its ranks, refusals first, and what simulated ranks were found to do."""
    nodes = f"{counted(simulation.nodes, 'node')} of {simulation.gpus_per_node} {simulation.device}"
    tokens = f"{counted(simulation.tokens, 'token')} of a data-parallel rank and step"
    of = f"{counted(simulation.world_size, 'rank')} on {nodes}, {tokens}: by formula, nothing was run"
    reasons = (
        *(f"REFUSED {reason.name}: {reason.text}" for reason in simulation.refused),
        *(f"warning {reason.name}: {reason.text}" for reason in simulation.warnings),
    )
    yield Section(blocks=(simulation.case, of, Items(reasons)))
    for table_of in (_matmul_table, _shard_table, _wire_table, _memory_table):
        table = table_of(simulation)
        yield table if table.rows else "sent: nothing"
    if simulation.experts is not None:
        yield _experts(simulation.experts)
    yield _time(simulation)
    yield Section(title="assumed", blocks=(Items(simulation.assumptions),))
    if verification is not None:
        yield _verification(verification)


def _experts(routed: Routed) -> Facts:
    longer = "" if routed.more_s is None else f"{routed.more_s:.3g} s a step more"
    larger = "" if not routed.more_bytes else f"{binary_bytes(routed.more_bytes)} more saved for backward"
    more = ", ".join(filter(None, (longer, larger)))
    return Facts(
        (
            ("parameters", f"{routed.parameters:,}, of which a token meets {routed.active_parameters:,}"),
            ("experts of a rank", f"{routed.local_experts}, which get {routed.rows:,} rows in a forward of a block"),
            ("sent to them and back", f"{binary_bytes(routed.sent_bytes)} in a step of this rank"),
            (f"with {IMBALANCE} times as many rows", more or "nothing more"),
        )
    )


def _time(simulation: Simulation) -> str:
    if simulation.step_s is None or simulation.tokens_s is None:
        return f"no time is predicted: the data sheet of {simulation.device} has no peak in the dtype of this case"
    return f"predicted: {simulation.step_s:.3g} s a step, {simulation.tokens_s:,.0f} tokens/s/GPU"


def _matmul_table(simulation: Simulation) -> Table:
    return Table(
        columns=("matmul", "role", "m", "n", "k", "precision", "16", "layers", "TP ranks"),
        rows=tuple(
            (
                matmul.linear,
                matmul.role,
                *map(str, (matmul.m, matmul.n, matmul.k)),
                matmul.precision,
                "REFUSED" if matmul.refused else "yes" if matmul.aligned else "no",
                str(matmul.layers),
                str(matmul.tp_ranks),
            )
            for matmul in simulation.matmuls
        ),
        right=(2, 3, 4, 7, 8),
    )


def _shard_table(simulation: Simulation) -> Table:
    def shown(sizes: Sequence[int]) -> str:
        return str(sizes[0]) if len(sizes) == 1 else f"uneven: {', '.join(map(str, sizes))}"

    return Table(
        columns=("weight", "rows on TP ranks", "columns", "rows on FSDP ranks", "padding", "empty"),
        rows=tuple(
            (
                shard.weight,
                shown(shard.tp_rows),
                str(shard.columns),
                shown(shard.fsdp_rows),
                f"{shard.padding:.1%}" if shard.padding else "",
                str(shard.empty_ranks or ""),
            )
            for shard in simulation.shards
        ),
        right=(2, 4, 5),
    )


def _wire_table(simulation: Simulation) -> Table:
    return Table(
        columns=("sent along", "ranks", "calls", "of amax", "inputs", "sent in rings", ""),
        rows=tuple(
            (
                traffic.axis,
                str(traffic.ranks),
                f"{traffic.calls:,}",
                f"{traffic.amax_reductions:,}",
                binary_bytes(traffic.payload_bytes),
                binary_bytes(traffic.sent_bytes),
                "between nodes" if traffic.crosses_nodes else "",
            )
            for traffic in simulation.wire
        ),
        right=(1, 2, 3, 4, 5),
    )


def _memory_table(simulation: Simulation) -> Table:
    notes = {"peak": binary_bytes(simulation.device_bytes)}
    return Table(
        columns=("memory", *(f"rank {memory.rank}" for memory in simulation.memory), ""),
        rows=tuple(
            (name, *(binary_bytes(getattr(memory, field)) for memory in simulation.memory), note + notes.get(field, ""))
            for field, (name, note) in _MEMORY.items()
        ),
        right=tuple(range(1, len(simulation.memory) + 1)),
    )


def _verification(verification: Verification) -> Section:
    ranks = ", ".join(map(str, verification.ranks))
    equal = f"{counted(len(verification.compared), 'number')} of ranks {ranks} compared in {verification.seconds:.0f} s"
    rows = tuple(
        f"{f'as recorded in {number.known}' if number.known else 'DIFFERS'}: rank {number.rank}, {number.what}: "
        f"{number.found:,}, formula {number.formula:,}"
        for number in verification.compared
        if number.differs or number.known
    )
    shares = ", ".join(f"{peak:.2f}" for peak in verification.peaks)
    peaks = (f"peak over its lower bound: {shares} (not compared)",) if verification.peaks else ()
    return Section(blocks=(f"simulated: {equal}, {len(verification.differing) or 'none'} differ", Items(rows), *peaks))


def sweep_sections(ranked: Sequence[Ranked]) -> Iterator[Block]:
    """Return the layouts that nothing refuses as a table, those that are refused by their reasons, and all reasons."""
    columns = (*_AXES.values(), "predicted s", "tokens/s", "peak at least", "sent", "between nodes", "")
    rows = tuple(_layout_row(layout) for layout in ranked if not layout.refused)
    reasons = {reason.name: reason.text for layout in ranked for reason in (*layout.refused, *layout.warnings)}
    yield Table(columns=columns, rows=rows, right=tuple(range(len(columns) - 1)))
    yield Items(tuple(_refused_lines(ranked)))
    yield Items(tuple(f"{name}: {text}" for name, text in reasons.items()))


def _layout_row(ranked: Ranked) -> tuple[str, ...]:
    notes = [*(() if ranked.fits else ("does not fit",)), *(reason.name for reason in ranked.warnings)]
    return (
        *(str(ranked.layout.mesh[axis]) for axis in _AXES),
        f"{ranked.step_s:.3g}" if ranked.step_s else "-",
        f"{ranked.tokens_s:,.0f}" if ranked.tokens_s else "-",
        *map(binary_bytes, (ranked.peak_bytes, ranked.sent_bytes, ranked.between_nodes_bytes)),
        ", ".join(notes),
    )


def _refused_lines(ranked: Sequence[Ranked]) -> Iterator[str]:
    """Yield one line for equal reasons at one degree of the innermost axis."""
    groups: dict[tuple[int, str], list[str]] = {}
    for layout in ranked:
        if layout.refused:
            names = ", ".join(reason.name for reason in layout.refused)
            *outer, inner = (layout.layout.mesh[axis] for axis in _AXES)
            groups.setdefault((inner, names), []).append(" x ".join(map(str, outer)))
    *outside, inside = _AXES.values()
    for (degree, names), outer_degrees in groups.items():
        yield f"REFUSED {inside} {degree} with {' x '.join(outside)} {', '.join(outer_degrees)}: {names}"


def speedup_sections(gains: Gains) -> Iterator[Section]:
    """Show what was asked, all tables, and what is assumed."""
    of_bf16 = f"BF16 is predicted to train {gains.tokens_s:,.0f} tokens/s/GPU."
    yield Section(blocks=(f"{gains.case} on {gains.device}: predicted, not measured", of_bf16))
    yield _table_section("speed", "Times as fast as BF16", _VARIANTS, _variant_rows(gains))
    step = Table(columns=_STEP, rows=tuple(_step_rows(gains)))
    yield Section(name="step", title=f"One step, {gains.recipe}", blocks=(step, Verbatim("\n".join(_step_bars(gains)))))
    title = f"Linears in one rank and step, {gains.recipe}; gain: of all matmuls with casts"
    yield _table_section("linears", title, _LINEARS, map(linear_row, gains.linears))
    rows = (row for linear in gains.linears for row in _matmul_rows(linear))
    yield _table_section("matmuls", "Matmuls of these linears", _MATMULS, rows)
    yield Section(name="assumptions", title="Assumptions", blocks=(Items(gains.assumptions),))


_VARIANTS = ("recipe", "compiled", "eager", "tokens/s", "known issue, or expected error")
_STEP = ("", "part of a step", "BF16 ms", "FP8 ms")
_LETTERS = dict(zip(_PARTS, "abcdefgh", strict=False))  # of the parts in the stacked bars of a step
_LINEARS = ("linear", "float8", "BF16 ms", "FP8 ms", "casts ms", "gain")
_MATMULS = ("linear", "matmul", "m", "n", "k", "16", "BF16 us", "FP8 us")


def _table_section(name: str, title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Section:
    return Section(name=name, title=title, blocks=(Table(columns=columns, rows=tuple(rows)),))


def _variant_rows(gains: Gains) -> Iterator[tuple[str, ...]]:
    for variant in gains.variants:
        if variant.refused:
            yield variant.name, "refused", "refused", "-", variant.refused
        else:
            times = f"{variant.compiled:.2f}", f"{variant.eager:.2f}", f"{variant.tokens_s:,.0f}"
            yield variant.name, *times, variant.fault


def _step_rows(gains: Gains) -> Iterator[tuple[str, ...]]:
    for field, name in _PARTS.items():
        times_ms = [getattr(step, field) * 1e3 for step in (gains.bf16, gains.float8)]
        if any(times_ms):
            yield _LETTERS.get(field, ""), name, *map(_short, times_ms)


def _step_bars(gains: Gains) -> Iterator[str]:
    longest_s = max(gains.bf16.total_s, gains.float8.total_s)
    for name, step in (("BF16", gains.bf16), ("FP8", gains.float8)):
        bar = "".join(letter * round(60 * getattr(step, part) / longest_s) for part, letter in _LETTERS.items())
        yield f"{name:<5} {bar} {_short(step.total_s * 1e3)} ms"


def linear_row(linear: Conversion) -> tuple[str, ...]:
    """Return the row of a linear: whether it is converted, its milliseconds and its gain."""
    kept = "refused" if linear.converted and linear.refused else "yes" if linear.converted else "kept"
    times = map(_short, (linear.bf16_ms, linear.float8_ms, linear.cast_ms + linear.padding_ms))
    return f"{linear.name} x{linear.count}", kept, *times, f"{linear.gain:.2f}"


def _matmul_rows(linear: Conversion) -> Iterator[tuple[str, ...]]:
    for matmul in linear.matmuls:
        taken = "yes" if matmul.aligned else "refused" if matmul.refused else "no"
        sizes = map(str, (matmul.m, matmul.n, matmul.k))
        yield linear.name, matmul.role, *sizes, taken, _short(matmul.bf16_us), _short(matmul.float8_us)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def speed_sections(report: SpeedReport) -> Iterator[Block]:
    """Return a section for every case that was timed against its BF16 counterpart, and how the interval was made."""
    yield from map(_case_section, report.cases)
    yield f"{report.method}; {report.warmup} steps of every job warm up"


def _case_section(case_speed: CaseSpeed) -> Section:
    if case_speed.speedup is None:
        failed = case_speed.failed
        why = "not timed" if failed is None else f"not timed: {failed.case_id} {failed.verdict.phrase}"
        return Section(title=case_speed.case_id, blocks=(why,))
    conditions = worst([pair.conditions for pair in case_speed.pairs]).words
    return Section(
        title=f"{case_speed.case_id}{_simulated(case_speed.device)}",
        blocks=(speedup_words(case_speed.speedup), conditions, _rates(case_speed)),
    )


def _rates(case_speed: CaseSpeed) -> Table:
    """Tokens, FLOPs and MFU of one device, of the case and of its BF16 counterpart."""
    times = case_speed.speedup
    assert times is not None, "the case was timed"
    of_both = ((case_speed.case_id, times.tokens_per_s), (case_speed.twin_id, times.twin_tokens_per_s))
    if not is_llama(parse_case_id(case_speed.case_id).target):  # FLOPs of another model are not known
        return Table(rows=tuple((name, f"{rate:,.1f} tokens/s") for name, rate in of_both))
    peak = peak_of_device(case_speed.device)
    speeds = (speed(parse_case_id(name), rate, peak) for name, rate in of_both)
    case, twin = (_speed_rows(each, peak, case_speed.device) for each in speeds)
    rows = ((name, own, other, words) for (name, own, words), (_, other, _) in zip(case, twin, strict=True))
    return Table(columns=("of one device", "FP8", "BF16", ""), rows=tuple(rows), right=(1, 2))
