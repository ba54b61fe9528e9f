"""How NCCL takes the tensors of a collective: as memory, below autograd, if it takes them at all.

What it refuses is refused here, before anything is sent and with its errors: `check_gpu_single_tensor` and
`assertTypeAndSizesMatch` of torch's ProcessGroupNCCL.cpp and Utils.hpp, the dtypes of NCCLUtils.cpp.
"""

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor
# No history, no version, and inference tensors may be written anywhere.
below_autograd: Any = torch._C._AutoDispatchBelowADInplaceOrView

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_DTYPES = FLOAT8 | {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_DTYPES |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory(tensor: Tensor, *, message: bool = False) -> Tensor:
    """The elements of a tensor in the order of its memory: [numel], an alias that shares no version with it.

    `message`: NCCL sends it from rank to rank, and then a transposed tensor will do. Raises ValueError for another one
    that is not contiguous, and TypeError for a dtype that NCCL lacks.
    """
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
    layout = _FORMATS.get(tensor.dim(), torch.contiguous_format)
    if not tensor.is_contiguous() and not tensor.is_contiguous(memory_format=layout):
        if not message:
            raise ValueError("Tensors must be contiguous")
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            raise ValueError("Tensors for P2P must be non-overlapping and dense")
    with below_autograd():
        return tensor.as_strided((tensor.numel(),), (1,))


def read(tensor: Tensor, *, message: bool = False) -> Tensor:
    """The bytes of a tensor: [bytes], an alias."""
    return memory(tensor, message=message).view(torch.uint8)


def write(target: Tensor, values: Tensor, *, message: bool = False) -> None:
    """Write `values` of the dtype of `target`, [numel], to its memory."""
    with below_autograd():
        memory(target, message=message).copy_(values)


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of numbers, which NCCL reduces and broadcasts."""
    with below_autograd():
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def require_like(tensors: Sequence[Tensor], like: Tensor, where: str) -> None:
    """Raises ValueError unless all have the dtype and the shape of `like`."""
    for number, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype:
            raise ValueError(f"{where}: invalid tensor type at index {number}: {tensor.dtype}, not {like.dtype}")
        if tensor.shape != like.shape:
            raise ValueError(
                f"{where}: invalid tensor size at index {number}: {list(tensor.shape)}, not {list(like.shape)}"
            )


def require_times(whole: Tensor, part: Tensor, times: int) -> None:
    """Raises TypeError and ValueError unless `whole` has the dtype of `part`, and as many elements as so many of it."""
    if whole.dtype != part.dtype:
        raise TypeError(f"input and output must have the same dtype, not {whole.dtype} and {part.dtype}")
    if whole.numel() != part.numel() * times:
        raise ValueError(f"{whole.numel()} elements are not {times} times {part.numel()}")


def require_count(tensors: Sequence[Tensor], size: int, like: Tensor | None) -> None:
    """Raises ValueError unless there is a tensor for every rank, each with the elements of `like`."""
    if len(tensors) != size:
        raise ValueError(f"a tensor for every rank: got {len(tensors)} for {size} ranks")
    if like is not None and any(tensor.numel() != like.numel() for tensor in tensors):
        raise ValueError("All tensor operands to scatter/gather must have the same number of elements")
