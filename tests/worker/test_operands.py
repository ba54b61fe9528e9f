"""The operand probe sees every cast and matmul as it is; its checks find faults, and none in `test_clean_runs.py`.

The check `traffic` names what injected faults send.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torchao.float8 import float8_linear, float8_scaling_utils

from harness.checks.check import Rule
from harness.checks.divergence import with_operands
from harness.checks.recompute import CAST as RECOMPUTED_CAST
from harness.checks.recompute import check_recompute
from harness.checks.scales import DIFFERENT, RULES, check_scales
from harness.checks.traffic import AMAX_MISSING, GATHERS, REDUCE_DTYPE, VOLUME, check_traffic
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id, solo_case
from harness.matrix.linears import gemms
from harness.matrix.recipes import MX
from harness.trace import Run
from harness.verdict import Finding
from harness.worker.dispatch_hooks import matmuls
from harness.worker.probes.cast_numbers import Cast, measure_cast, summarize_scale
from harness.worker.probes.casts import CastMeter
from harness.worker.probes.operands import OperandProbe
from harness.worker.tensors.digests import Contents, digest, ordered_digest
from tests.builders import make_witnesses
from tests.worker.runs import WHOLE_WEIGHT, assert_named, sweep

SINGLE = "single-tensorwise-v2048-gb4-s2-f32"
TP2 = "tp2-tensorwise-head.fp8-v2048-gb4-s1-f64"
STYLED = "tp2-tensorwise-tpstyle.fp8-ac.full-v2048-gb4-s1-f64"
FSDP2 = "fsdp2-tensorwise-v2048-gb4-s1-f32"
CHECKPOINTED = "fsdp2-tensorwise-ac.full-v2048-gb4-s1-f32"
PRECOMPUTED = "fsdp2-tensorwise-ag.fp8pre-head.fp8-v2048-gb4-s3-f32"
OPERANDS = ("operands",)


def findings(case: Case, run: Run) -> list[Finding]:
    given = make_witnesses(case)
    return [*check_scales(case, run, given), *check_recompute(case, run, given)]


def test_the_shapes_and_order_of_matmuls_are_those_of_the_case(trained):
    case = parse_case_id(FSDP2)
    for trace in trained(case, probes=OPERANDS).traces:
        matmuls = [(one.fqn, one.gemm, one.m, one.n, one.k) for one in trace.operands.matmuls]
        assert sorted(matmuls) == sorted((gemm.fqn, gemm.role, gemm.m, gemm.n, gemm.k) for gemm in gemms(case))
        both = sorted([one.index for one in (*trace.operands.casts, *trace.operands.matmuls)])
        assert both == list(range(len(both)))


def test_bf16_casts_nothing(trained):
    case = parse_case_id("tp2-bf16-v2048-gb4-s1-f32")
    run = trained(case, probes=OPERANDS)
    assert [trace.operands.casts for trace in run.traces] == [(), ()]
    assert findings(case, run) == []


@pytest.mark.parametrize(
    ("fault", "text", "rule", "step"),
    [  # `tests/power` has one of every rule
        sweep("amax_not_reduced_over_tp", TP2, DIFFERENT, 1),
        ("weight_data_stale", SINGLE, RULES.data, 2),
        ("precomputed_scale_one_step_late", PRECOMPUTED, RULES.amax, 3),
        sweep("recompute_scale_changed", STYLED, RECOMPUTED_CAST, 1),
    ],
)
def test_a_planted_fault_is_found_at_its_first_step(trained, fault: str, text: str, rule: Rule, step: int):
    case = parse_case_id(text)
    run = trained(case, probes=OPERANDS, injections=(f"fault:{fault}",))
    of_rule = [finding for finding in findings(case, run) if finding.rule == rule.name]
    assert of_rule and of_rule[0].step == step
    assert of_rule[0].module and of_rule[0].rank is not None and of_rule[0].expected and of_rule[0].found


@pytest.mark.parametrize(
    ("fault", "text", "place"),
    [
        ("one_tp_rank_reads_other_tokens", TP2, (1, "layers.0.attention.wq")),
        ("loss_over_local_tokens", FSDP2, (1, "loss")),
        ("weight_decay_lost", SINGLE, (2, "layers.0.attention.wq")),
        sweep("partial_output_averaged", TP2, (1, "layers.0.feed_forward.w1")),
        ("same_batch_on_every_dp_rank", CHECKPOINTED, (1, "layers.0.attention.wq")),
    ],
)
def test_the_first_divergence_locates_what_no_scale_shows(trained, fault: str, text: str, place: tuple[int, str]):
    case = parse_case_id(text)
    broken = trained(case, probes=OPERANDS, injections=(f"fault:{fault}",))
    (divergence,) = with_operands((), case, broken, trained(solo_case(case), probes=OPERANDS, solo=True))
    assert (divergence.step, divergence.module) == place
    assert "recompute" not in divergence.operand  # what forward does comes first


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
        numbers = measure_cast(cast)
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
    numbers = measure_cast(right._replace(bits=bits))
    assert (numbers.mismatched, numbers.nonfinite) == (2, 1)
    doubled = right.scale * 2
    numbers = measure_cast(right._replace(scale=doubled))
    assert numbers.saturated == int((right.source.abs() * doubled > 448).sum()) > 0
    tiny = some(16, 16)
    tiny[0, :4], tiny[1, 0] = 1e-9, 0.0
    assert measure_cast(cast_of(tiny)).flushed == 4
    cancelled = tiny.double()
    cancelled[0, :2] = 1e-20  # the rounding of a sum whose terms cancel
    assert measure_cast(cast_of(cancelled)).flushed == 2


@pytest.mark.parametrize("dim", [-1, 0])
def test_the_blocks_furthest_off_are_located(dim: int):
    rows = torch.full((4, 3, 32), 448.0)  # by a scale of 1
    rows[0] = 0  # blocks of zeros say nothing
    rows[1, 2], rows[3, 1] = 100, 1000
    rows = rows.flatten(1)
    scale = torch.full((4, 3), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    source = rows if dim else rows.t()
    numbers = measure_cast(Cast(source, source.clamp(max=448).to(torch.float8_e4m3fn), scale, dim, MX))
    assert numbers.extreme_blocks == (1 * 3 + 2, 3 * 3 + 1)
    assert (numbers.scaled_amax_minimum, numbers.scaled_amax_maximum) == (100, 1000)
    wrong = scale.view(torch.uint8).clone()
    wrong[2, 0] = 255  # NaN
    numbers = measure_cast(Cast(source, source.to(torch.float8_e4m3fn), wrong.view(scale.dtype), dim, MX))
    assert numbers.extreme_blocks == (6, 6)
    assert measure_cast(Cast(0 * source, (0 * source).to(torch.float8_e4m3fn), scale, dim, MX)).extreme_blocks == ()


def test_the_largest_value_keeps_its_sign_where_one_scale_spans_the_tensor():
    for source in (some(16, 24), -some(16, 24).abs(), some(16, 24, dtype=torch.bfloat16)):
        assert measure_cast(cast_of(source)).largest == source.max().item()
        assert measure_cast(cast_of(source, dim=-1)).largest is None


def test_rows_of_zeros_are_left_out():
    source = some(4, 16)
    source[2] = 0
    cast = cast_of(source, dim=-1)
    cast = cast._replace(scale=cast.scale.nan_to_num(posinf=448e12))
    numbers = measure_cast(cast._replace(bits=(source * cast.scale).to(torch.float8_e4m3fn)))
    assert numbers.scaled_amax_minimum == pytest.approx(448, rel=1e-6)
    zeros = measure_cast(Cast(torch.zeros(4, 4), torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(()), None))
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
    tensors = [values, -values, first_and_last, values.roll(1), values.flip(0)]
    assert len({ordered_digest(tensor) for tensor in tensors}) == len(tensors)


def test_an_ordered_digest_is_that_of_the_indices():
    matrix = some(24, 40)
    assert ordered_digest(matrix.t().contiguous().t()) == ordered_digest(matrix)
    assert ordered_digest(matrix.t()) != ordered_digest(matrix)
    assert ordered_digest(matrix[:0]) == digest(matrix[:0])


def test_looking_at_a_tensor_leaves_its_storage_resizable():
    """FSDP2 frees a gathered weight by resizing its storage, which `Tensor.numpy` forbids for good."""
    cast = cast_of(some(16, 16))
    CastMeter(Contents()).see(cast)
    summarize_scale(cast.scale)
    for tensor in cast[:2]:
        tensor.untyped_storage().resize_(0)


def test_a_repeated_cast_is_not_taken_for_another():
    meter, source = CastMeter(Contents()), some(16, 16)
    right = cast_of(source)
    assert meter.see(right).numbers.mismatched == 0
    assert meter.see(right).numbers.mismatched == 0
    source.mul_(2)  # in place: the float8 data are stale now
    assert meter.see(right).numbers.mismatched > 0
    stale = right._replace(source=some(16, 16) * 3)
    assert meter.see(stale).numbers.mismatched > 0


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
        lambda: len(matmuls.scaled_observers),
    ]
    before = [seam() for seam in seams]
    with OperandProbe(parse_case_id(SINGLE), torch.device("cpu")):
        assert all(seam() != then for seam, then in zip(seams, before, strict=True))
    assert [seam() for seam in seams] == before


TRAFFIC = ("traffic",)


def sent_wrongly(text: str, run: Run) -> list[Finding]:
    case = parse_case_id(text)
    return check_traffic(case, run, make_witnesses(case))


@pytest.mark.sweep  # `test_own_models.py` runs a case with this fault, without and with its fix
@pytest.mark.parametrize(
    "text",
    [
        "fsdp2-tp2-tensorwise-ag.fp8pre-v2048-gb4-s2-f32",
        "fsdp2-tp2-tensorwise-ag.fp8-head.fp8-filter.layers.0+wk-v2048-gb4-s2-b16",
    ],
)
def test_under_fsdp_and_tp_the_amax_of_a_gathered_weight_is_reduced_over_both_once_it_is_fixed(trained, text: str):
    assert sent_wrongly(text, trained(parse_case_id(text), probes=TRAFFIC, injections=(WHOLE_WEIGHT,))) == []
    without_fix = sent_wrongly(text, trained(parse_case_id(text), probes=TRAFFIC))
    assert [finding for finding in without_fix if finding.rule == AMAX_MISSING.name and finding.values["axis"] == "tp"]


@pytest.mark.parametrize(
    ("fault", "text", "rule", "values"),
    [
        (
            "weight_amax_not_reduced_over_shards",
            "fsdp2-tensorwise-ag.fp8-v2048-gb4-s1-f32",
            AMAX_MISSING,
            {"axis": "dp_shard"},
        ),
        (
            "fp8_tp_styles_lost",
            "tp2-tensorwise-tpstyle.fp8-v2048-gb4-s1-f32",
            VOLUME,
            {"collective": "all_gather in float8_e4m3fn along tp"},
        ),
        ("weights_kept_after_forward", "fsdp2-rowwise-v2048-gb4-s1-f32", GATHERS, {"often": "seldom"}),
        (
            "gradients_reduced_in_another_dtype",
            "fsdp2-tensorwise-v2048-gb4-s1-reduce.b16-b16",
            REDUCE_DTYPE,
            {"dtypes": "float32", "asked": "bfloat16"},
        ),
    ],
)
def test_planted_faults_are_found_and_named(trained, fault: str, text: str, rule: Rule, values: dict[str, str]):
    run = trained(parse_case_id(text), probes=TRAFFIC, injections=(f"fault:{fault}",))
    assert_named(sent_wrongly(text, run), rule, **values)
