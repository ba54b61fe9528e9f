"""Checkpoints of torch: the state of a model and its optimizer, written by all ranks and read by any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

# By parameter: the optimizer has a group for every mesh, so another layout may have another number of groups.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write the state into a new folder, every rank its own shards."""
    save(_state(model, optimizer), checkpoint_id=folder)


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read the state into a model and an optimizer, whatever layout it was written in."""
    state = _state(model, optimizer)
    load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_OPTIONS
    )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": of_model, "optimizer": of_optimizer}
