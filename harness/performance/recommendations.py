"""What is recommended for a case: a sentence each, from what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.expect.traffic import expected_transfers
from harness.matrix.case import Case
from harness.matrix.known import KnownFault
from harness.performance.casts import EAGER_KERNELS
from harness.performance.converting import Conversion
from harness.performance.links import axis_bytes_s
from harness.performance.machine import Machine
from harness.performance.padding import padding_memory_bytes
from harness.performance.roofline import predicted_step
from harness.performance.variants import Variant, variants

# How far predictions were from what was published (`tests/unit/performance/test_published.py`).
ERROR_H100, ERROR_ELSEWHERE = 0.06, 0.16


def about_recipes(found: Sequence[Variant], best: Variant, faults: Mapping[str, Sequence[KnownFault]]) -> Iterator[str]:
    """Which recipe, what is recorded of those that are faster, and whether to compile."""
    if best.refused:
        yield f"No recipe trains this, by rule {best.refused}: {best.reason}."
        return
    if best.ratio <= 1:
        yield f"Stay in BF16: the fastest recipe, {best.name}, is predicted {best.ratio:.2f} times as fast."
    else:
        doubt = " That is within the error of predictions: measure it." if best.ratio < 1 + ERROR_H100 else ""
        yield f"Train with {best.name}: predicted {best.ratio:.2f} times as fast as BF16.{doubt}"
    for each in found:
        if each.fault and each.ratio > best.ratio:
            fault = faults[each.name][0]
            yield f"{each.name}, {each.ratio:.2f} times as fast, has a recorded fault: {fault.reason} ({fault.link})"
    if best.eager is not None and best.eager < 0.98 * best.ratio:
        least, most = min(EAGER_KERNELS.values()), max(EAGER_KERNELS.values())
        yield (
            f"Compile the blocks: eager, {best.name} is predicted {best.eager:.2f} times as fast as eager BF16. An "
            f"eager linear launches {least} to {most} more kernels, and each of them reads and writes a whole tensor."
        )


def about_the_rest(
    case: Case, found: Sequence[Variant], linears: Sequence[Conversion], machine: Machine
) -> Iterator[str]:
    """Float8 all-gather, linears that lose, the output layer, padding, and what waits for wires."""
    yield from _gather_in_float8(found, dict(variants(case)), machine)
    yield from _keep_linears(linears)
    yield from _output_layer(case, linears, machine)
    yield from _pad(case, linears)
    yield from _waits(case, machine)


def _gather_in_float8(found: Sequence[Variant], candidates: Mapping[str, Case], machine: Machine) -> Iterator[str]:
    ratios = {each.name: each.compiled for each in found}
    plain, gathering = ratios.get("tensorwise"), ratios.get("tensorwise, float8 all-gather")
    if plain is None or gathering is None:
        return
    layout = candidates["tensorwise"].layout
    before, after = (_gathered_gb(candidates[name]) for name in ("tensorwise", "tensorwise, float8 all-gather"))
    yield (
        f"Float8 all-gather changes the speed by {gathering / plain - 1:+.1%}: a rank gathers {after:.1f} instead of "
        f"{before:.1f} GB a step from {layout.dp_shard} ranks at {axis_bytes_s(layout, 'dp_shard', machine) / 1e9:.0f} "
        "GB/s, behind compute where there is enough."
    )


def _gathered_gb(case: Case) -> float:
    """What FSDP's all-gathers of weights bring to a rank in one step."""
    transfers = expected_transfers(case, step=2, rank=0)
    gathers = (each for each in transfers if (each.axis, each.kind) == ("dp_shard", "all_gather"))
    return sum(each.payload_bytes for each in gathers) * case.layout.dp_shard / 1e9


def _keep_linears(linears: Sequence[Conversion]) -> Iterator[str]:
    converted = [each for each in linears[:-1] if each.converted]
    slow = [each for each in converted if each.gain < 1]
    if slow and len(slow) == len(converted):
        yield "No linear of a block gains: with its casts each of them is slower in float8."
    elif slow:
        names = " ".join(f"--filter-fqns {each.name}" for each in slow)
        gains = ", ".join(f"{each.name} ({each.gain:.2f} times as fast)" for each in slow)
        yield f"Do not convert what becomes slower with its casts: {gains}. {names}"


def _output_layer(case: Case, linears: Sequence[Conversion], machine: Machine) -> Iterator[str]:
    output = linears[-1]
    forward = output.matmuls[0]
    saved = (output.bf16_ms - output.float8_ms - output.cast_ms) / 1e3 / predicted_step(case, machine).total_s
    refused = f" Float8 matmuls refuse its shard of {forward.n} rows." if output.refused else ""
    if not output.converted:
        yield (
            f"Keep the output layer in BF16, as torchtitan does: logits decide the loss, and float8 would change the "
            f"step by {-saved:+.1%}.{refused}"
        )
    elif refused:
        yield f"The output layer cannot be converted.{refused} Pad the vocabulary, or leave --output-layer out."


def _pad(case: Case, linears: Sequence[Conversion]) -> Iterator[str]:
    if not case.float8.pad_inner_dim:
        wgrad = linears[0].matmuls[-1]
        if wgrad.refused:
            yield f"{wgrad.k} tokens of a rank are no multiple of 16: --pad-inner-dim, or another batch or length."
        return
    padded = sum(each.padding_ms for each in linears if each.converted)
    matmuls = sum(each.float8_ms for each in linears if each.converted)
    if not matmuls:
        return
    eager = ", aligned operands too" if case.compile == "none" else ""
    megabytes = padding_memory_bytes(case) / 1e6
    yield (
        f"--pad-inner-dim copies operands for {padded / matmuls:.0%} of the time of the float8 matmuls{eager}, into "
        f"{megabytes:.0f} MB at most."
    )


def _waits(case: Case, machine: Machine) -> Iterator[str]:
    step = predicted_step(case, machine)
    share = step.tensor_parallel_s / step.total_s
    if case.layout.tp > 1 and not case.layout.async_tp and share > 0.1:
        yield f"Tensor parallelism waits for wires {share:.0%} of the step: --async-tp hides a part of that."
