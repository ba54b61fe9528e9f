"""The solo witness: one rank computes what layouts compute, at every step, and nothing that is broken.

More kinds of layouts are in `test_clean_runs.py`. What it computes for TP ranks has their shape, parts and rounding.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, float8_ops

from harness.checks.assembly import assemble, relative_distance
from harness.checks.model import NO_FSDP, reference_without_fsdp
from harness.checks.parity import check_parity, worst_distances
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id, solo_case
from harness.trace import Run
from harness.verdict import Finding
from harness.worker.one_rank.module_ranks import FLOAT8_MATMUL, FirstMatmul, of_columns, of_rows, of_sequence
from harness.worker.tensors.ranks import spread, summed
from harness.worker.virtual import device as virtual_device
from tests.builders import make_tolerance, make_witnesses

EXACT = 1e-12  # measured: below 2e-15
ORDERED = 1e-8  # measured: below 4e-9


@pytest.fixture(scope="module")
def witness(trained):
    """The solo witness of a case."""
    return lambda case: trained(solo_case(case), solo=True)


def findings(case: Case, run: Run, solo: Run, allowed: float) -> list[Finding]:
    tolerance = make_tolerance(*[allowed] * case.train.steps, name="parity")
    return check_parity(case, run, make_witnesses(case, solo=solo, parity_tolerance=tolerance))


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


BF16 = torch.bfloat16


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(BF16)


def test_a_sum_is_rounded_once_and_in_rank_order() -> None:
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=BF16)
    assert summed(parts).item() == 258  # rounded after every addition it would be 256
    wide = torch.tensor([[1e8], [1.0], [-1e8]])
    assert summed(wide).item() == 0  # in float32 the second part is lost


def test_gradients_of_a_shared_tensor_are_summed_by_every_rank_first() -> None:
    given = torch.zeros(1, dtype=BF16, requires_grad=True)
    stack = spread(given, 2)
    readers = torch.tensor([[256.0, 1.0], [1.0, 1.0]], dtype=BF16)  # by reader and rank
    sum((stack[:, 0] * reader).sum() for reader in readers).backward()
    assert given.grad.item() == 258  # 256 + 1 is 256 on the first rank, 1 + 1 is 2 on the second


@pytest.mark.parametrize("ranks", [2, 4])
def test_linears_in_high_precision_multiply_in_the_shapes_of_ranks(ranks: int) -> None:
    linear = nn.Linear(64, 32, bias=False).to(BF16)
    given = random(3, 5, 64)
    columns = of_columns(linear, ranks)(spread(given, ranks))
    parts = of_rows(linear, ranks)(given)
    assert (columns.shape, parts.shape) == ((3, 5, 32), (ranks, 3, 5, 32))
    for result in (columns, summed(parts)):
        torch.testing.assert_close(result, linear(given), rtol=0.02, atol=0.02)
    first = 64 // ranks
    assert torch.equal(parts[0], F.linear(given[..., :first].contiguous(), linear.weight[:, :first].contiguous()))


def test_the_weight_of_a_norm_has_the_gradients_of_all_ranks() -> None:
    norm, given = nn.RMSNorm(8).to(BF16), random(2, 6, 8)
    places = [(slice(0, 2), slice(0, 3), slice(0, 8)), (slice(0, 2), slice(3, 6), slice(0, 8))]
    forward = of_sequence(norm, places, ())
    normed = forward(given)
    assert torch.equal(normed, norm(given))
    (of_all,) = torch.autograd.grad(normed.sum(), norm.weight)
    of_ranks = [torch.autograd.grad(norm(given[place]).sum(), norm.weight)[0] for place in places]
    assert torch.equal(of_all, summed(torch.stack(of_ranks)))
    for _ in range(2):  # microbatches: ranks add up theirs before they add up ranks
        forward(given).sum().backward()
    assert torch.equal(norm.weight.grad, summed(torch.stack([grad + grad for grad in of_ranks])))


def test_a_router_has_the_gradients_of_all_ranks_of_the_sequence() -> None:
    gate, given = nn.Linear(8, 4, bias=False).to(BF16), random(2, 6, 8)
    places = [(slice(0, 2), slice(0, 3), slice(0, 4)), (slice(0, 2), slice(3, 6), slice(0, 4))]  # of its output
    scores = of_sequence(gate, places, ())(given)
    torch.testing.assert_close(scores, gate(given))
    (of_all,) = torch.autograd.grad(scores.sum(), gate.weight)
    of_ranks = [torch.autograd.grad(gate(given[place[:-1]]).sum(), gate.weight)[0] for place in places]
    assert torch.equal(of_all, summed(torch.stack(of_ranks)))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scaled_matmuls_are_multiplied_again_in_parts(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual_device.install()
    linear = nn.Linear(96, 32, bias=False, dtype=BF16)
    module = convert_to_float8_training(nn.Sequential(linear), config=Float8LinearConfig.from_recipe_name(recipe))
    monkeypatch.setattr(float8_ops, "addmm_float8_unwrapped", float8_ops.addmm_float8_unwrapped)
    scaled = FirstMatmul(FLOAT8_MATMUL)
    assert scaled.in_parts([48, 48]) is None
    output = module(random(16, 96).requires_grad_())
    parts = scaled.in_parts([24] * 4)  # of columns: padded
    assert parts.shape == (4, 16, 32)
    torch.testing.assert_close(parts.double().sum(0), output.double(), rtol=0.02, atol=0.02)
    scaled.restart()
    output.sum().backward()
    assert scaled.in_parts([16, 16]).shape == (2, 16, 96), "the gradient of the input comes first"
