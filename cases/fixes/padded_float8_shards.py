"""Candidate fix for torchao 0.18: the float8 all-gather of FSDP2 sends shards of different sizes.

    fp8-harness run pr --select 'fp8_all_gather=true dp_shard=3,5,6' --inject cases/fixes/padded_float8_shards.py:apply

FSDP2 shards rows by chunks of equal size, of which the last ranks have fewer or none. What is gathered must have the
size of a full chunk on every rank; FSDP2 cuts the padding off when it restores the shape. With the long signature of
`fsdp_pre_all_gather`, FSDP2 says how large the whole weight is, and checks the size itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor


def apply() -> None:
    """Patch the weight subclass in this process."""
    stock: Any = WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather

    def padded(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        (data,), metadata = stock(self, mesh)
        missing = -(-outer_size[0] // mesh.size()) - data.shape[0]
        if missing > 0:
            filler = torch.zeros(missing, *data.shape[1:], dtype=torch.uint8, device=data.device)
            data = torch.cat((data.view(torch.uint8), filler)).view(data.dtype)
        return (data,), metadata

    WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather = padded
