"""Local parity on real ranks locates faults; `test_clean_runs.py` has runs that stay within rounding."""

from __future__ import annotations

import pytest

from harness.checks.local_parity import check_local_parity
from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.trace import Run
from harness.verdict import Finding
from tests.builders import make_witnesses

TP = "tp2-tensorwise-v2048-gb4-s1-b16"
HSDP = "hsdp2x2-tensorwise-v2048-gb4-s1-b16"


@pytest.fixture(scope="module")
def judged(train, trained):
    """The findings of a case, which trains with these injections."""

    def run(case: Case, injections: tuple[str, ...] = ()) -> list[Finding]:
        recorded = trained(case, probes=("sketches", "module_tensors"), injections=injections)
        ranks = tuple(trace.module_tensors or () for trace in recorded.traces)
        again = Run(traces=train(case, replayed=ranks), failures=())
        return check_local_parity(case, recorded, make_witnesses(case, replay=again))

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

def gradient_off():
    from harness.worker.faults.hooks import after_backward
    after_backward(lambda model, step: list(model.parameters())[3].grad.mul_(1.3))

def reported_norm_off():
    from harness.worker import train
    right = train.gradient_norm
    train.gradient_norm = lambda share: right(share) * 1.001
"""


@pytest.mark.parametrize(
    ("text", "fault", "words"),
    [
        (TP, "activation_off", "the input of layers.0.feed_forward.w2"),
        (TP, "attention_off", "the input of layers.0.attention.wo"),
        (TP, "norm_off", "the output of layers.0.attention_norm"),
        (TP, "residual_lost", "the input of layers.1.attention_norm"),
        (TP, "update_off", "the value after the optimizer step of layers.0"),
        (TP, "reported_norm_off", "grad_norm is not that of the recorded gradients"),
        (HSDP, "activation_off", "the input of layers.0.feed_forward.w2 on data-parallel rank 0"),
        (HSDP, "gradient_off", "the gradient of layers.0.attention.wk.weight is not what one rank computes"),
        (HSDP, "fault:gradient_cast_to_e4m3", "the gradient of"),
        (HSDP, "fault:one_gradient_lost", "the gradient of"),
        (HSDP, "fault:batches_rotated", "the output of tok_embeddings on data-parallel rank 0"),
        ("tp2-tensorwise-v2048-gb4-s1-f32", "fault:norm_gradients_not_reduced", "the gradient of"),
    ],
)
def test_faults_are_located(judged, plant, text: str, fault: str, words: str):
    (first, *_) = judged(parse_case_id(text), plant(FAULTS, fault))
    assert first.message.startswith(words), first
    assert first.step == 1
