"""Builders of what tests are about: a case, what its ranks record, and what it is judged by.

Whatever they build is sound: `make_run(case)` trained as the case asks and passes every check that it recorded enough
for. A test changes the one thing that it is about, by keyword.
"""

from __future__ import annotations

import datetime
import functools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from harness.checks.catalogue import CHECKS, probes_of
from harness.checks.check import Rule, Witnesses
from harness.checks.traffic import expected_traffic
from harness.evidence.golden import Golden, Provenance
from harness.evidence.tolerance import Tolerance
from harness.expect.expectations import Expectations
from harness.matrix.axes import case_from_axes
from harness.matrix.case import Case
from harness.matrix.caseid import family_id
from harness.matrix.numerics import VIRTUAL_DEVICE
from harness.matrix.records import KnownFault, Symptom
from harness.matrix.rules import Refusal
from harness.result import (
    Attempt,
    CaseResult,
    CastRange,
    Curve,
    Environment,
    Measured,
    Multiplied,
    RunEnd,
    RunResult,
    RunStart,
    Sent,
)
from harness.text import filled
from harness.trace import RankFailure, RankTrace, Run, StepTrace
from harness.trace.counts import LiveMemory, LiveTensor, SavedMemory, TrafficRecord
from harness.trace.graphs import FusedCall, GraphTrace, PartitionRecord
from harness.trace.model import SKETCH_SIZE, ModelRecord, ModuleDistance, Parameter, TensorSketch
from harness.trace.operands import CastRecord, GemmRole, MatmulRecord, OperandTrace, ScaleSummary
from harness.verdict import Finding, Value, Verdict

SOFTWARE = {"torch": "2.13.0+cpu", "torchao": "0.18.0"}  # what the formulas were verified with
WQ = "layers.0.attention.wq"


def make_case(**axes: object) -> Case:
    """The case with these axis values; every other axis has its default."""
    return case_from_axes(axes)


# Runs


def make_steps(
    losses: Sequence[float], *, grad_norm: float = 1.0, calls: int | Sequence[int] = 0
) -> tuple[StepTrace, ...]:
    """Steps 1 to n with these losses; `calls`: of scaled matmuls, one number for all steps or one for each."""
    counts = [calls] * len(losses) if isinstance(calls, int) else calls
    return tuple(
        StepTrace(step=number, loss=loss, grad_norm=grad_norm, scaled_mm_calls=count, seconds=0.1)
        for number, (loss, count) in enumerate(zip(losses, counts, strict=True), 1)
    )


def falling_losses(case: Case) -> tuple[float, ...]:
    """A loss for every step; their differences are exact."""
    return tuple(8.0 - step / 4 for step in range(case.train.steps))


@functools.cache
def _conversion(case: Case) -> tuple[tuple[str, ...], int]:
    """The linears that are converted, and how many scaled matmuls a step of one rank has."""
    expect = Expectations(case)
    return expect.converted_fqns, expect.scaled_mm_calls[0]


def make_trace(
    case: Case | None = None,
    rank: int = 0,
    *,
    losses: Sequence[float] | None = None,
    grad_norm: float = 1.0,
    calls: int | Sequence[int] | None = None,
    **changes: Any,
) -> RankTrace:
    """What one rank records when it trains the case. What only probes record is None unless it is given."""
    case = case or Case()
    fqns, expected_calls = _conversion(case)
    trace = RankTrace(
        rank=rank,
        steps=make_steps(
            falling_losses(case) if losses is None else losses,
            grad_norm=grad_norm,
            calls=expected_calls if calls is None else calls,
        ),
        converted_fqns=fqns,
        unmatched_filters=(),
        peak_memory_bytes=0,
        data_digest="d",
        software=SOFTWARE,
        device="cpu",
        virtual=("collectives", "scaled_mm"),
    )
    return replace(trace, **changes)


def make_failure(rank: int = 0, message: str = "ValueError: x", **changes: Any) -> RankFailure:
    """How a rank that raised in its first step ended."""
    failure = RankFailure(rank=rank, kind="raised", message=message, traceback="", phase="step 1", consequence=False)
    return replace(failure, **changes)


def run_of(*ends: RankTrace | RankFailure) -> Run:
    """The run whose ranks ended in these ways."""
    return Run(
        traces=tuple(end for end in ends if isinstance(end, RankTrace)),
        failures=tuple(end for end in ends if isinstance(end, RankFailure)),
    )


def make_run(case: Case, **changes: Any) -> Run:
    """A run of the case that trained on all of its ranks; the keywords are those of `make_trace`."""
    return run_of(*(make_trace(case, rank, **changes) for rank in range(case.world_size)))


def with_rank(run: Run, rank: int, change: Callable[[RankTrace], RankTrace]) -> Run:
    """The run with the trace of one rank changed."""
    return run_of(*(change(trace) if trace.rank == rank else trace for trace in run.traces), *run.failures)


def with_step(run: Run, rank: int, step: int, **changes: float | None) -> Run:
    """The run with other numbers in one step of one rank."""

    def change(trace: RankTrace) -> RankTrace:
        return replace(trace, steps=tuple(replace(s, **changes) if s.step == step else s for s in trace.steps))

    return with_rank(run, rank, change)


# Traffic and memory


def make_sent(step: int, *, kind: str = "all_gather", op: str = "", times: int = 4, **changes: Any) -> TrafficRecord:
    """Collectives of 512 bytes each along dp_shard in one step."""
    sizes = changes.pop("sizes", {512: times})
    sent = TrafficRecord(
        step=step,
        axis="dp_shard",
        kind=kind,
        op=op,
        dtype="uint8",
        payload_bytes=sum(size * count for size, count in sizes.items()),
        sizes=sizes,
    )
    return replace(sent, **changes)


@functools.cache
def traffic_of(case: Case, rank: int = 0) -> tuple[TrafficRecord, ...]:
    """What a correct run of the case records of its collectives."""
    expect = Expectations(case)
    return tuple(
        TrafficRecord(step=step, **key._asdict(), payload_bytes=amount.payload_bytes, sizes=dict(amount.sizes))
        for step in range(1, case.train.steps + 1)
        for key, amount in expected_traffic(expect, step=step, rank=rank).items()
    )


def saved_as(step: int, by_dtype: dict[str, int]) -> SavedMemory:
    """So many bytes of each dtype saved in one step."""
    return SavedMemory(step=step, saved_bytes=sum(by_dtype.values()), by_dtype=by_dtype)


def make_saved(step: int, saved_bytes: int) -> SavedMemory:
    """What is saved in one step, and two tensors that are alive before backward."""
    alive = LiveTensor(dtype="float32", shape=(16,), nbytes=64, holder="")
    live = (
        LiveMemory(moment="forward", scalars=2, tensors=(alive, alive)),
        LiveMemory(moment="step", scalars=1, tensors=()),
    )
    return replace(saved_as(step, {"float32": saved_bytes}), live=live)


def with_sent(run: Run, rank: int, *more: TrafficRecord) -> Run:
    """The run in which one rank sent more."""
    return with_rank(run, rank, lambda trace: replace(trace, traffic=(*(trace.traffic or ()), *more)))


def make_signed_run(*, steps: int, **changes: Any) -> Run:
    """A run of two ranks that do the same in every step, and recorded it."""
    given = {
        "losses": tuple(8.0 - step for step in range(steps)),
        "calls": 4,
        "traffic": tuple(make_sent(step) for step in range(1, steps + 1)),
        "saved_memory": tuple(make_saved(step, 128) for step in range(1, steps + 1)),
    }
    return run_of(*(make_trace(rank=rank, **(given | changes)) for rank in (0, 1)))


# Operands


def make_scale(value: float = 1.0, shape: tuple[int, ...] = (), **changes: Any) -> ScaleSummary:
    """A scale tensor with one value, rounded to float32."""
    (value,) = struct.unpack("f", struct.pack("f", value))
    scale = ScaleSummary(
        shape=shape,
        dtype="float32",
        minimum=value,
        maximum=value,
        total=value,
        log2_total=0.0,
        digest=repr(value),
        power_of_two=math.frexp(value)[0] == 0.5,
    )
    return replace(scale, **changes)


def make_cast(*, amax: float = 2.0, scale: ScaleSummary | None = None, **changes: Any) -> CastRecord:
    """A tensorwise cast of one whole tensor to e4m3 with the scale for its largest magnitude."""
    scale = make_scale(448 / amax) if scale is None else scale
    cast = CastRecord(
        index=0,
        step=1,
        fqn=WQ,
        role="input",
        phase="forward",
        shape=(16, 32),
        local_shape=(16, 32),
        placements=(),
        mesh_axes=(),
        source_dtype="float32",
        target_dtype="float8_e4m3fn",
        axiswise_dim=None,
        scale=scale,
        amax=amax,
        scaled_amax_minimum=amax * scale.maximum,
        scaled_amax_maximum=amax * scale.maximum,
        saturated=0,
        flushed=0,
        nonfinite=0,
        mismatched=0,
        elements=16 * 32,
        data_digest="data",
    )
    return replace(cast, **changes)


def make_matmul(a: CastRecord, b: CastRecord, gemm: GemmRole = "forward", **changes: Any) -> MatmulRecord:
    """The matmul of what was cast last as its operands, in the step and linear of the first one."""
    matmul = MatmulRecord(
        index=0,
        step=a.step,
        fqn=a.fqn,
        gemm=gemm,
        m=16,
        k=32,
        n=16,
        a_dtype=a.target_dtype,
        b_dtype=b.target_dtype,
        a_scale=make_scale(1 / a.scale.maximum),
        b_scale=make_scale(1 / b.scale.maximum),
        a_digest=a.data_digest,
        b_digest=b.data_digest,
    )
    return replace(matmul, **changes)


def with_casts(run: Run, change: Callable[[CastRecord], CastRecord], *, rank: int | None = None) -> Run:
    """The run with every cast of one rank, or of all of them, changed."""
    traces = []
    for trace in run.traces:
        assert trace.operands is not None
        casts = tuple(change(cast) for cast in trace.operands.casts)
        operands = OperandTrace(casts=casts, matmuls=trace.operands.matmuls)
        traces.append(replace(trace, operands=operands) if rank in (None, trace.rank) else trace)
    return run_of(*traces)


# Graphs


def make_partition(case: Case | None = None, **changes: Any) -> PartitionRecord:
    """How the partitioner divides a block of 9 operators; of a checkpointed one it saves nothing but the input."""
    wrapped = case is not None and case.checkpointing.mode != "none"
    partition = PartitionRecord(
        forward=9,
        marked=9 if wrapped else 0,
        saved_bytes=0 if wrapped else 64,
        kept=(),
        repeated=8 if wrapped else 2,
        repeated_in_passes=8 if wrapped else 2,
        unequal=(),
    )
    return replace(partition, **changes)


def make_graphs(*partitions: PartitionRecord, **changes: Any) -> GraphTrace:
    """What one rank records of graphs that were divided like this and executed nothing."""
    return replace(GraphTrace(graphs=(), calls=(), casts=(), partitions=partitions, workarounds=()), **changes)


def make_fused(**changes: Any) -> FusedCall:
    """One execution of a fused operator whose 8 rows are those of its unfused form."""
    call = FusedCall(
        step=1,
        phase="forward",
        operator="fused_all_gather_matmul",
        collective="all_gather",
        times=1,
        rows=8,
        wrong_rows=0,
        example=None,
    )
    return replace(call, **changes)


# Models and sketches


def make_parameter(fqn: str, **changes: Any) -> Parameter:
    """A weight [4, 4], of which each of two ranks holds a half."""
    made = Parameter(fqn=fqn, shape=(4, 4), dtype="float32", local_elements=8, axes=("dp_shard",), trained=True)
    return replace(made, **changes)


def make_model(*parameters: Parameter, **changes: Any) -> ModelRecord:
    """A model that has these parameters and nothing else."""
    made = ModelRecord(linears=(), parameters=parameters, checkpointed=(), compiled=(), calls={}, recomputed={})
    return replace(made, **changes)


def make_sketch(
    fqn: str, step: int = 1, kind: str = "grad", *, value: float = 1.0, part: int = 0, parts: int = 1, **changes: Any
) -> TensorSketch:
    """One of `parts` equal pieces of a tensor [4, 4] whose norm and whose every sum is `value`."""
    sketch = TensorSketch(
        fqn=fqn,
        kind=kind,  # type: ignore[arg-type]
        step=step,
        shape=(4, 4),
        offset=(4 // parts * part, 0),
        local_shape=(4 // parts, 4),
        owner=True,
        norm_squared=value * value / parts,
        sums=struct.pack(f"<{SKETCH_SIZE}d", *[value / parts] * SKETCH_SIZE),
        digest=f"{part} {value!r}",
    )
    return replace(sketch, **changes)


def with_sketches(run: Run, change: Callable[[TensorSketch], TensorSketch | None], *, rank: int | None = None) -> Run:
    """The run with every sketch of one rank, or of all of them, changed; None takes it out."""
    traces = []
    for trace in run.traces:
        kept = tuple(new for sketch in trace.sketches or () if (new := change(sketch)) is not None)
        traces.append(replace(trace, sketches=kept) if rank in (None, trace.rank) else trace)
    return run_of(*traces)


# What a run is judged by, and what comes of it


def make_distance(**changes: Any) -> ModuleDistance:
    """The distance of one tensor of a module from its replay: none."""
    made = ModuleDistance(
        step=1,
        part=0,
        fqn="layers.0.attention.wq",
        kind="grad_input",
        dtype="bfloat16",
        distance=0.0,
        spread=1.0,
        parts=2,
    )
    return replace(made, **changes)


def make_golden(
    case: Case | None = None, losses: Sequence[float] | None = None, *, reason: str = "first one", **changes: Any
) -> Golden:
    """The golden that `make_run(case)` meets exactly."""
    case = case or Case()
    losses = tuple(falling_losses(case) if losses is None else losses)
    golden = Golden(
        family=family_id(case),
        hardware="cpu",
        case_id="single-bf16-v2048-b16",
        losses=losses,
        grad_norms=tuple(1.0 + index for index in range(len(losses))),
        data_digest="d",
        provenance=Provenance(
            software=SOFTWARE, device="cpu", commit="abc", command="x", reason=reason, created="2026-01-01"
        ),
    )
    return replace(golden, **changes)


def make_tolerance(*per_step: float, name: str = "loss_vs_golden", key: str = "tiny-bf16-float32") -> Tolerance:
    """A tolerance that allows these distances, one a step."""
    return Tolerance(name=name, key=key, per_step=per_step, evidence="samples")


def make_witnesses(case: Case, **given: Any) -> Witnesses:
    """What the case is judged by: witnesses by their field, expectations by their attribute instead of the formula."""
    fields = {name: given.pop(name) for name in Witnesses.__struct_fields__ if name in given}
    expect = Expectations(case, numerics=given.pop("numerics", VIRTUAL_DEVICE))
    for name, value in given.items():
        assert hasattr(Expectations, name), f"{name} is neither a witness nor an expectation"
        setattr(expect, name, value)
    return Witnesses(expect=expect, **fields)


def make_refusal(**changes: Any) -> Refusal:
    """A refusal of any case, with one of torch's messages."""
    refusal = Refusal(
        name="output_alignment",
        reason="1128 is not a multiple of 16",
        source="https://example.org",
        axes=(),
        when=lambda case: True,
        check="alignment",
        pattern=r"Expected both dimensions of mat2 to be divisible by 16",
    )
    return replace(refusal, **changes)


def make_known(**changes: Any) -> KnownFault:
    """The record of a fault that moves the loss."""
    fault = KnownFault(
        name="recorded",
        where="recipe!=bf16",
        verdict=Verdict.NUMERIC,
        requires=(Symptom(rule="loss_vs_golden/loss"),),
        link="https://example.org/1",
        torch=">=2.13",
        review_by=datetime.date(2999, 1, 1),
        reason="An example.",
    )
    return replace(fault, **changes)


def make_attempt(verdict: Verdict = Verdict.PASSED, message: str = "", **changes: Any) -> Attempt:
    """One try of a second and a quarter on two CPUs."""
    return replace(Attempt(verdict=verdict, message=message, wall_s=1.25, cpu_s=2.5), **changes)


def make_result(case_id: str = "a", verdict: Verdict = Verdict.PASSED, **changes: Any) -> CaseResult:
    """The result of one attempt of which nothing but the verdict is known, and what the ranks of `run` reported."""
    run: Run | None = changes.get("run")
    steps = min(run.traces, key=lambda trace: trace.rank).steps if run is not None and run.traces else ()
    result = CaseResult(
        case_id=case_id,
        verdict=verdict,
        findings=(),
        attempts=(make_attempt(verdict),),
        world_size=4,
        losses=tuple(step.loss for step in steps),
        grad_norms=tuple(step.grad_norm for step in steps),
        failures=run.failures if run is not None else (),
        command=f"fp8-harness run {case_id}",
    )
    return replace(result, **changes)


def make_cast_range(step: int = 1, fqn: str = WQ, **changes: Any) -> CastRange:
    """The casts of the input of a linear in one step."""
    cast = CastRange(
        fqn=fqn, role="input", step=step, amax=2.0, scale_min=224.0, scale_max=224.0, saturated=0.0, flushed=0.01
    )
    return replace(cast, **changes)


def make_measured(**changes: Any) -> Measured:
    """The numbers of a case of two steps that may be 0.01 nats from its golden."""
    unchanged = Measured(
        curves={"case": Curve(losses=(8.0, 7.5), grad_norms=(1.0, 0.9))},
        allowed_loss=(0.01, 0.01),
        scaled_mm_calls=42,
        flops={"matmuls in float8": Multiplied(calls=42, flops=8400)},
        wire={"all_gather in uint8 along dp_shard": Sent(calls=4, payload_bytes=4096)},
        saved_bytes=1000,
        digests={"casts": "c1", "gradients": "g1"},
        casts=(make_cast_range(1), make_cast_range(2)),
    )
    return replace(unchanged, **changes)


def make_results(*results: CaseResult, **facts: Any) -> RunResult:
    """A run of these cases on one kind of CPU."""
    environment = Environment(device="cpu", cpu="a CPU", threads=2, platform="Linux x86_64", commit="c0ffee")
    start = RunStart(environment=environment, name="a", started="2026-11-20T12:00:00+00:00")
    return with_facts(RunResult(results=results, start=start, end=RunEnd(wall_s=5.0)), **facts)


def with_facts(run: RunResult, **facts: Any) -> RunResult:
    """The run with these facts of its start or its end."""
    start, end = ({name: facts.pop(name) for name in [*facts] if hasattr(part, name)} for part in (run.start, run.end))
    assert not facts, f"neither the start nor the end of a run has {', '.join(facts)}"
    return replace(run, start=replace(run.start, **start), end=replace(run.end, **end))


def a_finding(*, check: str = "", message: str = "", rule: str = "", **fields: Any) -> Finding:
    """A finding of a check with this sentence: by a rule of its own, unless `rule` names another of the check."""
    values = {"sentence": message, **fields.pop("values", {})}
    return Finding(rule=rule or f"{check}/test", says="{sentence}", values=values, **fields)


def sentence(rule: Rule, **values: Value) -> str:
    """The sentence of a finding by the rule with these values and places, as reports show it."""
    return filled(rule.says, values)


def rules(findings: Iterable[Finding]) -> set[str]:
    """The rules that the findings are about."""
    return {finding.rule for finding in findings}


def not_judged(of: Case | Expectations, *, device: str = "cpu") -> dict[str, str]:
    """The checks that can say nothing of a case on a device, each with the reason."""
    expect = Expectations(of) if isinstance(of, Case) else of
    reasons = ((check.name, check.says_nothing_of(expect, device)) for check in CHECKS)
    return {name: reason for name, reason in reasons if reason}


def partly_judged(expect: Expectations, *, device: str = "cpu") -> dict[str, str]:
    """The checks that judge a part of a case on a device, each with what they do not judge."""
    parts = ((check.name, check.partly(expect, device)) for check in CHECKS)
    return {name: part for name, part in parts if part}


def probes_for(case: Case) -> tuple[str, ...]:
    """What ranks of the virtual device are asked to record of a case."""
    return probes_of(Expectations(case), "cpu")
