"""Class F: shapes, padding and hardware rules."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn
from torchao.float8 import float8_ops
from torchao.float8.float8_utils import _get_min_alignment

from harness.matrix.case import Case
from harness.plugins.faults.worker.hooks import (
    RUN,
    after_build,
    planted,
    wrap,
)
from harness.worker.targets.data import unpadded_rows
from harness.worker.tensors.places import local_shard, place_of
from harness.worker.virtual import scaled_mm


@planted(wrap, float8_ops, "pad_tensor_for_matmul")
def padding_not_zeroed(stock: Any, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    extra = _get_min_alignment(tensor.size(dims), 16) - tensor.size(dims)
    widths = (0, extra) if dims == 1 else (0, 0, 0, extra)
    return F.pad(tensor.view(torch.uint8), widths, value=0x7F).view(tensor.dtype)


@planted(wrap, float8_ops, "pad_tensor_for_matmul")
def padding_on_one_operand_shifted(stock: Any, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    padded: torch.Tensor = stock(tensor, dims)
    extra = padded.size(dims) - tensor.size(dims)
    return padded.view(torch.uint8).roll(extra, dims).view(tensor.dtype) if dims == 1 else padded


alignment_rule_ignored = partial(wrap, scaled_mm, "refusal", lambda stock, signature: None)


def padded_vocabulary_not_masked() -> None:
    from harness.worker.targets.reference import loss

    wrap(loss, "mask_padded_vocab", lambda stock, logits, case: logits)


def padded_vocabulary_masked_short() -> None:
    from harness.worker.targets.reference import loss

    def mask(stock: Any, logits: torch.Tensor, case: Case) -> Any:
        return stock(logits, replace(case, model=replace(case.model, vocab_size=case.model.vocab_size + 1)))

    wrap(loss, "mask_padded_vocab", mask)


@planted(after_build)
@torch.no_grad()
def padded_weight_rows_not_zeroed(model: nn.Module) -> None:
    for weight in model.parameters():
        place = place_of(weight)
        rows = unpadded_rows(place.shape, RUN.case.model)
        if rows != place.shape[:1]:
            local_shard(weight)[max(0, rows[0] - place.offset[0]) :].fill_(100.0)
