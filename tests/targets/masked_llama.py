"""A sound target whose packed documents attend under one mask of whole sequences, as users of SDPA write it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.matrix.case import Case
from harness.worker.targets.reference import build as reference
from harness.worker.targets.reference import model
from harness.worker.targets.target import World


def attend_under_a_mask(documents: Sequence[int], q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Tensor:
    numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)).view(q.shape[:2])
    positions = torch.cat([torch.arange(length) for length in documents])
    turned = [table[positions] for table in tables]
    q, k = (model.apply_rope(each.flatten(0, 1)[None], *turned).view(each.shape) for each in (q, k))
    mask = (numbers[:, :, None] == numbers[:, None]) & torch.ones(q.size(1), q.size(1), dtype=torch.bool).tril()
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]).transpose(1, 2)


def build(case: Case, world: World) -> Any:
    changed: Any = model
    changed.attend_apart = attend_under_a_mask
    return reference.build(case, world)
