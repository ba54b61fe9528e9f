"""Flatten and unflatten a float8 weight that has a precomputed scale, as functionalization does; and detach it."""

import torch
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

weight = WeightWithDynamicFloat8CastTensor(
    torch.randn(16, 16), LinearMMConfig(), torch.float8_e4m3fn, precomputed_scale=torch.tensor(2.0)
)
names, spec = weight.__tensor_flatten__()
again = type(weight).__tensor_unflatten__(
    {name: getattr(weight, name) for name in names}, spec, weight.size(), weight.stride()
)
actual = {"flattened": names, "unflattened": again._precomputed_scale, "detached": weight.detach()._precomputed_scale}
expected = {name: names if name == "flattened" else torch.tensor(2.0) for name in actual}
print("expected:", expected)
print("actual:  ", actual)
raise SystemExit(None in actual.values())
