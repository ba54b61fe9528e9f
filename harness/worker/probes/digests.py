"""A fingerprint of the bytes of a tensor, an order of magnitude cheaper than a hash that resists attackers.

It is taken of every gradient and every operand: with crc32, blake2 or sha it would cost as much as the training that is
watched.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

_BLOCK = 1 << 14  # words: a block stays in the cache
_NEXT_BLOCK = 0x9E3779B97F4A7C15  # odd, so that nothing of the earlier blocks is lost
_FACTORS: npt.NDArray[np.uint64] = np.random.Philox(key=0).random_raw(_BLOCK).view(np.uint64) | np.uint64(1)


def digest(tensor: torch.Tensor) -> str:
    """A fingerprint of the bytes, the densest dim innermost: a matrix and its transposed view have the same."""
    return ordered_digest(tensor.t() if is_transposed(tensor) else tensor)


def ordered_digest(tensor: torch.Tensor) -> str:
    """A fingerprint of the bytes in the order of the indices, however they lie in memory."""
    host = on_host(tensor if tensor.is_contiguous() else tensor.contiguous())
    # the bytes in place, as long as `host` lives
    return fingerprint(memoryview((ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())))


def fingerprint(memory: memoryview | bytes) -> str:
    """The sum of 32-bit words times fixed odd random numbers, modulo 2**64.

    One changed word always shows, several with all but 2**-32 at worst. (The sum of 64-bit words would forget changes
    of signs: they are in the uppermost bit.)
    """
    rest = len(memory) % 4
    words = np.frombuffer(bytes(memory) + bytes(4 - rest) if rest else memory, np.uint32)
    total = 0
    for begin in range(0, len(words), _BLOCK):
        block = words[begin : begin + _BLOCK].astype(np.uint64)
        total = (total * _NEXT_BLOCK + int(np.einsum("i,i->", block, _FACTORS[: len(block)]))) % 2**64
    return f"{total:016x}"


def bytes_of(tensor: torch.Tensor, *, transposed: bool | None = None) -> bytes:
    """A copy of the bytes that `digest` is of; `transposed` reads the matrix in the order of another one instead."""
    if transposed is None:
        transposed = is_transposed(tensor)
    if transposed and tensor.stride() != (1, tensor.size(0)):
        tensor = tensor.t().contiguous()
    elif not transposed and not tensor.is_contiguous():
        tensor = tensor.contiguous()
    host = on_host(tensor)
    return ctypes.string_at(host.data_ptr(), host.nbytes)


def is_transposed(tensor: torch.Tensor) -> bool:
    """True for a matrix whose columns are denser than its rows."""
    return tensor.dim() == 2 and tensor.stride(0) < tensor.stride(1)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same values where numpy can read them: on a CPU without a copy, from a GPU with one."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.is_cpu else tensor.cpu()
