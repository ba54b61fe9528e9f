"""The solo witness: one rank computes what layouts compute, at every step, and nothing that is broken.

More kinds of layouts are in `test_clean_runs.py`.
"""

from __future__ import annotations

import pytest

from harness.checks.assembly import assemble, largest, relative_distance
from harness.checks.model import NO_FSDP, reference_without_fsdp
from harness.checks.parity import check_parity, worst_distances
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id, solo_case
from harness.trace import Run
from harness.verdict import Finding
from tests.builders import make_tolerance, make_witnesses
from tests.worker.runs import sweep

EXACT = 1e-12  # measured: below 2e-15
ORDERED = 1e-8  # measured: below 4e-9


@pytest.fixture(scope="module")
def witness(trained):
    """The solo witness of a case."""
    return lambda case: trained(solo_case(case), solo=True)


def findings(case: Case, run: Run, solo: Run, allowed: float) -> list[Finding]:
    tolerance = make_tolerance(*[allowed] * case.train.steps, name="parity")
    return check_parity(case, run, make_witnesses(case, solo=solo, parity_tolerance=tolerance))


@pytest.mark.parametrize(
    "text",
    [
        sweep("tp2-tensorwise-tpstyle.fp8-ac.full-v2048-gb4-s3-f64"),
        sweep("tp4-rowwise_with_gw_hp-v2050-gb4-s2-f64"),
        sweep("fsdp2-tensorwise-ag.fp8-v2048-gb4-s3-f64"),
        "fsdp2-tensorwise-ag.fp8pre-ac.full-v2048-gb4-s3-f64",
        sweep("fsdp3-rowwise-v2050-gb6-s2-f64"),
        sweep("hsdp2x2-tensorwise-ag.fp8pre-v2048-gb4-s3-f64"),
        sweep("fsdp2-tp2-tensorwise-v2048-gb4-s3-f64"),
        sweep("fsdp2-tp2-bf16-v2050-gb4-s2-f64"),
        sweep("hsdp2x2-rowwise-v2048-gb4-s2-f64"),
        sweep("hsdp2x2-tp2-nosp-rowwise-v2048-gb4-s2-f64"),
        sweep("hsdp2x2-tensorwise-ag.fp8-v2048-gb4-s2-ignore.half-f64"),
    ],
)
def test_in_float64_every_kind_of_layout_is_exact_at_every_step(trained, witness, text: str):
    case = parse_case_id(text)
    run = trained(case)
    distances = worst_distances(run, witness(case), steps=range(1, case.train.steps + 1))
    assert largest(distances) <= EXACT, f"by step: {distances}"
    assert findings(case, run, witness(case), EXACT) == []


@pytest.mark.parametrize(
    "text",
    [
        "fsdp2-bf16-ac.full-v2048-gb4-s3-b16",
        "hsdp2x2-tensorwise-v2048-gb4-s2-reduce.b16-b16",
        sweep("fsdp2-tensorwise-ag.fp8pre-ac.op-v2048-gb4-s3-b16"),
        sweep("fsdp2-rowwise-v2048-gb4-s2-accum2-param.b16-b16"),
        sweep("fsdp2-tensorwise-ag.fp8-v2048-gb4-s3-accum2-b16"),
        sweep("fsdp2-rowwise-v2048-s3-accum4-reduce.last-b16"),
        sweep("fsdp2-tensorwise-ag.fp8-v2048-gb4-s2-ignore.half-b16"),
        sweep("fsdp2-rowwise-v2048-gb4-s3-reduce.b16-f32"),
    ],
)
def test_what_adds_up_in_the_order_of_ranks_agrees_in_every_dtype(trained, witness, text: str):
    case = parse_case_id(text)
    assert findings(case, trained(case), witness(case), ORDERED) == []


def test_the_witness_is_one_rank_that_holds_everything(trained, witness):
    case = parse_case_id("hsdp2x2-tp2-nosp-rowwise-v2048-gb4-s2-f64")
    (trace,) = witness(case).traces
    assert all(sketch.owner for sketch in trace.sketches)
    assert all(tensor.complete for tensor in assemble((trace,)).values())  # in the pieces of FSDP2's ranks
    (plain,) = trained(parse_case_id("single-rowwise-v2048-gb4-s2-f64")).traces
    assert trace.data_digest == plain.data_digest


def test_the_witness_replays_every_shard_with_its_own_scale(trained, witness):
    """Tensorwise scales of activations belong to a dp rank: one rank that trains on the whole batch is another run."""
    case = parse_case_id("fsdp2-tensorwise-v2048-gb4-s1-f64")
    whole_batch = trained(parse_case_id("single-tensorwise-v2048-gb4-s1-f64"))
    assert 1e-3 < worst_distances(whole_batch, witness(case), steps=(1,))[0] < 1


def test_without_fp8_a_replay_is_the_whole_batch(trained, witness):
    case = parse_case_id("fsdp2-bf16-v2048-gb4-s2-f64")
    whole_batch = trained(parse_case_id("single-bf16-v2048-gb4-s2-f64"))
    assert worst_distances(whole_batch, witness(case), steps=(2,))[0] <= EXACT


FAULTS = """
def the_first_batch_again():
    from harness.worker.targets import data
    right = data.global_tokens
    data.global_tokens = lambda case: right(case)[[0] * case.train.steps]

def a_norm_one_bit_larger():
    from torch import nn
    right = nn.RMSNorm.forward
    nn.RMSNorm.forward = lambda self, x: right(self, x) * (1 + 2**-20)
"""


@pytest.mark.parametrize(
    ("fault", "text", "step"),
    [  # `tests/power` has more
        ("fault:gradients_divided_by_world", "fsdp2-tensorwise-ag.fp8-v2048-gb4-s2-f64", 1),
        ("the_first_batch_again", "fsdp2-tensorwise-ag.fp8-v2048-gb4-s2-f64", 2),
        ("fault:precomputed_scale_never_refreshed", "fsdp2-tensorwise-ag.fp8pre-v2048-gb4-s3-f64", 3),
        ("a_norm_one_bit_larger", "tp2-tensorwise-v2048-gb4-s1-f64", 1),
    ],
)
def test_planted_faults_are_found_at_the_step_where_they_show(
    trained, witness, plant, fault: str, text: str, step: int
):
    case = parse_case_id(text)
    broken = trained(case, injections=plant(FAULTS, fault))
    deviations = findings(case, broken, witness(case), EXACT)
    steps = [finding.step for finding in deviations if finding.step is not None]  # wrong tokens are those of all steps
    assert min(steps) == step, deviations


def test_gradients_show_what_the_loss_does_not(trained, witness):
    """AdamW hides a constant factor: losses stay within what FP8 noise explains while every gradient is halved."""
    case = parse_case_id("fsdp2-tensorwise-ag.fp8-v2048-gb4-s2-f64")
    broken = trained(case, injections=("fault:gradients_divided_by_world",))
    (right,) = witness(case).traces
    for found, expected in zip(broken.traces[0].steps, right.steps, strict=True):
        assert found.loss == pytest.approx(expected.loss, abs=3e-3)
    grads, expected_grads = assemble(broken.traces), assemble(witness(case).traces)
    for key in (key for key in grads if key.kind == "grad" and key.step == 1):
        assert relative_distance(grads[key], expected_grads[key]) > 0.3, key


@pytest.mark.parametrize(("words", "least", "most"), [("", 1e-4, 4e-3), ("sgd-lr0.1-", 0.02, 0.2)])
def test_losses_of_sgd_show_a_scaled_update_that_those_of_adamw_hide(trained, words: str, least: float, most: float):
    """Gradients are twice as large behind what is recorded of them: FP8 noise explains 6e-3 nats in bfloat16."""
    case = parse_case_id(f"fsdp2-tensorwise-v2048-gb4-s3-{words}b16")
    broken, right = trained(case, injections=("fault:update_scaled_by_dp",)), trained(case)
    assert broken.traces[0].steps[0].loss == right.traces[0].steps[0].loss
    assert {step.optimizer_steps for step in broken.traces[0].steps} == {1}
    for found, expected in list(zip(broken.traces[0].steps, right.traces[0].steps, strict=True))[1:]:
        assert least < abs(found.loss - expected.loss) < most


# A trainer that shards where `dp_shard > 1`, so that its single-rank reference has no FSDP module.
WITHOUT_FSDP = """
from harness.worker.training import train

def apply():
    stock = train.build_target
    train.build_target = lambda case, world: stock(case, world._replace(fsdp=case.layout.dp_shard > 1))
"""


def test_a_reference_that_is_built_without_fsdp_is_named(trained, witness, plant):
    case = parse_case_id("fsdp2-tensorwise-v2048-gb4-s1-b16")
    run = trained(case)
    assert reference_without_fsdp(case, run, witness(case)) == []
    other = trained(solo_case(case), solo=True, injections=plant(WITHOUT_FSDP))
    assert findings(case, run, other, ORDERED)
    (finding,) = reference_without_fsdp(case, run, other)
    assert (finding.rule, finding.rank) == (NO_FSDP.name, None)
    assert "world.fsdp" in (finding.fix or "")
