"""The single-rank reference of context parallelism: torchtitan's model with the pieces of all ranks at once.

torchtitan cuts the row of tokens of a microbatch, gathers keys and values in the order of ranks, and attends under a
mask of that order. So one rank gets the row with the pieces one behind the other, and computes piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.trainer import Trainer

from harness.worker.targets.in_pieces import add_up_in_norms, use_pieces

_ROW = -2  # the dim of activations [tokens, features]


class OfAllRanks(Trainer):  # type: ignore[misc]  # torchtitan is not installed where mypy runs
    """A Trainer that is given whole rows, and trains on the pieces of them that ranks have of `positions`."""

    def __init__(self, config: Any, positions: Sequence[Sequence[int]]) -> None:
        self._pieces = positions
        super().__init__(config)

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return what torchtitan makes of a row for its model, in the order of ranks."""
        inputs, labels, options = super().post_dataloading_process(input_dict, labels)
        order = torch.tensor([position for piece in self._pieces for position in piece], device=inputs.device)
        mask = options["attention_masks"]
        mask.dense, mask.ranks = mask.dense[..., order, :][..., order], len(self._pieces)
        return inputs[order], labels[order], options | {"positions": options["positions"][order]}


def parallelize(model: nn.Module, *, pieces: int, **options: Any) -> nn.Module:
    """Do what torchtitan does, with a model of all `pieces` of a row, or of one rank that has a single one."""
    if pieces > 1:
        use_pieces(model, pieces, _ROW)
    else:
        add_up_in_norms(model)
    return parallelize_llama(model, **options)
