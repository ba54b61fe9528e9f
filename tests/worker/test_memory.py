"""What real ranks keep: what the formula says for backward, and nothing besides that is not found and named.

Clean runs, that recording changes no bit and that what other probes hold is not counted: `test_clean_runs.py`.
"""

from __future__ import annotations

import gc

import pytest
import torch

from harness.checks.memory import (
    GROWS,
    MORE_SCALARS,
    OTHER_MODE,
    TOO_MUCH,
    check_leaks,
    check_live_memory,
    check_memory,
)
from harness.matrix.caseid import parse_case_id
from harness.trace import Run
from harness.trace.counts import MOMENTS
from harness.verdict import Finding
from harness.worker.tensors.names import optimizers_of
from tests.builders import make_witnesses, rules
from tests.worker.runs import assert_named, sweep

MEMORY = ("saved_memory",)
SINGLE = "single-tensorwise-v2048-gb4-s2-f32"
TP = "tp2-tensorwise-v2048-gb4-s2-f32"
FSDP = "fsdp2-tensorwise-v2048-gb4-s2-f32"
# Steps enough for what grows: a leak.
GROWING_SINGLE, GROWING_TP, GROWING_FSDP = (text.replace("-s2-", "-s4-") for text in (SINGLE, TP, FSDP))


def findings(text: str, run: Run) -> list[Finding]:
    case = parse_case_id(text)
    witnesses = make_witnesses(case)
    return [*check_live_memory(case, run, witnesses), *check_leaks(case, run, witnesses)]


FAULTS = """
import torch
import torch.distributed as dist
from harness.worker.targets.reference import model, parallel

def after(kind, act):
    right = kind.forward
    def forward(self, x, *args):
        out = right(self, x, *args)
        act(self, x, out)
        return out
    kind.forward = forward

def output_on_a_module():
    after(model.TransformerBlock, lambda self, x, out: setattr(self, "kept", out))

def copy_freed_in_backward():
    def keep(self, x, out):
        self.kept = out.detach().clone()
        if out.requires_grad:
            out.register_hook(lambda grad: delattr(self, "kept"))
    after(model.FeedForward, keep)

def growing_cache():
    cache = []
    after(model.FeedForward, lambda self, x, out: cache.append(x.detach()))

def growing_scalars():
    amaxes = []
    after(model.FeedForward, lambda self, x, out: amaxes.append(out.detach().abs().max()))

def input_on_the_last_rank():
    first = []
    def keep(self, x, out):
        first.append(self)
        if self is first[0] and dist.get_rank() == dist.get_world_size() - 1:
            self.cached = [x]
    after(model.Attention, keep)

def whole_weight_kept():
    cache = {}
    after(model.FeedForward, lambda self, x, out: cache.update({id(self): self.w1.weight.detach().clone()}))

def weights_never_resharded():
    right = parallel.fully_shard
    parallel.fully_shard = lambda *args, **options: right(*args, **{**options, "reshard_after_forward": False})

def weight_of_the_build_kept():
    right, kept = parallel.fully_shard, []
    def fully_shard(module, **options):
        if isinstance(module, model.TransformerBlock):
            kept.append(module.feed_forward.w2.weight.detach())
        return right(module, **options)
    parallel.fully_shard = fully_shard

def gradients_not_freed():
    torch.optim.Optimizer.zero_grad = lambda self, set_to_none=True: [
        param.grad.zero_() for group in self.param_groups for param in group["params"] if param.grad is not None
    ]

def cycle_in_backward():
    class Node: pass
    def keep(self, x, out):
        node = Node()
        node.me, node.kept = node, out.detach().clone()
    after(model.FeedForward, keep)

def saved_anyway():
    def keep(self, x, out):
        self.kept = x
        if out.requires_grad:
            out.register_hook(lambda grad: delattr(self, "kept"))
    after(model.FeedForward, keep)

def never_run_backward():
    after(model.FeedForward, lambda self, x, out: x.exp())
"""
FORWARD, STEP = MOMENTS["forward"], MOMENTS["step"]


@pytest.mark.parametrize(
    ("text", "fault", "tensors", "where"),
    [
        (SINGLE, "output_on_a_module", "float32[4, 32, 128] of layers.0.kept and 1 more", (STEP, (0,))),
        sweep(TP, "output_on_a_module", "of layers.0.kept and 1 more", (STEP, (0, 1))),
        (TP, "copy_freed_in_backward", "of layers.0.feed_forward.kept and 1 more", (FORWARD, (0, 1))),
        (TP, "input_on_the_last_rank", "of layers.0.attention.cached", (STEP, (1,))),
        (FSDP, "whole_weight_kept", "float32[256, 128] of no module and 1 more", (FORWARD, (0, 1))),
        (FSDP, "weights_never_resharded", "", (FORWARD, (0, 1))),
        (FSDP, "weight_of_the_build_kept", "[128, 256] of no module and 1 more", (FORWARD, (0, 1))),
        (FSDP, "gradients_not_freed", "of norm.weight.grad and 3 more", (STEP, (0, 1))),
        (SINGLE, "cycle_in_backward", "float32[4, 32, 128] of no module and 1 more", (FORWARD, (0,))),
    ],
)
def test_what_is_kept_is_found_and_named(
    trained, plant, text: str, fault: str, tensors: str, where: tuple[str, tuple[int, ...]]
):
    run = trained(parse_case_id(text), probes=MEMORY, injections=plant(FAULTS, fault))
    memory_findings = [finding for finding in findings(text, run) if finding.check == check_live_memory.name]
    much = [
        finding
        for finding in memory_findings
        if finding.rule == TOO_MUCH.name and (finding.values["when"], finding.ranks) == where
    ]
    assert any(str(finding.values["tensors"]).endswith(tensors) for finding in much), memory_findings
    assert min(finding.step or 0 for finding in memory_findings) == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (GROWING_SINGLE, "growing_cache"),
        (GROWING_SINGLE, "growing_scalars"),
        sweep(GROWING_TP, "growing_cache"),
        (GROWING_FSDP, "growing_scalars"),
    ],
)
def test_a_cache_that_grows_is_a_leak(trained, plant, text: str, fault: str):
    run = trained(parse_case_id(text), probes=MEMORY, injections=plant(FAULTS, fault))
    leaks = [finding for finding in findings(text, run) if finding.check == check_leaks.name]
    assert {finding.step for finding in leaks} == {3}
    assert rules(leaks) <= {GROWS.name, MORE_SCALARS.name}


@pytest.mark.parametrize("host", ["saved_anyway", "never_run_backward"])
def test_what_autograd_saves_or_frees_takes_no_memory(trained, plant, host: str):
    run = trained(parse_case_id(GROWING_SINGLE), probes=MEMORY, injections=plant(FAULTS, host))
    assert findings(GROWING_SINGLE, run) == []


def saved_findings(text: str, run: Run) -> list[Finding]:
    case = parse_case_id(text)
    return check_memory(case, run, make_witnesses(case))


@pytest.mark.parametrize("dtype", ["f32", sweep("b16")])
def test_checkpointing_keeps_what_the_formula_says_and_full_less_than_selective(trained, dtype: str):
    saved = {}
    for mode in ("", "-ac.full", "-ac.op", "-ac.layer2"):
        text = f"single-tensorwise{mode}-v2048-gb4-s1-{dtype}"
        run = trained(parse_case_id(text), probes=MEMORY)
        assert saved_findings(text, run) == []
        saved[mode] = run.traces[0].saved_memory[0].saved_bytes
    assert saved["-ac.full"] < min(saved["-ac.op"], saved["-ac.layer2"])
    assert max(saved["-ac.op"], saved["-ac.layer2"]) < saved[""]


def test_another_checkpointing_is_named(trained):
    text = "single-tensorwise-ac.full-v2048-gb4-s1-f32"
    run = trained(parse_case_id(text), probes=MEMORY, injections=("fault:checkpointing_lost",))
    assert_named(saved_findings(text, run), OTHER_MODE, mode="none")


def test_an_optimizer_is_found_when_python_lists_it_no_more() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    assert optimizers_of(model) == [optimizer]
    gc.freeze()
    try:
        assert optimizers_of(model) == [optimizer]
    finally:
        gc.unfreeze()
    del optimizer
    assert optimizers_of(model) == []
