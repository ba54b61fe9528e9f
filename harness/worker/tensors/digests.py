"""Fingerprints of the bytes of a tensor, an order of magnitude cheaper than a hash that resists attackers.

They are taken of every gradient and every operand: with crc32, blake2 or sha it would cost as much as the training that
is watched.

Float8 bytes are copied in the middle of a step, where a copy is cheap, and digested after it. A digest needs code and
tables that training drives out of the cache; taken all at once, digests cost a third.
"""

import ctypes
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

_BLOCK = 1 << 14  # words: a block stays in the cache
_NEXT_BLOCK = 0x9E3779B97F4A7C15  # odd, so that nothing of the earlier blocks is lost
_FACTORS: npt.NDArray[np.uint64] = np.random.Philox(key=0).random_raw(_BLOCK).view(np.uint64) | np.uint64(1)


def digest(tensor: torch.Tensor) -> str:
    """Return a fingerprint of the bytes, the densest dim innermost: a matrix and its transposed view have the same."""
    return ordered_digest(tensor.t() if is_transposed(tensor) else tensor)


def ordered_digest(tensor: torch.Tensor) -> str:
    """Return a fingerprint of the bytes in the order of the indices, however they lie in memory."""
    host = on_host(tensor if tensor.is_contiguous() else tensor.contiguous())
    # the bytes in place, as long as `host` lives
    return fingerprint(memoryview((ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())))


def fingerprint(memory: memoryview | bytes) -> str:
    """Return the sum of 32-bit words times fixed odd random numbers, modulo 2**64.

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
    """Return a copy of the bytes that `digest` is of; `transposed` reads the matrix in the order of another one."""
    if transposed is None:
        transposed = is_transposed(tensor)
    if transposed and tensor.stride() != (1, tensor.size(0)):
        tensor = tensor.t().contiguous()
    elif not transposed and not tensor.is_contiguous():
        tensor = tensor.contiguous()
    host = on_host(tensor)
    return ctypes.string_at(host.data_ptr(), host.nbytes)


def is_transposed(tensor: torch.Tensor) -> bool:
    """Return True for a matrix whose columns are denser than its rows."""
    return tensor.dim() == 2 and tensor.stride(0) < tensor.stride(1)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values where numpy can read them: on a CPU without a copy, from a GPU with one."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.is_cpu else tensor.cpu()


_HELD_BYTES = 1 << 26  # the copies kept at a time: all of a step of a tiny model, a few operands of a large one


class Content:
    """The bytes of one tensor. `data` is empty once they are not needed any more."""

    __slots__ = ("_digest", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """That of the tensor, computed when it is first asked for."""
        if self._digest is None:
            self._digest = fingerprint(self.data)
        return self._digest

    def is_same(self, other: Self) -> bool:
        """Return True if the bytes are equal; if they are gone, digests decide, which takes longer."""
        if self.data and other.data:
            return self.data == other.data
        return self is other or self.digest == other.digest

    def release(self) -> None:
        self._digest, self.data = self.digest, b""


class Contents:
    """Known contents by memory address: a matmul reads where a cast has written.

    Taken for the same is only what is the same byte for byte, so it does not matter who freed or wrote the place.
    """

    def __init__(self) -> None:
        self._by_place: dict[int, Content] = {}
        self._held: list[Content] = []
        self._held_bytes = 0

    def read(self, tensor: torch.Tensor) -> Content:
        """Return the content of a tensor; the known one of its memory if the bytes are still the same."""
        data = bytes_of(tensor)
        known = self._by_place.get(tensor.data_ptr())
        return known if known is not None and known.data == data else self.add(tensor, data)

    def add(self, tensor: torch.Tensor, data: bytes) -> Content:
        self._held_bytes += len(data)
        if self._held_bytes > _HELD_BYTES:
            self.release()
        content = Content(data)
        self._held.append(content)
        self.remember(tensor, content)
        return content

    def remember(self, tensor: torch.Tensor, content: Content) -> None:
        """Remember that `tensor`, at another address, has this content."""
        self._by_place[tensor.data_ptr()] = content

    def release(self) -> None:
        """Digest what was seen and forget its bytes."""
        for content in self._held:
            content.release()
        self._by_place.clear()
        self._held.clear()
        self._held_bytes = 0
