"""The contract of a target: what a case asks for that its methods do not take."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from harness.worker.targets import contract
from harness.worker.targets.contract import TargetMisfit, build_target
from harness.worker.targets.target import World
from tests.builders import make_case

WORLD = World(device=torch.device("cpu"), fsdp=False, dp_rank=0, microbatches=1, local_batch=8)


def built(monkeypatch, step, **axes):
    module = ModuleType("labelled_target")
    target = SimpleNamespace(model=nn.Linear(1, 1), step=step, evaluate=lambda microbatches: 0.0)
    module.build = lambda case, world: target  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "labelled_target", module)
    monkeypatch.setattr(contract, "require_process_group", lambda where: None)
    return build_target(make_case(target="labelled_target", **axes), WORLD)


def test_a_step_without_labels_trains_cases_that_ignore_none(monkeypatch):
    assert built(monkeypatch, lambda microbatches: (0.0, None)).model is not None


def test_a_step_without_labels_is_told_by_cases_that_ignore_some(monkeypatch):
    with pytest.raises(
        TargetMisfit, match=r"step\(\) takes no labels.*Fix: give it `def step\(self, microbatches, labels"
    ):
        built(monkeypatch, lambda microbatches: (0.0, None), ignored_tokens="half")


def test_an_evaluation_without_labels_is_told_too(monkeypatch):
    with pytest.raises(TargetMisfit, match=r"evaluate\(\) takes no labels"):
        built(monkeypatch, lambda microbatches, labels=None: (0.0, None), ignored_tokens="half", evaluate=True)
