"""What optimizers do on real ranks is what their formulas say, and what one rank does otherwise is found."""

from __future__ import annotations

import pytest

from harness.checks.model import BUFFER_CHANGED, check_model
from harness.checks.updates import FORMULA, NO_UPDATE, OPTION, UNMOVED, check_updates
from harness.matrix.caseid import parse_case_id
from tests.builders import make_witnesses, rules

TP = "tp2-tensorwise-v2048-gb4-s2-b16"
FAULTS = """
import torch
import torch.distributed as dist
from harness.worker.targets.reference.model import Llama

def around(change):
    stock, steps = torch.optim.AdamW.step, []
    def step(self):
        steps.append(1)
        if dist.get_rank() and len(steps) == 2:
            change(self, lambda: stock(self))
        else:
            stock(self)
    step.hooked = getattr(stock, "hooked", False)
    torch.optim.AdamW.step = step

def step_skipped():
    around(lambda optimizer, step: None)

def decay_skipped():
    def without(optimizer, step):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        step()
    around(without)

def momentum_rounded():
    def rounded(optimizer, step):
        for state in optimizer.state.values():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())
        step()
    around(rounded)

def one_set_back():
    @torch.no_grad()
    def lost(optimizer, step):
        param = optimizer.param_groups[0]["params"][2]
        before = param.clone()
        step()
        param.copy_(before)
    around(lost)

def rope_scaled():
    stock = Llama.forward
    def forward(self, *args):
        with torch.no_grad():
            next(self.buffers()).mul_(0.99)
        return stock(self, *args)
    Llama.forward = forward
"""


@pytest.mark.parametrize("text", [TP, "fsdp2-bf16-v2048-gb4-s2-sgd-lr0.1-param.b16-b16"])
def test_optimizers_that_step_have_no_finding(trained, text: str):
    case = parse_case_id(text)
    run, solo = trained(case), trained(case, solo=True)
    assert check_updates(case, run, make_witnesses(case, solo=solo)) == []
    assert all(update.updated and update.distance > 0 for trace in run.traces for update in trace.model.updates)


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("step_skipped", NO_UPDATE),
        ("decay_skipped", OPTION),
        ("momentum_rounded", FORMULA),
        ("one_set_back", UNMOVED),
        ("rope_scaled", BUFFER_CHANGED),
    ],
)
def test_one_rank_that_updates_otherwise_is_found(trained, plant, fault: str, rule):
    case = parse_case_id(TP)
    run, witnesses = trained(case, injections=plant(FAULTS, fault)), make_witnesses(case, solo=trained(case, solo=True))
    findings = [*check_model(case, run, witnesses), *check_updates(case, run, witnesses)]
    assert rules(findings) == {rule.name}
    assert fault == "rope_scaled" or {(finding.step, finding.ranks) for finding in findings} == {(2, (1,))}
