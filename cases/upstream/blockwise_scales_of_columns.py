"""What a blockwise matmul gets on one of two tensor-parallel ranks, in the weight gradient of a row-parallel linear."""

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torchao.float8  # noqa: F401  before triton, which no CPU has; its kernels are not called
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

try:
    import triton  # noqa: F401
except ImportError:
    sys.modules["triton"] = sys.modules["triton.language"] = MagicMock()
from torchao.prototype.blockwise_fp8_training.kernels import BLOCKWISE_1X128_SCALING_TYPE as ONE_BY_128

TOKENS, COLUMNS, ROWS, BLOCK = 256, 512, 384, 128
F8, WHOLE = torch.float8_e4m3fn, Replicate()


class Local(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if operator is not torch.ops.torchao.blockwise_scaled_mm.default:
            return operator(*args, **(kwargs or {}))
        self.operand, self.scales = args[1].shape, args[4].shape
        return args[0].new_empty(args[0].size(0), args[1].size(1), dtype=args[-1])


dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))


def distributed(*shape, placement=WHOLE, dtype=torch.float32):
    sizes = [size // 2 if placement.is_shard(dim) else size for dim, size in enumerate(shape)]
    return DTensor.from_local(torch.empty(sizes, dtype=dtype), mesh, [placement])


grad, grad_scales = distributed(ROWS, TOKENS, dtype=F8), distributed(ROWS, TOKENS // BLOCK)
x = distributed(COLUMNS, TOKENS, placement=Shard(0), dtype=F8).t()  # its columns are sharded, with their scales
x_scales = distributed(TOKENS // BLOCK, COLUMNS, placement=Shard(1)).t()
with Local() as local:
    recipe = ONE_BY_128.value
    torch.ops.torchao.blockwise_scaled_mm(grad, x, grad_scales, recipe, x_scales, recipe, torch.bfloat16)
expected = [local.operand[1], TOKENS // BLOCK]
print(f"expected: scales {expected} of an operand {list(local.operand)} on a rank")
print(f"actual:   scales {list(local.scales)}")
raise SystemExit(list(local.scales) != expected)
