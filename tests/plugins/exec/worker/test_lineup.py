"""What ranks were given, one behind the other for one rank."""

from __future__ import annotations

import torch

from harness.plugins.exec.worker.derive import derive
from harness.plugins.exec.worker.lineup import joined, put


def test_batches_are_joined_and_what_belongs_to_no_row_is_left() -> None:
    positions = torch.arange(4)
    ranks = [[torch.full((2, 4), rank), torch.full((8,), rank), positions, torch.tensor(7)] for rank in range(2)]
    whole, complete = joined(ranks)
    assert complete
    tokens, flat, *others = whole
    assert tokens is not None and tokens[:, 0].tolist() == [0, 0, 1, 1]
    assert flat is not None and flat.tolist() == [0] * 8 + [1] * 8
    assert others == [None, None]


def test_batches_of_other_lengths_are_no_parts_of_one() -> None:
    assert not joined([[torch.zeros(2, 4)], [torch.zeros(2, 5)]])[1]
    assert not joined([[torch.zeros(2, 4)], [torch.zeros(2, 4), torch.zeros(2)]])[1]


def test_ranks_may_have_different_numbers_of_rows() -> None:
    (whole,), complete = joined([[torch.zeros(2, 4)], [torch.ones(3, 4)]])
    assert complete and whole is not None and whole.shape == (5, 4)


def test_tensors_are_put_where_they_were() -> None:
    given = ((torch.zeros(1), "name"), {"labels": torch.zeros(1), "scale": 2})
    args, kwargs = put(given, [torch.ones(2), None])
    assert args[0].tolist() == [1, 1] and args[1] == "name"
    assert kwargs["labels"].tolist() == [0] and kwargs["scale"] == 2


def test_muon_is_the_optimizer_though_adamw_updates_the_rest() -> None:
    linear = torch.nn.Linear(16, 16)
    optimizers = [torch.optim.AdamW([linear.bias]), torch.optim.Muon([linear.weight])]
    assert derive(torch.nn.Sequential(linear), optimizers, 2).train.optimizer == "muon"
