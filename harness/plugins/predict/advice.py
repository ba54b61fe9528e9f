"""Does FP8 pay? Predictions for a case on a machine, recommendations from them, and assumptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from harness.errors import HarnessError
from harness.expect.work import gemms
from harness.matrix.case import Case, Float8
from harness.matrix.caseid import case_id
from harness.matrix.known import KnownFault, matching
from harness.matrix.recipes import Recipe
from harness.plugins.predict.cost import tokens_per_device
from harness.plugins.predict.gains import (
    Conversion,
    Variant,
    Vocabulary,
    compiled,
    conversions,
    costed,
    fsdp_bytes,
    variants,
    vocabularies,
)
from harness.plugins.predict.machine import Machine, require_formulas, require_multiplies
from harness.plugins.predict.roofline import EAGER_KERNELS, Step, predicted_step
from harness.plugins.predict.wire import axis_bytes_s

# How far predictions were from what was published (`tests/unit/performance/test_published.py`).
ERROR_H100, ERROR_ELSEWHERE = 0.06, 0.16


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Everything predicted for a case on a machine. Times are predicted, shapes and bytes are exact."""

    case: str
    device: str
    recipe: Recipe
    tokens_s: float  # of a device in BF16
    bf16: Step
    float8: Step
    bf16_step_s: float
    float8_step_s: float
    variants: tuple[Variant, ...]
    linears: tuple[Conversion, ...]
    vocabulary: tuple[Vocabulary, ...]
    recommendations: tuple[str, ...]
    assumptions: tuple[str, ...]


def advise(case: Case, machine: Machine, *, eager: bool = False, known: Sequence[KnownFault] = ()) -> Advice:
    """The advice for a case in bfloat16 with compiled blocks; without a recipe for the fastest one that has no fault.

    `known`: recorded faults. Raises `HarnessError` for a target whose model is not known, and for MXFP8 on a machine
    that does not multiply it.
    """
    require_formulas(case)
    if case.model.experts:
        what = "which grouped matmuls gain from FP8 was not measured."
        raise HarnessError(what, where=case_id(case), fix="ask for a dense model, or for `predict layouts`.")
    require_multiplies(machine, case)
    case = replace(case, train=replace(case.train, dtype="bfloat16"))
    case = case if eager else compiled(case)
    candidates = variants(case, machine.peak)
    faults = {name: matching(known, candidate) for name, candidate in candidates.items()}
    predictions = tuple(costed(name, candidate, faults[name], machine) for name, candidate in candidates.items())
    best = max(predictions, key=lambda variant: (not variant.fault, variant.ratio))
    case = case if case.float8.enabled else candidates[best.name]
    linears = conversions(case, machine)
    twin = replace(case, float8=Float8())
    steps = predicted_step(twin, machine), predicted_step(case, machine)
    return Advice(
        case=case_id(case),
        device=machine.peak.name,
        recipe=case.float8.recipe,
        tokens_s=tokens_per_device(twin, steps[0].total_s),
        bf16=steps[0],
        float8=steps[1],
        bf16_step_s=steps[0].total_s,
        float8_step_s=steps[1].total_s,
        variants=predictions,
        linears=linears,
        vocabulary=vocabularies(case, machine),
        recommendations=(
            *_about_recipes(predictions, best, faults),
            *_gather_in_float8(predictions, candidates, machine),
            *_keep_linears(linears),
            *_output_layer(linears[-1], steps[1].total_s),
            *_pad(case, linears),
            *_waits(case, steps[1]),
        ),
        assumptions=tuple(_assumptions(machine)),
    )


def _about_recipes(
    predictions: Sequence[Variant], best: Variant, faults: Mapping[str, Sequence[KnownFault]]
) -> Iterator[str]:
    if best.refused:
        yield f"No recipe trains this, by rule {best.refused}: {best.reason}."
        return
    if best.ratio <= 1:
        yield f"Stay in BF16: the fastest recipe, {best.name}, is predicted {best.ratio:.2f} times as fast."
    else:
        doubt = " That is within the error of predictions: measure it." if best.ratio < 1 + ERROR_H100 else ""
        yield f"Train with {best.name}: predicted {best.ratio:.2f} times as fast as BF16.{doubt}"
    for variant in predictions:
        if variant.fault and variant.ratio > best.ratio:
            fault = faults[variant.name][0]
            yield (
                f"{variant.name}, {variant.ratio:.2f} times as fast, has a recorded fault: {fault.reason} "
                f"({fault.link})"
            )
    if best.eager is not None and best.eager < 0.98 * best.ratio:
        least, most = min(EAGER_KERNELS.values()), max(EAGER_KERNELS.values())
        yield (
            f"Compile the blocks: eager, {best.name} is predicted {best.eager:.2f} times as fast as eager BF16. An "
            f"eager linear launches {least} to {most} more kernels, and each of them reads and writes a whole tensor."
        )


def _gather_in_float8(
    predictions: Sequence[Variant], candidates: Mapping[str, Case], machine: Machine
) -> Iterator[str]:
    ratios = {variant.name: variant.compiled for variant in predictions}
    plain, gathering = ratios.get("tensorwise"), ratios.get("tensorwise, float8 all-gather")
    if plain is None or gathering is None:
        return
    layout = candidates["tensorwise"].layout
    names = ("tensorwise", "tensorwise, float8 all-gather")
    before, after = (fsdp_bytes(candidates[name])["all_gather"] * layout.dp_shard / 1e9 for name in names)
    yield (
        f"Float8 all-gather changes the speed by {gathering / plain - 1:+.1%}: a rank gathers {after:.1f} instead of "
        f"{before:.1f} GB a step from {layout.dp_shard} ranks at {axis_bytes_s(layout, 'dp_shard', machine) / 1e9:.0f} "
        "GB/s, behind compute where there is enough."
    )


def _keep_linears(linears: Sequence[Conversion]) -> Iterator[str]:
    converted = [linear for linear in linears[:-1] if linear.converted]
    slow = [linear for linear in converted if linear.gain < 1]
    if slow and len(slow) == len(converted):
        yield "No linear of a block gains: with its casts each of them is slower in float8."
    elif slow:
        names = " ".join(f"--filter-fqns {linear.name}" for linear in slow)
        gains = ", ".join(f"{linear.name} ({linear.gain:.2f} times as fast)" for linear in slow)
        yield f"Do not convert what becomes slower with its casts: {gains}. {names}"


def _output_layer(output: Conversion, step_s: float) -> Iterator[str]:
    saved = (output.bf16_ms - output.float8_ms - output.cast_ms) / 1e3 / step_s
    refused = f" Float8 matmuls refuse its shard of {output.matmuls[0].n} rows." if output.refused else ""
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
            multiple = case.float8.traits.multiple
            fix = "" if case.float8.traits.in_blocks else "--pad-inner-dim, or "
            yield f"{wgrad.k} tokens of a rank are no multiple of {multiple}: {fix}another batch or length."
        return
    padded = sum(linear.padding_ms for linear in linears if linear.converted)
    matmuls = sum(linear.float8_ms for linear in linears if linear.converted)
    if not matmuls:
        return
    eager = ", aligned operands too" if case.compile == "none" else ""
    megabytes = max(gemm.copied_bytes for gemm in gemms(case)) / 1e6  # of one matmul: they live while it runs
    yield (
        f"--pad-inner-dim copies operands for {padded / matmuls:.0%} of the time of the float8 matmuls{eager}, into "
        f"{megabytes:.0f} MB at most."
    )


def _waits(case: Case, step: Step) -> Iterator[str]:
    share = step.tensor_parallel_s / step.total_s
    if case.layout.tp > 1 and not case.layout.async_tp and share > 0.1:
        yield f"Tensor parallelism waits for wires {share:.0%} of the step: --async-tp hides a part of that."


def _assumptions(machine: Machine) -> Iterator[str]:
    peak = machine.peak
    h100 = peak.name == "h100"
    error, devices = (ERROR_H100, "Meta's H100, with 2.4 TB/s") if h100 else (ERROR_ELSEWHERE, "B200 and MI300X")
    yield (
        f"times are a model of {peak.name}: {peak.bfloat16:g} and {peak.float8:g} TFLOP/s, {peak.memory_tb_s:g} TB/s, "
        f"{machine.gpus_per_node} devices a node, {machine.network_gb_s:g} GB/s of network for each"
    )
    yield f"predicted speed-ups were within {error:.0%} of those published for {devices}"
    yield "blocks are compiled where not said otherwise; under TP tensorwise has float8 TP styles, others plain ones"
    yield "the host is modelled for eager blocks alone: compiled small models are slower than predicted"
    yield from machine.rates.words
