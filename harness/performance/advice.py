"""Does FP8 pay? Predicted speed-ups of a case with each recipe, what each linear gains, and recommendations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from harness.matrix.case import Case, Float8
from harness.matrix.caseid import case_id
from harness.matrix.known import KnownFault, matching
from harness.matrix.linears import OUTPUT_FQN
from harness.matrix.recipes import Recipe
from harness.performance.casts import casts
from harness.performance.converting import Conversion, conversions
from harness.performance.gemms import gemms
from harness.performance.machine import SOURCES, Machine
from harness.performance.models import require_formulas
from harness.performance.padding import Vocabulary, vocabularies
from harness.performance.recommendations import ERROR_ELSEWHERE, ERROR_H100, about_recipes, about_the_rest
from harness.performance.roofline import Step, cast_s, gemm_s, predicted_step
from harness.performance.variants import Variant, compiled, costed, tokens_s, variants


class VocabularyCost(msgspec.Struct, frozen=True, kw_only=True):
    """A way to train the vocabulary; `output_ms`: matmuls and casts of the output layer in one rank and step."""

    name: str
    shards: tuple[int, ...]
    refused: tuple[int, ...]
    added_rows: int
    added_bytes: int
    output_ms: float


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is said about a case on a machine. Times are predicted, shapes and bytes are exact."""

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
    vocabulary: tuple[VocabularyCost, ...]
    recommendations: tuple[str, ...]
    assumptions: tuple[str, ...]


def advise(case: Case, machine: Machine, *, eager: bool = False, known: Sequence[KnownFault] = ()) -> Advice:
    """The advice for a case in bfloat16 with compiled blocks; without a recipe for the fastest one that has no fault.

    `known`: recorded faults. Raises `HarnessError` for a target whose model is not known.
    """
    require_formulas(case)
    case = replace(case, train=replace(case.train, dtype="bfloat16"))
    case = case if eager else compiled(case)
    candidates = dict(variants(case))
    faults = {name: matching(known, each) for name, each in candidates.items()}
    found = tuple(costed(name, each, faults[name], machine) for name, each in candidates.items())
    best = max(found, key=lambda each: (not each.fault, each.ratio))
    case = case if case.float8.enabled else candidates[best.name]
    linears = conversions(case, machine)
    twin = replace(case, float8=Float8())
    steps = predicted_step(twin, machine), predicted_step(case, machine)
    told = (*about_recipes(found, best, faults), *about_the_rest(case, found, linears, machine))
    return Advice(
        case=case_id(case),
        device=machine.peak.name,
        recipe=case.float8.recipe,
        tokens_s=tokens_s(twin, machine),
        bf16=steps[0],
        float8=steps[1],
        bf16_step_s=steps[0].total_s,
        float8_step_s=steps[1].total_s,
        variants=found,
        linears=linears,
        vocabulary=tuple(_vocabulary_cost(each, machine) for each in vocabularies(case)),
        recommendations=told,
        assumptions=tuple(_assumptions(machine)),
    )


def _vocabulary_cost(found: Vocabulary, machine: Machine) -> VocabularyCost:
    case = replace(found.case, model=replace(found.case.model, layers=1))
    output = sum(gemm_s(case, gemm, machine) for gemm in gemms(case) if gemm.fqn == OUTPUT_FQN)
    casting = sum(cast_s(cast, machine) for cast in casts(case) if cast.fqn == OUTPUT_FQN)
    return VocabularyCost(
        name=found.name,
        shards=found.shards,
        refused=found.refused,
        added_rows=found.added_rows,
        added_bytes=found.added_bytes,
        output_ms=(output + casting) * 1e3,
    )


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
    rates = {name: getattr(machine.rates, name) for name in SOURCES}
    yield from (f"{name} {rates[name]:g}: {source}" for name, source in SOURCES.items())
