"""The solo witness: one rank computes what every kind of layout computes, at every step, and nothing that is broken."""

from __future__ import annotations

import pytest

from harness.checks.assembly import assemble, relative_distance
from harness.checks.parity import check_parity, worst_distance
from harness.checks.witnesses import Witnesses
from harness.measured.tolerance import Tolerance
from harness.spec.case import Case
from harness.spec.caseid import case_id, parse_case_id, solo_case
from harness.trace import Run
from harness.verdict import Finding

EXACT = 1e-12  # measured: below 2e-15
ORDERED = 1e-8  # measured: below 4e-9


@pytest.fixture(scope="module")
def witness(train):
    """The solo witness of a case, run once for all tests of this file."""
    kept: dict[str, Run] = {}

    def run(case: Case) -> Run:
        alone = solo_case(case)
        if case_id(alone) not in kept:
            kept[case_id(alone)] = Run(traces=train(alone, probes=("sketches",), solo=True), failures=())
        return kept[case_id(alone)]

    return run


def findings(case: Case, run: Run, solo: Run, allowed: float) -> list[Finding]:
    steps = case.train.steps
    given = Witnesses(
        golden=None,
        tolerance=None,
        solo=solo,
        parity_tolerance=Tolerance(name="parity", key="k", per_step=(allowed,) * steps, margin=2.0, evidence="e"),
        refusal=None,
        expected_fqns=(),
        expected_scaled_mm=0,
    )
    return check_parity(case, run, given)


@pytest.mark.parametrize(
    "text",
    [
        "single-tensorwise-ac.op-v2048-gb4-s3-f64",
        "tp2-tensorwise-tpstyle.fp8-ac.full-v2048-gb4-s3-f64",
        "tp2-nosp-nolp-rowwise-v2050-gb4-s3-f64",
        "tp4-rowwise_with_gw_hp-v2050-gb4-s2-f64",
        "tp2-tensorwise-head.fp8-v2256-vpad128-gb4-s2-f64",
        "fsdp2-tensorwise-ag.fp8-v2048-gb4-s3-f64",
        "fsdp2-tensorwise-ag.fp8pre-ac.full-v2048-gb4-s3-f64",
        "fsdp3-rowwise-v2050-gb6-s2-f64",
        "hsdp2x2-tensorwise-ag.fp8pre-v2048-gb4-s3-f64",
        "fsdp2-tp2-tensorwise-v2048-gb4-s3-f64",
        "fsdp2-tp2-bf16-v2050-gb4-s2-f64",
        "hsdp2x2-tp2-nosp-rowwise-v2048-gb4-s2-f64",
    ],
)
def test_in_float64_every_kind_of_layout_is_exact_at_every_step(train, witness, text: str):
    case = parse_case_id(text)
    run = Run(traces=train(case, probes=("sketches",)), failures=())
    for step in range(1, case.train.steps + 1):
        assert worst_distance(run, witness(case), step=step) <= EXACT, f"step {step}"
    assert findings(case, run, witness(case), EXACT) == []


@pytest.mark.parametrize(
    "text",
    [
        "fsdp2-tensorwise-ag.fp8pre-ac.op-v2048-gb4-s3-b16",
        "fsdp2-rowwise-v2048-gb4-s3-f32",
        "fsdp3-tensorwise-v2050-gb6-s2-b16",
        "fsdp2-bf16-ac.full-v2048-gb4-s3-b16",
    ],
)
def test_what_adds_up_in_the_order_of_ranks_agrees_in_every_dtype(train, witness, text: str):
    case = parse_case_id(text)
    run = Run(traces=train(case, probes=("sketches",)), failures=())
    assert findings(case, run, witness(case), ORDERED) == []


def test_the_witness_is_one_rank_that_holds_everything(train, witness):
    case = parse_case_id("hsdp2x2-tp2-nosp-rowwise-v2048-gb4-s2-f64")
    (trace,) = witness(case).traces
    assert all(sketch.owner and sketch.local_shape == sketch.shape for sketch in trace.sketches)
    assert trace.data_digest == train(parse_case_id("single-rowwise-v2048-gb4-s2-f64"))[0].data_digest


def test_the_witness_replays_every_shard_with_its_own_scale(train, witness):
    """Tensorwise scales of activations belong to a dp rank: one rank that trains on the whole batch is another run."""
    case = parse_case_id("fsdp2-tensorwise-v2048-gb4-s3-f64")
    whole_batch = Run(
        traces=train(parse_case_id("single-tensorwise-v2048-gb4-s3-f64"), probes=("sketches",)), failures=()
    )
    assert 1e-3 < worst_distance(whole_batch, witness(case), step=1) < 1


def test_without_fp8_a_replay_is_the_whole_batch(train, witness):
    case = parse_case_id("fsdp2-bf16-v2048-gb4-s2-f64")
    whole_batch = Run(traces=train(parse_case_id("single-bf16-v2048-gb4-s2-f64"), probes=("sketches",)), failures=())
    assert worst_distance(whole_batch, witness(case), step=2) <= EXACT


FAULTS = '''
from torch.distributed.tensor import DTensor, Replicate

def local_amax():
    """The amax of a TP shard taken for that of the tensor."""
    from torchao.float8 import float8_utils
    right = float8_utils.tensor_to_amax
    def wrong(x, *args, **options):
        if not isinstance(x, DTensor):
            return right(x, *args, **options)
        return DTensor.from_local(right(x.to_local(), *args, **options), x.device_mesh, [Replicate()], run_check=False)
    float8_utils.tensor_to_amax = wrong

def gradients_averaged():
    """FSDP2 divides by the world, as it does by default, what is divided by the tokens of all ranks already."""
    import harness.worker.target as target
    from torch.distributed.fsdp import FSDPModule
    right = target.apply_fsdp
    def wrong(model, mesh, case):
        right(model, mesh, case)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(mesh.size())
    target.apply_fsdp = wrong

def the_same_batch_on_every_rank():
    import harness.worker.target as target
    target.batch_slice = lambda case, meshes: slice(0, case.local_batch)

def the_first_batch_again():
    import harness.worker.target as target
    right = target.global_tokens
    target.global_tokens = lambda case: right(case)[[0] * case.train.steps]

def a_scale_of_the_shard():
    """The float8 all-gather casts every shard by its own scale; the gathered weight has that of this rank."""
    from torchao.float8 import fsdp_utils
    right = fsdp_utils.hp_tensor_to_float8_dynamic
    fsdp_utils.hp_tensor_to_float8_dynamic = lambda *args, **options: right(*args, **{**options, "reduce_amax": False})

def scales_never_precomputed_again():
    import harness.worker.float8 as float8
    right = float8.precompute_float8_dynamic_scale_for_fsdp
    done = []
    def once(model):
        if not done:
            right(model)
        done.append(1)
    float8.precompute_float8_dynamic_scale_for_fsdp = once

def norms_not_reduced_over_tp():
    """Every TP rank keeps its own share of the gradient of a norm as if it were whole."""
    import harness.worker.target as target
    right = target.build_optimizer
    def wrong(model, case):
        for name, param in model.named_parameters():
            if "norm" in name:
                def keep(grad, mesh=param.device_mesh, places=param.placements):
                    return DTensor.from_local(grad.to_local(), mesh, places, run_check=False)
                param.register_hook(keep)
        return right(model, case)
    target.build_optimizer = wrong

def a_norm_one_bit_larger():
    from torch import nn
    right = nn.RMSNorm.forward
    nn.RMSNorm.forward = lambda self, x: right(self, x) * (1 + 2**-20)
'''


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "faults.py"
    path.write_text(FAULTS)
    return lambda name: (f"{path}:{name}",)


@pytest.mark.parametrize(
    ("fault", "text", "step"),
    [
        ("local_amax", "tp2-tensorwise-v2048-gb4-s2-f64", 1),
        ("gradients_averaged", "fsdp2-tensorwise-ag.fp8-v2048-gb4-s3-f64", 1),
        ("the_same_batch_on_every_rank", "fsdp2-tensorwise-ag.fp8-v2048-gb4-s3-f64", 1),
        ("the_first_batch_again", "fsdp2-tensorwise-ag.fp8-v2048-gb4-s3-f64", 2),
        ("a_scale_of_the_shard", "fsdp2-tensorwise-ag.fp8-v2048-gb4-s3-f64", 1),
        ("scales_never_precomputed_again", "fsdp2-tensorwise-ag.fp8pre-v2048-gb4-s3-f64", 3),
        ("norms_not_reduced_over_tp", "tp2-tensorwise-v2048-gb4-s2-f64", 1),
        ("a_norm_one_bit_larger", "tp2-tensorwise-v2048-gb4-s2-f64", 1),
    ],
)
def test_planted_faults_are_found_at_the_step_where_they_show(train, witness, faults, fault: str, text: str, step: int):
    case = parse_case_id(text)
    broken = Run(traces=train(case, probes=("sketches",), injections=faults(fault)), failures=())
    found = findings(case, broken, witness(case), EXACT)
    assert found and min(finding.step for finding in found) == step, found


def test_gradients_show_what_the_loss_does_not(train, witness, faults):
    """AdamW hides a constant factor: losses stay within what FP8 noise explains while every gradient is halved."""
    case = parse_case_id("fsdp2-tensorwise-ag.fp8-v2048-gb4-s3-f64")
    broken = train(case, probes=("sketches",), injections=faults("gradients_averaged"))
    (right,) = witness(case).traces
    for found, expected in zip(broken[0].steps, right.steps, strict=True):
        assert found.loss == pytest.approx(expected.loss, abs=3e-3)
    grads, expected_grads = assemble(broken), assemble(witness(case).traces)
    for key in (key for key in grads if key.kind == "grad" and key.step == 1):
        assert relative_distance(grads[key], expected_grads[key]) > 0.3, key
