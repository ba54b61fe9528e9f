"""Copies of float8 bytes: taken in the middle of a step, where a copy is cheap, and digested after it.

A digest needs code and tables that training drives out of the cache. Taken all at once, digests cost a third.
"""

from __future__ import annotations

import torch

from harness.worker.probes.digests import bytes_of, fingerprint

_HELD_BYTES = 1 << 26  # the copies kept at a time: all of a step of a tiny model, a few operands of a large one


class Content:
    """The bytes of one tensor. `data` is empty once they are not needed any more."""

    __slots__ = ("_digest", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """That of the tensor (`digests.py`), computed when it is first asked for."""
        if self._digest is None:
            self._digest = fingerprint(self.data)
        return self._digest

    def release(self) -> None:
        """Keep the digest alone."""
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
        """The content of a tensor; the known one of its memory if the bytes are still the same."""
        data = bytes_of(tensor)
        known = self._by_place.get(tensor.data_ptr())
        return known if known is not None and known.data == data else self.add(tensor, data)

    def add(self, tensor: torch.Tensor, data: bytes) -> Content:
        """Remember that these are the bytes of `tensor`."""
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
