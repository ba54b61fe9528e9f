"""Faults at torchtitan's own seams: ranks call one of these before the Trainer is built."""

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torchtitan.components import validate
from torchtitan.models.common import decoder
from torchtitan.trainer import Trainer

from harness.worker.targets.target import IGNORED


def document_mask_lost() -> None:
    """The mask is the causal one alone."""
    lost: Any = lambda positions: lambda b, h, q, k: q >= k  # noqa: E731
    decoder.get_efficient_causal_mask_mod_for_packed_document = lost


def positions_not_restarted() -> None:
    """Attention has the right mask, and rotates by the position in the sequence."""
    stock = Trainer.post_dataloading_process

    def process(self: Any, *given: Any) -> Any:
        inputs, labels, options = stock(self, *given)
        whole = torch.arange(labels.numel()) % self.config.training.max_context_length
        return inputs, labels, options | {"positions": whole}

    Trainer.post_dataloading_process = process


def borders_counted() -> None:
    """The last token of a document is to predict the first one of the next, as before torchtitan's #4075."""
    stock = Trainer.batch_generator

    def batches(self: Any, given: Iterable[Any]) -> Iterator[Any]:
        for inputs, labels in stock(self, given):
            begins = inputs["positions"].roll(-1) == 0
            begins[-1] = False
            yield inputs, torch.where(begins & (labels == IGNORED), inputs["input"].roll(-1), labels)

    Trainer.batch_generator = batches


def validation_count_not_reduced() -> None:
    """The validator divides the loss of all ranks by the labels of its own."""
    utils = vars(validate.dist_utils) | {"dist_sum_tensor": lambda count, *_: count}
    validate.dist_utils = types.SimpleNamespace(**utils)


def validation_without_positions() -> None:
    """The validator forgets the positions, and with them the mask."""
    stock = validate.Validator.post_dataloading_process

    def process(self: Any, given: Any, *rest: Any) -> Any:
        whole = torch.arange(given["positions"].numel()) % self.seq_len
        return stock(self, given | {"positions": whole}, *rest)

    validate.Validator.post_dataloading_process = process
