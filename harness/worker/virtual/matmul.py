"""`aten::mm`, `addmm` and `bmm` of bfloat16 on a CPU: accumulated in float64, rounded to bfloat16 at the end.

Every element then depends on its row and column alone. torch's own kernels do so too where the CPU has no AVX-512, and
take up to 60 times longer: measured with [128, 256] x [256, 2048], both row-major, 228 ms against 4.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import DispatchKey, DispatchKeySet

_OPERATORS = ("mm", "addmm", "bmm")
_CPU = DispatchKeySet(DispatchKey.CPU)


def kernels() -> dict[str, Callable[..., torch.Tensor]]:
    """Return the kernels to put in the place of torch's, which still make all checks and results of other dtypes."""
    return {name: _in_float64(name) for name in _OPERATORS} | {f"{name}.out": _into(name) for name in _OPERATORS}


def _in_float64(name: str) -> Callable[..., torch.Tensor]:
    stock = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(*operands: torch.Tensor, **scalars: Any) -> torch.Tensor:
        if not _in_bfloat16(operands):
            computed: torch.Tensor = stock.call_boxed(_CPU, *operands, **scalars)
            return computed
        wide: torch.Tensor = stock.call_boxed(_CPU, *(operand.double() for operand in operands), **scalars)
        return wide.to(torch.bfloat16)

    return kernel


def _into(name: str) -> Callable[..., torch.Tensor]:
    """Return the kernel that writes to `out`: compiled graphs call it."""
    kernel, stock = _in_float64(name), torch.library.get_kernel(f"aten::{name}.out", "CPU")

    def with_out(*operands: torch.Tensor, out: torch.Tensor, **scalars: Any) -> torch.Tensor:
        if not _in_bfloat16((*operands, out)):
            stock.call_boxed(_CPU, *operands, out=out, **scalars)
            return out
        result = kernel(*operands, **scalars)
        return out.resize_(result.shape).copy_(result)

    return with_out


def _in_bfloat16(tensors: tuple[torch.Tensor, ...]) -> bool:
    return all(tensor.dtype == torch.bfloat16 for tensor in tensors)
