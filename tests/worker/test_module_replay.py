"""Local parity on real ranks locates faults; `test_clean_runs.py` has runs that stay within rounding."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from harness.checks.check import Rule
from harness.checks.module_replay import INCOMPARABLE, NORM, SUM, TENSOR, check_module_replay
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.matrix.numerics import replayed_steps
from harness.trace import Run
from harness.verdict import Finding
from tests.builders import make_witnesses
from tests.worker.runs import UNDER_TP, sweep

TP = "tp2-tensorwise-v2048-gb4-s1-b16"
HSDP = "hsdp2x2-tensorwise-v2048-gb4-s1-b16"
CP = "fsdp2-tp2-cp2-tensorwise-v2048-gb4-s1-b16"
INDUCTOR = "single-tensorwise-inductor-v2048-gb2-s1-f32"


@pytest.fixture(scope="module")
def judged(train, trained):
    """The findings of a case, which trains with these injections."""

    def run(case: Case, injections: tuple[str, ...] = ()) -> list[Finding]:
        recorded = trained(case, probes=("sketches", "module_tensors"), injections=injections)
        ranks = tuple(trace.module_tensors or () for trace in recorded.traces)
        again = Run(traces=train(case, replayed=ranks), failures=())
        return check_module_replay(case, recorded, make_witnesses(case, replay=again))

    return run


FAULTS = """
import torch
from torch import nn
from harness.worker.targets.reference import model

def one_percent(factor=1.01, where="silu"):
    right = getattr(nn.functional, where)
    setattr(nn.functional, where, lambda x, *args, **options: right(x, *args, **options) * factor)

def activation_off(): one_percent()

def attention_off():
    one_percent(where="scaled_dot_product_attention")

def norm_off():
    right = nn.RMSNorm.forward
    nn.RMSNorm.forward = lambda self, x: right(self, x) * 1.02

def residual_lost():
    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x * 0.99 + self.feed_forward(self.ffn_norm(x))
    model.TransformerBlock.forward = forward

def update_off():
    right = torch.optim.AdamW.step
    def step(self, *args, **options):
        for group in self.param_groups:
            group["lr"] *= 1.001
        right(self, *args, **options)
        for group in self.param_groups:
            group["lr"] /= 1.001
    torch.optim.AdamW.step = step

def last_sum_lost_on_rank_1():
    from torch.distributed.tensor import Partial
    from harness.plugins.faults.worker.hooks import wrap
    sums = []
    def reduce(stock, self, tensor, mesh, mesh_dim):
        total = stock(self, tensor, mesh, mesh_dim)
        if self.reduce_op == "sum" and tensor.dim() > 1:
            sums.append(tensor)
        return tensor if len(sums) == 4 and mesh.get_rank() == 1 else total
    wrap(Partial, "_reduce_value", reduce)

def gradient_off():
    from harness.plugins.faults.worker.hooks import after_backward
    after_backward(lambda model: list(model.parameters())[3].grad.mul_(1.3))

def gradient_off_on_rank_0():
    from harness.plugins.faults.worker.hooks import after_backward, local
    after_backward(lambda model: torch.distributed.get_rank() or local(model.norm.weight.grad).mul_(1.3))

def norm_gradient_slightly_off():
    from harness.plugins.faults.worker.hooks import after_backward
    after_backward(lambda model: model.norm.weight.grad.mul_(1.005))

def gradients_off_from_step_seven():
    from harness.plugins.faults.worker.hooks import RUN, after_backward
    def change(model):
        if RUN.step >= 7:
            for param in model.parameters():
                param.grad.mul_(1.03)
    after_backward(change)

def reported_norm_off():
    from harness.worker.training import train
    right = train.gradient_norm
    train.gradient_norm = lambda share: right(share) * 1.001
"""


OF_DP_RANK = " on data-parallel rank 0"
OF_RANK_1 = ", partial of rank 1,"


@pytest.mark.parametrize(
    ("text", "fault", "place"),
    [
        (TP, "activation_off", (TENSOR, "input", "layers.0.feed_forward.w2", "")),
        sweep(TP, "attention_off", (TENSOR, "input", "layers.0.attention.wo", "")),
        sweep(TP, "norm_off", (TENSOR, "output", "layers.0.attention_norm", "")),
        sweep(TP, "residual_lost", (TENSOR, "input", "layers.1.attention_norm", "")),
        (TP, "fault:partial_output_of_one_rank_off", (TENSOR, "output", "layers.0.attention.wo", OF_RANK_1)),
        sweep(TP, "fault:last_bit_of_partials_lost", (TENSOR, "input", "layers.0.ffn_norm", "")),
        sweep(TP, "fault:gradient_of_logits_off", (TENSOR, "gradient of the output", "output", "")),
        sweep(TP, "update_off", (TENSOR, "value after the optimizer step", "tok_embeddings.weight", "")),
        sweep(HSDP, "activation_off", (TENSOR, "input", "layers.0.feed_forward.w2", OF_DP_RANK)),
        (HSDP, "gradient_off", (TENSOR, "gradient", "layers.0.attention.wk.weight", "")),
        sweep(CP, "norm_gradient_slightly_off", (TENSOR, "gradient", "norm.weight", "")),
        sweep(INDUCTOR, "attention_off", (TENSOR, "*", "layers.*", "*")),
        sweep(HSDP, "fault:gradient_cast_to_e4m3", (TENSOR, "gradient*", "*", "*")),
        sweep(HSDP, "fault:one_gradient_lost", (TENSOR, "gradient*", "*", "*")),
        (HSDP, "fault:batches_rotated", (TENSOR, "output", "tok_embeddings", OF_DP_RANK)),
        (
            "tp2-tensorwise-v2048-gb4-s1-f32",
            "fault:norm_gradients_not_reduced",
            (INCOMPARABLE, "gradient", "*norm.weight", ""),
        ),
    ],
)
def test_faults_are_located(judged, plant, text: str, fault: str, place: tuple[Rule, str, str, str]):
    """`place`: the rule, and patterns of the tensor, the module and the data-parallel rank."""
    (first, *_) = judged(parse_case_id(text), plant(FAULTS, fault))
    rule, *patterns = place
    assert (first.rule, first.step) == (rule.name, 1), first
    located = (first.values["tensor"], first.module, first.values.get("part", ""))
    assert all(map(fnmatchcase, located, patterns)), first


@pytest.mark.parametrize(
    ("fault", "ended"),
    [
        ("partial_output_not_reduced", "ranks continue with their local result"),
        sweep("partial_output_averaged", "it is averaged instead of summed"),
    ],
)
def test_a_sum_over_tp_that_is_not_formed_names_the_linear_and_not_the_norm_behind_it(judged, plant, fault, ended):
    (first, *_) = judged(parse_case_id(TP), plant(FAULTS, f"fault:{fault}"))
    assert (first.rule, first.module, first.operand) == (SUM.name, "layers.0.attention.wo", "output"), first
    assert first.values["ended"] == ended and first.ranks == ()


@pytest.mark.parametrize("dtype", [sweep("f64"), "b16"])
def test_a_sum_over_tp_that_one_rank_does_not_use_names_the_linear_and_the_rank(judged, plant, dtype):
    case = parse_case_id(f"tp2-nosp-tensorwise-v2048-gb4-s1-{dtype}")
    (first, *_) = judged(case, plant(FAULTS, "last_sum_lost_on_rank_1"))
    assert (first.rule, first.module, first.ranks) == (SUM.name, "layers.1.feed_forward.w2", (1,)), first
    assert first.values["ended"] == "rank 1 goes on with 0 x rank 0 + 1 x rank 1"


def test_the_rank_whose_replica_alone_is_off_is_named_though_it_is_the_one_compared(judged, plant):
    (first, *_) = judged(parse_case_id(TP), plant(FAULTS, "gradient_off_on_rank_0"))
    assert (first.rule, first.module, first.ranks) == (INCOMPARABLE.name, "norm.weight", (0,)), first


@pytest.mark.sweep  # ten steps, twice
def test_gradients_that_are_wrong_from_a_later_step_on_are_found(judged, plant):
    case = parse_case_id("tp2-tensorwise-v2048-gb2-sl16-s10-b16")
    assert replayed_steps(case) == tuple(range(1, 11))
    (first, *_) = judged(case, plant(FAULTS, "gradients_off_from_step_seven"))
    assert (first.rule, first.step, first.values["tensor"]) == (TENSOR.name, 7, "gradient"), first
    assert first.values["distance"] == pytest.approx(0.03, rel=0.01)


def test_a_reported_norm_of_other_gradients_is_found(judged, plant):
    (first, *_) = judged(parse_case_id(TP), plant(FAULTS, "reported_norm_off"))
    assert (first.rule, first.step) == (NORM.name, 1)
    assert (first.values["number"], first.values["source"]) == ("grad_norm", "gradients")


SHARED = "fsdp2-tp2-ep4-{}-moe4-top3-v2048-gb4-s1-b16"


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", ["rowwise-gmm.fp8", "mxfp8-gmm.fp8"])
def test_experts_beside_tp_have_the_bits_of_one_rank_module_by_module(train, trained, recipe: str) -> None:
    """In blocks of MXFP8 tokens share a scale, so that one rank needs them in the order of the ranks that send them."""
    case = parse_case_id(SHARED.format(recipe))
    fixes = (UNDER_TP,) if recipe.startswith("mxfp8") else ()
    recorded = trained(case, probes=("sketches", "module_tensors"), injections=fixes)
    (replayed,) = train(case, replayed=tuple(trace.module_tensors or () for trace in recorded.traces))
    distances = {f"{tensor.fqn} {tensor.kind}": tensor.distance for tensor in replayed.module_distances}
    of_mixture = {name: distance for name, distance in distances.items() if ".moe" in name}
    assert len(of_mixture) > 20
    assert {name: distance for name, distance in of_mixture.items() if distance != 0} == {}
