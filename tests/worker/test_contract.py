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


def built(monkeypatch, step=lambda microbatches: (0.0, None), methods=(), makes=None, **axes):
    """The target with this step, more methods of these names and what `makes` returns, for a case with these axes."""
    module = ModuleType("a_target_of_tests")
    target = SimpleNamespace(model=nn.Linear(1, 1), step=step, evaluate=lambda microbatches: 0.0)
    vars(target).update(dict.fromkeys(methods, step))
    target.optimizer = makes and makes(target.model.parameters())
    module.build = lambda case, world: target  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(contract, "require_process_group", lambda where: None)
    return build_target(make_case(target=module.__name__, **axes), WORLD)


def test_a_step_without_labels_trains_cases_that_ignore_none(monkeypatch):
    assert built(monkeypatch).model is not None


def test_a_step_without_labels_is_told_by_cases_that_ignore_some(monkeypatch):
    with pytest.raises(
        TargetMisfit, match=r"step\(\) takes no labels.*Fix: give it `def step\(self, microbatches, labels"
    ):
        built(monkeypatch, ignored_tokens="half")


def test_an_evaluation_without_labels_is_told_too(monkeypatch):
    with pytest.raises(TargetMisfit, match=r"evaluate\(\) takes no labels"):
        built(monkeypatch, lambda microbatches, labels=None: (0.0, None), ignored_tokens="half", evaluate=True)


@pytest.mark.parametrize(("methods", "missing"), [((), "save"), (("save",), "load")])
def test_a_target_that_cannot_be_resumed_is_told(monkeypatch, methods, missing):
    with pytest.raises(TargetMisfit, match=f"without a method `{missing}`, and the case is resumed"):
        built(monkeypatch, methods=methods, resume="same")


@pytest.mark.parametrize(("makes", "made"), [(torch.optim.AdamW, "an AdamW"), (None, "no optimizer")])
def test_another_optimizer_than_sgd_is_told(monkeypatch, makes, made):
    with pytest.raises(TargetMisfit, match=rf"build\(\) made {made}, and the case has optimizer = sgd"):
        built(monkeypatch, makes=makes, optimizer="sgd")


def test_sgd_may_be_of_a_class_of_its_own(monkeypatch):
    class Sgd(torch.optim.SGD):
        pass

    assert built(monkeypatch, makes=Sgd, optimizer="sgd").model is not None
