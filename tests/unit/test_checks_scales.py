"""The check `scales` finds every scale that is of the wrong form, range, group or age, and nothing on a clean run."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from harness.checks.expectedcasts import E4M3, LARGEST, CastForm, CastSite, expected_casts
from harness.checks.occurrences import ROLES
from harness.checks.scales import check_scales
from harness.checks.witnesses import Witnesses
from harness.spec.case import Case, Checkpointing, Float8, Layout, Train
from harness.spec.gemms import converted_fqns
from harness.trace import RankTrace, Run, StepTrace
from harness.trace.operands import CastRecord, Gemm, MatmulRecord, OperandTrace, ScaleSummary
from harness.verdict import Finding

AMAX = 2.0
TRAIN = Train(steps=2, global_batch=4, seq_len=32)
WITNESSES = Witnesses(golden=None, tolerance=None, refusal=None, expected_fqns=(), expected_scaled_mm=0)
Change = dict[str, Any]


def case(recipe: Any = "tensorwise", *, tp: int = 1, dp_shard: int = 1, dp_replicate: int = 1, **float8: Any) -> Case:
    layout = Layout(tp=tp, dp_shard=dp_shard, dp_replicate=dp_replicate)
    return Case(layout=layout, float8=Float8(recipe=recipe, **float8), train=TRAIN)


def summary(value: float, shape: tuple[int, ...] = (), **changes: Any) -> ScaleSummary:
    (value,) = struct.unpack("f", struct.pack("f", value))
    base = ScaleSummary(
        shape=shape,
        dtype="float32",
        minimum=value,
        maximum=value,
        total=value,
        log2_total=0.0,
        digest=f"scale {value!r}",
        power_of_two=value.hex().startswith("0x1.0000000000000p"),
    )
    return msgspec.structs.replace(base, **changes)


def cast(of: Case, site: CastSite, form: CastForm, *, index: int, step: int, rank: int) -> CastRecord:
    """A cast as every rank makes it: pieces of weights differ between TP ranks, activations between all ranks."""
    dims = 2 if site.role == "weight" or site.phase == "backward" else 3
    local_shape = (1, 16, 32)[-dims:]
    shape = local_shape
    if form.axiswise_dim is not None:
        shape = tuple(1 if axis == form.axiswise_dim % dims else size for axis, size in enumerate(local_shape))
    limit = LARGEST[form.target_dtype]
    power = of.float8.recipe != "tensorwise"
    scale = summary(128.0 if power else limit / AMAX, shape if form.axiswise_dim is not None else ())
    gathers = site.phase in ("all_gather", "gathered")
    owner = rank % of.layout.tp if site.role == "weight" and not gathers else rank
    placements = ("Shard(0)",) if gathers else ()
    axes = ("dp_shard",) if gathers else ()
    if of.layout.tp > 1:
        placements, axes = (*placements, f"Shard({dims - 1})"), (*axes, "tp")
    scaled = AMAX * scale.maximum
    return CastRecord(
        index=index,
        step=step,
        fqn=site.fqn,
        role=site.role,
        phase=site.phase,
        shape=local_shape,
        local_shape=local_shape,
        placements=placements,
        mesh_axes=axes,
        source_dtype=form.source_dtype,
        target_dtype=form.target_dtype,
        axiswise_dim=form.axiswise_dim,
        scale=scale,
        amax=AMAX,
        scaled_amax_minimum=scaled,
        scaled_amax_maximum=scaled,
        saturated=0,
        flushed=0,
        nonfinite=0,
        mismatched=0,
        elements=512,
        data_digest=f"{site.fqn} {site.role} {step} {owner}",
    )


def matmul(fqn: str, gemm: Gemm, a: CastRecord, b: CastRecord, *, index: int, ones: bool) -> MatmulRecord:
    a_scale, b_scale = (summary(1.0 if ones else 1 / operand.scale.maximum) for operand in (a, b))
    return MatmulRecord(
        index=index,
        step=a.step,
        fqn=fqn,
        gemm=gemm,
        m=16,
        k=32,
        n=16,
        a_dtype=a.target_dtype,
        b_dtype=b.target_dtype,
        a_scale=a_scale,
        b_scale=b_scale,
        a_digest=a.data_digest,
        b_digest=b.data_digest,
    )


def operands(of: Case, rank: int) -> OperandTrace:
    """What the probe records on a clean run, sites in any order, every matmul right after its operands."""
    casts: list[CastRecord] = []
    matmuls: list[MatmulRecord] = []
    for step in range(1, TRAIN.steps + 1):
        for site, forms in expected_casts(of).items():
            for form in forms:
                index = len(casts) + len(matmuls)
                casts.append(cast(of, site, form, index=index, step=step, rank=rank))
        last = {(record.fqn, record.role): record for record in casts}
        gemms: list[Gemm] = ["forward", "dgrad", *(["wgrad"] if of.float8.recipe != "rowwise_with_gw_hp" else [])]
        for fqn in converted_fqns(of):
            for gemm in gemms:
                a, b = (last.get((fqn, role), last.get((fqn.rpartition(".")[0], role))) for role in ROLES[gemm])
                assert a is not None and b is not None
                ones = of.float8.recipe != "tensorwise" and gemm != "forward"
                matmuls.append(matmul(fqn, gemm, a, b, index=len(casts) + len(matmuls), ones=ones))
    return OperandTrace(casts=tuple(casts), matmuls=tuple(matmuls))


def trace(of: Case, rank: int, recorded: OperandTrace | None) -> RankTrace:
    steps = tuple(
        StepTrace(step=number, loss=7.0, grad_norm=1.0, scaled_mm_calls=1, seconds=0.1)
        for number in range(1, TRAIN.steps + 1)
    )
    return RankTrace(
        rank=rank,
        steps=steps,
        converted_fqns=converted_fqns(of),
        unmatched_filters=(),
        peak_memory_bytes=0,
        data_digest="d",
        software={},
        device="cpu",
        virtual=(),
        operands=recorded,
    )


def clean(of: Case) -> Run:
    return Run(traces=tuple(trace(of, rank, operands(of, rank)) for rank in range(of.world_size)), failures=())


def changed(
    run: Run, change: Callable[[CastRecord], Change], *, rank: int | None = None, where: Callable[[CastRecord], bool]
) -> Run:
    """The run with `change` applied to the casts `where` is true of, on one rank or on all."""

    def new(record: CastRecord) -> CastRecord:
        return msgspec.structs.replace(record, **change(record)) if where(record) else record

    traces = []
    for mine in run.traces:
        assert mine.operands is not None
        if rank is None or rank == mine.rank:
            casts = tuple(new(record) for record in mine.operands.casts)
            recorded = OperandTrace(casts=casts, matmuls=mine.operands.matmuls)
            mine = msgspec.structs.replace(mine, operands=recorded)  # noqa: PLW2901
        traces.append(mine)
    return Run(traces=tuple(traces), failures=())


def check(of: Case, run: Run) -> list[Finding]:
    return check_scales(of, run, WITNESSES)


def rescaled(factor: float) -> Callable[[CastRecord], Change]:
    """Another scale, and what follows from it: as a wrong amax makes it."""

    def change(record: CastRecord) -> Change:
        value = record.scale.maximum * factor
        scaled = record.amax * value
        return {
            "scale": summary(value, record.scale.shape),
            "scaled_amax_minimum": scaled,
            "scaled_amax_maximum": scaled,
        }

    return change


CLEAN = [
    case(),
    case(output_layer=True),
    case(tp=2),
    case(tp=2, tp_styles="float8"),
    case(dp_shard=2),
    case(dp_shard=2, fp8_all_gather=True),
    case(dp_shard=2, fp8_all_gather=True, precompute_scale=True),
    case(dp_shard=2, tp=2, fp8_all_gather=True),
    case(dp_shard=2, dp_replicate=2, tp=2),
    case("rowwise"),
    case("rowwise", tp=2),
    case("rowwise_with_gw_hp", dp_shard=2),
    msgspec.structs.replace(case(), checkpointing=Checkpointing(mode="full")),
    msgspec.structs.replace(case(), checkpointing=Checkpointing(mode="selective_op")),
    msgspec.structs.replace(case(dp_shard=2, fp8_all_gather=True), checkpointing=Checkpointing(mode="selective_layer")),
    msgspec.structs.replace(case(), train=msgspec.structs.replace(TRAIN, dtype="bfloat16")),
    case("bf16", tp=2),
]


@pytest.mark.parametrize("of", CLEAN)
def test_a_clean_run_has_no_findings(of: Case) -> None:
    run = clean(of)
    if of.layout.dp > 1 and of.float8.enabled:  # activations of dp ranks have scales of their own
        for rank in range(of.world_size):
            halved = rescaled(2.0 ** -(rank // of.layout.tp))
            run = changed(
                run,
                lambda record, halved=halved, rank=rank: {
                    **halved(record),
                    "amax": record.amax * 2.0 ** (rank // of.layout.tp),
                    "scaled_amax_minimum": record.scaled_amax_minimum,
                    "scaled_amax_maximum": record.scaled_amax_maximum,
                },
                rank=rank,
                where=lambda record: record.role != "weight",
            )
    found = [one for one in check(of, run) if "a matmul does not divide" not in one.message]
    assert found == []


def test_the_first_place_is_named_with_what_was_expected() -> None:
    stale = changed(
        clean(case()),
        rescaled(1 + 2.0**-20),
        where=lambda record: record.step == 2 and record.role == "weight" and "w2" in record.fqn,
    )
    found = [one for one in check(case(), stale) if one.message.startswith("scale does not fit")]
    assert len(found) == 1 and (found[0].step, found[0].rank) == (2, 0)
    assert found[0].module == "layers.0.feed_forward.w2"
    assert "224.0 = 448 / amax 2.0" in (found[0].expected or "")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"mismatched": 1}, "not the cast of their source"),
        ({"saturated": 3}, "saturate"),
        ({"nonfinite": 1}, "NaN or infinite"),
        ({"target_dtype": E4M3}, "cast to the wrong dtype"),
        ({"source_dtype": "bfloat16"}, "cast from the wrong dtype"),
        ({"axiswise_dim": -1}, "scaled along the wrong dim"),
        ({"scale": summary(28672.0, dtype="float64")}, "scale of the wrong dtype"),
        ({"scale": summary(28672.0, (16, 1))}, "scale of the wrong shape"),
        ({"scale": summary(float("inf"))}, "not finite and positive"),
        ({"scale": summary(-1.0)}, "not finite and positive"),
        ({"scale": summary(float("nan"))}, "not finite and positive"),
        ({"scale": summary(57344 / 2 * 0.999999)}, "does not fit"),
    ],
)
def test_one_wrong_cast_is_found(change: Change, rule: str) -> None:
    run = clean(case())
    assert run.traces[0].operands is not None
    first = next(record.index for record in run.traces[0].operands.casts if record.role == "grad_output")
    wrong = changed(run, lambda _: change, where=lambda record: record.index == first)
    assert any(rule in finding.message for finding in check(case(), wrong))


def test_scales_of_rows_must_be_powers_of_two_that_fit() -> None:
    of = case("rowwise")
    for factor, rule in ((1.5, "power of two"), (2.0, "does not fit"), (0.25, "does not fit")):
        wrong = changed(clean(of), rescaled(factor), where=lambda record: record.role == "weight")
        assert any(rule in finding.message for finding in check(of, wrong))


@pytest.mark.parametrize(
    ("of", "role"),
    [
        (case(tp=2), "input"),
        (case(tp=2), "weight"),
        (case(dp_shard=2), "weight"),
        (case(dp_shard=2, fp8_all_gather=True), "weight"),
        (case(dp_shard=2, dp_replicate=2, fp8_all_gather=True), "weight"),
    ],
)
def test_ranks_that_hold_one_tensor_must_share_its_scale(of: Case, role: str) -> None:
    wrong = changed(clean(of), rescaled(0.5), rank=1, where=lambda record: record.role == role)
    assert any("hold one tensor have different scales" in finding.message for finding in check(of, wrong))


def test_the_largest_magnitude_may_be_on_another_rank() -> None:
    smaller = {"amax": AMAX / 4, "scaled_amax_maximum": 56.0, "scaled_amax_minimum": 56.0}
    run = changed(clean(case(tp=2)), lambda _: smaller, rank=1, where=lambda record: record.role == "weight")
    assert check(case(tp=2), run) == []
    run = changed(run, lambda _: smaller, rank=0, where=lambda record: record.role == "weight")
    assert any("does not fit" in finding.message for finding in check(case(tp=2), run))


def test_gathered_weights_have_a_scale_per_tp_rank_unless_precomputed() -> None:
    """The exemption that torchao 0.18 needs, and its limits."""
    per_rank = rescaled(0.5)

    def own_scale(of: Case) -> list[str]:
        run = changed(
            clean(of),
            lambda record: {**per_rank(record), "amax": 2 * AMAX},
            where=lambda record: record.role == "weight",
        )
        mixed = tuple(clean(of).traces[i] if i % 2 else run.traces[i] for i in range(of.world_size))
        found = check(of, Run(traces=mixed, failures=()))
        return [finding.message for finding in found if "hold one tensor" in finding.message]

    assert own_scale(case(dp_shard=2, tp=2, fp8_all_gather=True)) == []
    precomputed = case(dp_shard=2, tp=2, fp8_all_gather=True, precompute_scale=True)
    (found,) = own_scale(precomputed)
    assert "at step 2" in found  # before the first update nothing was precomputed


def test_data_parallel_ranks_must_not_share_all_scales() -> None:
    of = case(dp_shard=2)
    assert any("share all scales" in finding.message for finding in check(of, clean(of)))
    one_differs = changed(
        clean(of), rescaled(0.5), rank=1, where=lambda record: record.index == 0 and record.role == "input"
    )
    assert not any("share all scales" in finding.message for finding in check(of, one_differs))


def test_replicas_must_hold_the_same_data() -> None:
    of = case(dp_shard=2)
    wrong = changed(clean(of), lambda _: {"data_digest": "x"}, rank=1, where=lambda record: record.role == "weight")
    assert any("replicas of one tensor" in finding.message for finding in check(of, wrong))


def test_under_tp_a_local_tensor_is_found() -> None:
    wrong = changed(
        clean(case(tp=2)), lambda _: {"mesh_axes": (), "placements": ()}, where=lambda record: record.role == "input"
    )
    assert any("local tensor" in finding.message for finding in check(case(tp=2), wrong))


def test_casts_that_are_missing_or_too_many_are_found() -> None:
    mine = operands(case(), 0)
    for casts in (mine.casts[:-1], (*mine.casts, mine.casts[-1]), ()):
        recorded = OperandTrace(casts=casts, matmuls=())
        found = check(case(), Run(traces=(trace(case(), 0, recorded),), failures=()))
        assert any("wrong number of casts" in finding.message for finding in found)
    bf16 = Run(traces=(trace(case("bf16"), 0, mine),), failures=())
    assert any("wrong number of casts" in finding.message for finding in check(case("bf16"), bf16))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"a_scale": summary(1.0)}, "does not divide by the scale"),
        ({"b_scale": summary(1.0)}, "does not divide by the scale"),
        ({"a_digest": "x"}, "does not multiply what was cast"),
        ({"b_digest": "x"}, "does not multiply what was cast"),
        ({"fqn": "?"}, "never cast"),
    ],
)
def test_matmuls_use_what_was_cast(change: Change, rule: str) -> None:
    mine = operands(case(), 0)
    wrong = tuple(msgspec.structs.replace(one, **change) if one.gemm == "forward" else one for one in mine.matmuls)
    recorded = OperandTrace(casts=mine.casts, matmuls=wrong)
    found = check(case(), Run(traces=(trace(case(), 0, recorded),), failures=()))
    assert any(rule in finding.message for finding in found)


def test_what_was_not_recorded_does_not_pass() -> None:
    assert check(case(), Run(traces=(), failures=()))
    (found,) = check(case(tp=2), Run(traces=(clean(case(tp=2)).traces[0], trace(case(tp=2), 1, None)), failures=()))
    assert found.rank == 1 and "not recorded on rank 1" in found.message


def test_tensors_of_zeros_are_exempt_by_their_eps() -> None:
    zeros = {"amax": 0.0, "scaled_amax_minimum": 0.0, "scaled_amax_maximum": 0.0}
    of = case("rowwise")
    run = changed(clean(of), lambda _: zeros, where=lambda record: record.role == "weight")
    assert check(of, run) == []
    run = changed(
        clean(case()), lambda _: {**zeros, "scale": summary(448e12)}, where=lambda record: record.role == "weight"
    )
    assert not any("does not fit" in finding.message for finding in check(case(), run))
