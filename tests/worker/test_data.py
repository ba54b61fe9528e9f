"""Data and weights: the same bits for ever, learnable, scale faults are visible; and what a target must take."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.worker.probes.discovery import InputRecorder
from harness.worker.targets import contract, data
from harness.worker.targets.contract import TargetMisfit, build_target
from harness.worker.targets.reference.loss import lengths_of
from harness.worker.targets.target import World
from tests.builders import make_case


def test_the_bits_never_change():
    """Every golden rests on these bits. If this fails, the data changed and every golden must be made again."""
    tokens = data.make_tokens(steps=2, sequences=3, seq_len=8, vocab_size=100, seed=7)
    weight = data.make_weight("layers.0.attention.wq.weight", (32, 16), seed=7)
    assert data.digest({"tokens": tokens, "weight": weight}) == DIGEST


DIGEST = "46d05d29f482ba788ddaeb6271672a495535bee97e168c930363bcfa8e9ae62b"


@settings(max_examples=30)
@given(vocab_size=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1))
def test_tokens_are_in_range_and_follow_their_rule(vocab_size, seed):
    tokens = data.make_tokens(steps=1, sequences=2, seq_len=64, vocab_size=vocab_size, seed=seed)
    assert tokens.shape == (1, 2, 65)
    assert tokens.min() >= 0
    assert tokens.max() < vocab_size


@given(st.integers(2, 9), st.integers(1, 40), st.sampled_from(["none", "unequal", "half"]))
def test_the_last_labels_of_a_sequence_are_ignored(sequences, length, ignored_tokens):
    case = make_case(global_batch=sequences, seq_len=length, ignored_tokens=ignored_tokens)
    (ignored,) = data.ignored_labels(case)
    assert ignored.shape == (sequences, length)
    assert (~ignored).sum() == case.train.valid_tokens
    assert (np.diff(ignored.astype(int), axis=1) >= 0).all()
    assert not ignored[0].any()


@given(st.integers(8, 200), st.sampled_from(["documents", "padded"]), st.integers(0, 9))
def test_documents_fill_a_sequence_and_the_loss_has_the_next_token_of_each_in_its_own(length, packing, seed):
    case = make_case(global_batch=2, seq_len=length, packing=packing, steps=2, seed=seed)
    train, positions, ignored = case.train, data.positions(case), data.ignored_labels(case)
    for step, sequence in np.ndindex(2, 2):
        lengths = train.documents(sequence, step + 1)
        assert sum(lengths) == length and len(lengths) > 1 and all(each % 2 for each in lengths[:-1])
        begins = np.flatnonzero(positions[step, sequence] == 0)
        assert (
            np.diff([*begins, length]).tolist() == [*lengths] == lengths_of(torch.from_numpy(positions[step, sequence]))
        )
        assert (~ignored[step, sequence]).sum() == train.labels_of(sequence, step + 1) > 0
        assert ignored[step, sequence, begins[1:] - 1].all()
    assert ignored[..., -1].all() == (packing == "padded")


def test_tokens_are_zipf_distributed_and_mostly_predictable():
    tokens = data.make_tokens(steps=4, sequences=16, seq_len=128, vocab_size=500, seed=0)
    pairs = np.stack([tokens[..., :-1].ravel(), tokens[..., 1:].ravel()])
    followers: dict[int, list[int]] = {}
    for before, after in pairs.T:
        followers.setdefault(int(before), []).append(int(after))
    predictable = sum(max(followers[key].count(value) for value in set(followers[key])) for key in followers)
    assert 0.75 < predictable / pairs.shape[1] < 0.9
    fresh = data.make_tokens(steps=1, sequences=4000, seq_len=1, vocab_size=500, seed=0)[..., 0]
    assert (fresh == 0).mean() > 4 * (fresh == 9).mean() > 0


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(128, 128), (256, 128), (2256, 128)])
def test_every_shard_has_its_own_amax_and_it_is_negative(shards, axis, shape):
    """Otherwise a scale taken from one shard, or without abs, would be right by luck."""
    weight = data.make_weight("w", shape, seed=0)
    pieces = np.array_split(weight, shards, axis=axis)
    amaxes = [float(np.abs(piece).max()) for piece in pieces]
    assert len(set(amaxes)) == shards
    assert all(piece.min() == -amax for piece, amax in zip(pieces, amaxes, strict=True))
    assert weight.max() < max(amaxes) / 2


def test_vectors_are_ones_and_names_decide_the_bits():
    assert (data.make_weight("norm", (8,), seed=0) == 1).all()
    first, second = (data.make_weight(name, (16, 16), seed=0) for name in ("a", "b"))
    assert not np.array_equal(first, second)


def test_a_sequence_that_occurs_twice_is_that_of_the_rank() -> None:
    tokens = np.array([[[3, 1, 2], [5, 4, 6], [3, 1, 2]]])
    model = torch.nn.Identity()
    recorder = InputRecorder(model, tokens, slice(1, 3), [(0, 1)])
    model(torch.from_numpy(tokens[0, 1:, :-1]))
    recorder.end_step(1)
    (step_inputs,) = recorder.record() or ()
    assert step_inputs.inputs == (1, 2) and step_inputs.covered == 1


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


def test_packed_cases_tell_what_takes_no_positions(monkeypatch):
    with pytest.raises(TargetMisfit, match=r"step\(\) takes no positions.*labels=None, positions=None\)"):
        built(monkeypatch, lambda microbatches, labels=None: (0.0, None), packing="padded")
    with pytest.raises(TargetMisfit, match=r"evaluate\(\) takes no positions"):
        built(monkeypatch, lambda *given: (0.0, None), packing="padded")


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
