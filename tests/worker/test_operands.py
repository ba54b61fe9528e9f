"""The operand probe sees every cast and matmul as it is and changes nothing; its checks tell faults from clean runs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torchao.float8 import float8_linear, float8_scaling_utils

from harness.checks.divergence import first_divergence
from harness.checks.recompute import check_recompute
from harness.checks.scales import check_scales
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case, Checkpointing, Float8, Layout, Model, Train
from harness.spec.gemms import gemms, scaled_mm_calls
from harness.trace import RankTrace, Run
from harness.verdict import Finding
from harness.worker.probes.castnumbers import Cast, CastMeter, measure_cast, summarize_scale
from harness.worker.probes.digests import digest, ordered_digest
from harness.worker.probes.operands import OperandProbe
from harness.worker.virtual import scaled_mm

WITNESSES = Witnesses(golden=None, tolerance=None, refusal=None, expected_fqns=(), expected_scaled_mm=0)
SHARP = Train(steps=2, global_batch=4, seq_len=32, dtype="float64")
FLOAT32 = Train(steps=2, global_batch=4, seq_len=32)
MIXED = Train(steps=2, global_batch=4, seq_len=32, dtype="bfloat16")


def tensorwise(**rest: object) -> Float8:
    return Float8(**{"recipe": "tensorwise", **rest})  # type: ignore[arg-type]


GATHERED = tensorwise(fp8_all_gather=True, precompute_scale=True, output_layer=True)
FULL, SELECTIVE = Checkpointing(mode="full"), Checkpointing(mode="selective_op")

CLEAN = {
    "single": Case(float8=tensorwise(), train=FLOAT32),
    "single-bf16-act": Case(float8=tensorwise(), train=MIXED),
    "tp2": Case(layout=Layout(tp=2), float8=tensorwise(output_layer=True), train=SHARP),
    "tp2-f32": Case(layout=Layout(tp=2), float8=tensorwise(), train=FLOAT32),
    "tp4-2050": Case(layout=Layout(tp=4), model=Model(vocab_size=2050), float8=tensorwise(), train=SHARP),
    "tp2-styles-ac": Case(layout=Layout(tp=2), float8=tensorwise(tp_styles="float8"), checkpointing=FULL, train=SHARP),
    "tp2-ac.op": Case(layout=Layout(tp=2), float8=tensorwise(), checkpointing=SELECTIVE, train=SHARP),
    "fsdp2": Case(layout=Layout(dp_shard=2), float8=tensorwise(), train=FLOAT32),
    "fsdp2-ag.pre": Case(layout=Layout(dp_shard=2), float8=GATHERED, train=FLOAT32),
    "fsdp2-ag-ac.layer": Case(
        layout=Layout(dp_shard=2),
        float8=tensorwise(fp8_all_gather=True),
        checkpointing=Checkpointing(mode="selective_layer"),
        train=MIXED,
    ),
    "fsdp3": Case(layout=Layout(dp_shard=3), float8=tensorwise(), train=Train(steps=2, global_batch=3, seq_len=32)),
    "hsdp": Case(layout=Layout(dp_replicate=2, dp_shard=2), float8=tensorwise(fp8_all_gather=True), train=FLOAT32),
    "fsdp2-tp2-ag": Case(layout=Layout(dp_shard=2, tp=2), float8=tensorwise(fp8_all_gather=True), train=SHARP),
    "tp2-rowwise": Case(layout=Layout(tp=2), float8=Float8(recipe="rowwise"), train=FLOAT32),
    "fsdp2-rowwise-ac.op": Case(
        layout=Layout(dp_shard=2), float8=Float8(recipe="rowwise"), checkpointing=SELECTIVE, train=MIXED
    ),
    "tp2-gw_hp": Case(layout=Layout(tp=2), float8=Float8(recipe="rowwise_with_gw_hp"), train=MIXED),
}


def run_of(traces: tuple[RankTrace, ...]) -> Run:
    return Run(traces=traces, failures=())


def findings(case: Case, run: Run) -> list[Finding]:
    return [*check_scales(case, run, WITNESSES), *check_recompute(case, run, WITNESSES)]


@pytest.mark.parametrize("case", CLEAN.values(), ids=CLEAN)
def test_a_clean_run_is_seen_whole_without_a_finding_and_without_a_changed_bit(train, case: Case):
    watched, plain = train(case, probes=("operands",)), train(case)
    assert [[(step.loss, step.grad_norm) for step in trace.steps] for trace in watched] == [
        [(step.loss, step.grad_norm) for step in trace.steps] for trace in plain
    ]
    assert findings(case, run_of(watched)) == []
    assert all(len(trace.operands.matmuls) == scaled_mm_calls(case) * case.train.steps for trace in watched)
    witness = train(case, probes=("operands",), solo=True)
    assert first_divergence(case, run_of(watched), run_of(witness)) is None


def test_the_shapes_and_order_of_matmuls_are_those_of_the_case(train):
    case = CLEAN["fsdp2"]
    for trace in train(case, probes=("operands",)):
        found = [(one.fqn, one.gemm, one.m, one.n, one.k) for one in trace.operands.matmuls if one.step == 2]
        assert sorted(found) == sorted((gemm.fqn, gemm.role, gemm.m, gemm.n, gemm.k) for gemm in gemms(case))
        both = sorted([one.index for one in (*trace.operands.casts, *trace.operands.matmuls)])
        assert both == list(range(len(both)))


def test_bf16_casts_nothing(train):
    case = Case(layout=Layout(tp=2), train=FLOAT32)
    traces = train(case, probes=("operands",))
    assert [trace.operands.casts for trace in traces] == [(), ()]
    assert findings(case, run_of(traces)) == []


FAULTS = [
    ("amax_not_reduced_over_tp", "tp2", "hold one tensor have different scales", 1),
    ("gathered_input_has_local_scale", "tp2-styles-ac", "cast of a local tensor", 1),
    ("amax_reduced_over_dp", "fsdp2", "different tensors share all scales", 1),
    ("weight_amax_over_replicas", "hsdp", "hold one tensor have different scales", 1),
    ("scale_in_float32", "single", "does not fit the largest magnitude", 1),
    ("power_of_two_lost", "tp2-rowwise", "not a power of two", 1),
    ("precomputed_scale_one_step_late", "fsdp2-ag.pre", "does not fit the largest magnitude", 3),
    ("weight_data_stale", "single", "not the cast of their source", 2),
    ("gathered_shard_of_one_rank_stale", "fsdp2-ag.pre", "not the cast of their source", 2),
    ("gradient_cast_to_e4m3", "single", "cast to the wrong dtype", 1),
    ("one_rank_leaves_a_linear_out", "fsdp2", "wrong number of casts", 1),
    ("recompute_scale_changed", "tp2-styles-ac", "differs from the first time", 1),
    ("row_scales_of_another_rank", "tp2-rowwise", "not the cast of their source", 1),
]


@pytest.mark.parametrize(("fault", "where", "rule", "step"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_planted_fault_is_found_at_its_first_step(train, fault: str, where: str, rule: str, step: int):
    case = CLEAN[where]
    if step > case.train.steps:
        case = Case(layout=case.layout, float8=case.float8, train=Train(steps=step, global_batch=4, seq_len=32))
    traces = train(case, probes=("operands",), injections=(f"fault:{fault}",))
    found = [finding for finding in findings(case, run_of(traces)) if re.search(rule, finding.message)]
    assert found and found[0].step == step
    assert found[0].module and found[0].rank is not None and found[0].expected and found[0].found


@pytest.mark.parametrize(
    ("fault", "where", "place"),
    [
        ("one_tp_rank_reads_other_tokens", "tp2", (1, "layers.0.attention.wq")),
        ("same_batch_on_every_dp_rank", "fsdp2", (1, "layers.0.attention.wq")),
        ("loss_over_local_tokens", "fsdp2", (1, "layers.1.feed_forward.w2")),
        ("weight_decay_lost", "single", (2, "layers.0.attention.wq")),
        ("partial_output_averaged", "tp2", (1, "layers.0.feed_forward.w1")),
    ],
)
def test_the_first_divergence_locates_what_no_scale_shows(train, fault: str, where: str, place: tuple[int, str]):
    case = CLEAN[where]
    traces = train(case, probes=("operands",), injections=(f"fault:{fault}",))
    found = first_divergence(case, run_of(traces), run_of(train(case, probes=("operands",), solo=True)))
    assert found is not None and (found.step, found.module) == place


# The numbers of one cast, in this process.


def cast_of(source: torch.Tensor, *, dim: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn) -> Cast:
    amax = source.abs().amax() if dim is None else source.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / amax.double()).float()
    limit = torch.finfo(dtype).max
    return Cast(source, (source.float() * scale).clamp(-limit, limit).to(dtype), scale, dim)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_a_right_cast_has_nothing_wrong(dtype: torch.dtype, target: torch.dtype, dim: int | None):
    for source in (some(16, 24, dtype=dtype), some(24, 16, dtype=dtype).t(), torch.zeros(0, 16, dtype=dtype)[:, :0]):
        cast = cast_of(source, dim=dim, dtype=target) if source.numel() else None
        if cast is None:
            cast = Cast(source, source.to(target), torch.ones(()), dim)
        numbers = measure_cast(cast, "")
        assert (numbers.mismatched, numbers.saturated, numbers.nonfinite) == (0, 0, 0)
        if source.numel():
            limit = torch.finfo(target).max
            assert numbers.scaled_amax_maximum == pytest.approx(limit, rel=1e-6)
            assert numbers.scaled_amax_minimum == pytest.approx(limit, rel=1e-6)


def test_what_is_wrong_is_counted():
    right = cast_of(some(16, 16))
    bits = right.bits.clone()
    bits.view(torch.uint8)[3, 5] ^= 1
    bits.view(torch.uint8)[0, 0] = 0x7F
    numbers = measure_cast(right._replace(bits=bits), "")
    assert (numbers.mismatched, numbers.nonfinite) == (2, 1)
    doubled = right.scale * 2
    numbers = measure_cast(right._replace(scale=doubled), "")
    assert numbers.saturated == int((right.source.abs() * doubled > 448).sum()) > 0
    tiny = some(16, 16)
    tiny[0, :4], tiny[1, 0] = 1e-9, 0.0
    assert measure_cast(cast_of(tiny), "").flushed == 4


def test_rows_of_zeros_are_left_out():
    source = some(4, 16)
    source[2] = 0
    cast = cast_of(source, dim=-1)
    cast = cast._replace(scale=cast.scale.nan_to_num(posinf=448e12))
    numbers = measure_cast(cast._replace(bits=(source * cast.scale).to(torch.float8_e4m3fn)), "")
    assert numbers.scaled_amax_minimum == pytest.approx(448, rel=1e-6)
    zeros = measure_cast(Cast(torch.zeros(4, 4), torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(()), None), "")
    assert (zeros.scaled_amax_minimum, zeros.scaled_amax_maximum) == (0, 0)


def test_a_digest_is_that_of_the_values_in_place():
    matrix = some(24, 40).to(torch.float8_e4m3fn)
    assert digest(matrix) == digest(matrix.t()) == digest(matrix.clone())
    assert digest(matrix) != digest(matrix.t().contiguous())
    for size in (1, 7, 8, 63, 64, 72, 100):
        values = torch.arange(size, dtype=torch.uint8)
        for at in {0, size // 2, size - 1}:
            other = values.clone()
            other[at] ^= 128
            assert digest(values) != digest(other)
    swapped = matrix.view(torch.uint8).clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert digest(swapped.view(torch.float8_e4m3fn)) != digest(matrix)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [3, 64, 100_003])
def test_a_digest_sees_changes_that_add_up_to_little(dtype: torch.dtype, size: int):
    values = some(1, size)[0].mul(100).to(dtype)
    first_and_last, ends = values.clone(), [0, size - 1]
    first_and_last[ends] = -first_and_last[ends] - 1
    found = [values, -values, first_and_last, values.roll(1), values.flip(0)]
    assert len({ordered_digest(each) for each in found}) == len(found)


def test_an_ordered_digest_is_that_of_the_indices():
    matrix = some(24, 40)
    assert ordered_digest(matrix.t().contiguous().t()) == ordered_digest(matrix)
    assert ordered_digest(matrix.t()) != ordered_digest(matrix)
    assert ordered_digest(matrix[:0]) == digest(matrix[:0])


def test_looking_at_a_tensor_leaves_its_storage_resizable():
    """FSDP2 frees a gathered weight by resizing its storage, which `Tensor.numpy` forbids for good."""
    cast = cast_of(some(16, 16))
    CastMeter().measure(cast, "")
    summarize_scale(cast.scale)
    for tensor in cast[:2]:
        tensor.untyped_storage().resize_(0)


def test_a_repeated_cast_is_not_taken_for_another():
    meter, source = CastMeter(), some(16, 16)
    right = cast_of(source)
    assert meter.measure(right, "s").mismatched == 0
    assert meter.measure(right, "s").mismatched == 0
    source.mul_(2)  # in place: the float8 data are stale now
    assert meter.measure(right, "s").mismatched > 0
    stale = right._replace(source=some(16, 16) * 3)
    assert meter.measure(stale, "s").mismatched > 0


def test_scales_are_summarized():
    one = summarize_scale(torch.tensor(0.5))
    assert (one.shape, one.minimum, one.total, one.log2_total, one.power_of_two) == ((), 0.5, 0.5, -1.0, True)
    rows = summarize_scale(torch.tensor([[0.5], [3.0]]))
    assert (rows.shape, rows.minimum, rows.maximum, rows.total, rows.power_of_two) == ((2, 1), 0.5, 3.0, 3.5, False)
    assert rows.digest != summarize_scale(torch.tensor([[3.0], [0.5]])).digest


def test_a_probe_leaves_torchao_as_it_was():
    seams: list[Callable[[], object]] = [
        lambda: float8_scaling_utils.hp_tensor_and_scale_to_float8,
        lambda: float8_linear.Float8Linear.forward,
        lambda: float8_linear.matmul_with_hp_or_float8_args.forward,
        lambda: float8_linear.matmul_with_hp_or_float8_args.backward,
        lambda: FSDPParam.__dict__["all_gather_inputs"],
        lambda: len(scaled_mm.observers),
    ]
    before = [seam() for seam in seams]
    with OperandProbe(Case(float8=tensorwise()), torch.device("cpu")):
        assert all(seam() != then for seam, then in zip(seams, before, strict=True))
    assert [seam() for seam in seams] == before
