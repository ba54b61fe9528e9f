"""The fabric: the transport of the virtual collectives, one shared file per process group and a futex.

Replaces NVLink and NCCL for ranks on one machine. Unlike gloo it needs no sockets and no threads (which halves the CPU
time of a TP 8 case), hands every rank the data in rank order, and reports mismatched collectives instead of aborting.

The file of a group holds, per rank, a sequence number, two headers and two slots. In exchange number n, a rank writes
its payload into slot n % 2, increments its sequence number and waits for those of all other ranks. Two slots are
enough, because no rank can be more than one exchange ahead of the slowest. Files are sparse, and are unlinked once
every rank has opened them.
"""

import ctypes
import hashlib
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

SLOT_BYTES = 1 << 30  # address space only: untouched pages take no memory
MESSAGE_BYTES = 1 << 28  # likewise
_RING = 64  # messages that were sent and not yet received
_LINE_BYTES = 64
_ENDED = 1 << 31  # of a sequence number: its rank makes no more exchanges
_HEADER_WORDS = 2  # kind, payload bytes
_HEADER_BYTES = 2 * _HEADER_WORDS * 8
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_STRONGLY_ORDERED = platform.machine() == "x86_64"
_LIBC = ctypes.CDLL(None, use_errno=True)
_LOOK = (ctypes.c_long * 2)(1, 0)  # a timespec: how long a rank waits before it looks whether another one has ended


class CollectiveMismatch(RuntimeError):
    """Ranks of one group called different collectives, or sizes differ. A GPU would hang or corrupt data."""


class _Call(NamedTuple):
    kind: str
    payload_bytes: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.payload_bytes} bytes"


class Channel:
    """What one rank of a group sends to another, message by message, as one of the two uses it.

    Messages lie in a ring of slots, with a header each: who sends does not wait for who receives, unless the ring is
    full. Two numbers count what was sent and what was taken.
    """

    def __init__(self, path: Path, ranks: tuple[int, int], numbers: Sequence[ctypes.c_uint32]) -> None:
        self._ranks, self._numbers = ranks, numbers  # of source and target in the group
        slots_at = -(-(2 * _LINE_BYTES + _RING * 2 * 8) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = _shared(path, slots_at + _RING * MESSAGE_BYTES)
        self._sent, self._taken = (ctypes.c_uint32.from_buffer(memory, at * _LINE_BYTES) for at in (0, 1))
        self._headers = torch.frombuffer(memory, dtype=torch.int64, count=2 * _RING, offset=2 * _LINE_BYTES).view(
            _RING, 2
        )
        self._slots = torch.frombuffer(memory, dtype=torch.uint8, count=_RING * MESSAGE_BYTES, offset=slots_at).view(
            _RING, MESSAGE_BYTES
        )

    def send(self, payload: torch.Tensor, code: int) -> None:
        """`code`: what else both must agree on."""
        size_bytes, number = payload.numel(), self._sent.value
        if size_bytes > MESSAGE_BYTES:
            raise ValueError(f"a message of {size_bytes} bytes: the virtual fabric supports at most {MESSAGE_BYTES}")
        while (number - (taken := self._taken.value)) % 2**32 >= _RING:
            self._await(self._taken, taken, 1, "sends a message")
        self._slots[number % _RING, :size_bytes].copy_(payload)
        self._headers[number % _RING] = torch.tensor([size_bytes, code])
        _advance(self._sent)

    @property
    def has_arrived(self) -> bool:
        return self._sent.value != self._taken.value

    def receive(self) -> tuple[torch.Tensor, int]:
        """Return a copy of the next message, and its code. Waits until it was sent."""
        number = self._taken.value
        self._await(self._sent, number, 0, "receives a message")
        _fence(self._sent)
        size_bytes, code = self._headers[number % _RING].tolist()
        payload = self._slots[number % _RING, :size_bytes].clone()
        _advance(self._taken)
        return payload, code

    def _await(self, number: ctypes.c_uint32, seen: int, other: int, what: str) -> None:
        """Wait until the other end changes a number. It may end without this file, and wakes nobody then."""
        while number.value == seen:
            if self._numbers[other].value & _ENDED and number.value == seen:  # read last: no change came before the end
                raise _in_vain(self._ranks[1 - other], what, self._ranks[other])
            _futex(number, _FUTEX_WAIT, seen, ctypes.byref(_LOOK))


class Group:
    """One process group, as one of its ranks uses it. `kinds` are the names of all collectives.

    `rank` is the rank within the group, `ranks` are the global ranks of all members.
    """

    def __init__(self, path: Path, *, rank: int, ranks: Sequence[int], kinds: Sequence[str]) -> None:
        size = len(ranks)
        self.rank, self.size, self.ranks = rank, size, tuple(ranks)
        self._kinds = list(kinds)
        self._sequence = 0
        self._path = path
        self._channels: dict[tuple[int, int], Channel] = {}
        numbers_bytes = size * _LINE_BYTES
        slots_at = -(-(numbers_bytes + size * _HEADER_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = _shared(path, slots_at + 2 * size * SLOT_BYTES)
        self._numbers = [ctypes.c_uint32.from_buffer(memory, other * _LINE_BYTES) for other in range(size)]
        self._headers = torch.frombuffer(
            memory, dtype=torch.int64, count=size * 2 * _HEADER_WORDS, offset=numbers_bytes
        ).view(size, 2, _HEADER_WORDS)
        self._slots = torch.frombuffer(memory, dtype=torch.uint8, count=2 * size * SLOT_BYTES, offset=slots_at).view(
            size, 2, SLOT_BYTES
        )
        self.exchange(kinds[0], torch.empty(0, dtype=torch.uint8))
        if rank == 0:
            path.unlink()

    def channel(self, source: int, target: int) -> Channel:
        """Of messages from one rank of the group to another; its file stays in the job's folder."""
        pair = source, target
        if pair not in self._channels:
            path = self._path.with_name(f"{self._path.name}-{source}-{target}")
            self._channels[pair] = Channel(path, pair, [self._numbers[rank] for rank in pair])
        return self._channels[pair]

    def exchange(self, kind: str, payload: torch.Tensor, *, same_size: bool = True) -> list[torch.Tensor]:
        """Send `payload` (1-D uint8) to every rank of the group; returns the payloads of all ranks, in rank order.

        The results are views into shared memory, valid during one more exchange: use them at once. Raises
        CollectiveMismatch when ranks pass different kinds, or different sizes unless `same_size` is False.
        """
        size_bytes = payload.numel()
        if size_bytes > SLOT_BYTES:
            raise ValueError(f"{kind} of {size_bytes} bytes: the virtual fabric supports at most {SLOT_BYTES}")
        self._sequence += 1
        parity = self._sequence % 2
        self._slots[self.rank, parity, :size_bytes].copy_(payload)
        self._headers[self.rank, parity, 0] = self._kinds.index(kind)
        self._headers[self.rank, parity, 1] = size_bytes
        _advance(self._numbers[self.rank])
        for other in range(self.size):
            self._wait_for(other, kind)
        _fence(self._numbers[self.rank])
        calls = [_Call(self._kinds[code], count) for code, count in self._headers[:, parity].tolist()]
        self._agree(calls, same_size=same_size)
        return [self._slots[other, parity, : call.payload_bytes] for other, call in enumerate(calls)]

    def _wait_for(self, other: int, kind: str) -> None:
        number = self._numbers[other]
        while (seen := number.value) & ~_ENDED not in (self._sequence, self._sequence + 1):
            if seen & _ENDED:
                raise _in_vain(self.rank, f"calls {kind}", other)
            _futex(number, _FUTEX_WAIT, seen)  # returns at once if the number has changed

    def _agree(self, calls: list[_Call], *, same_size: bool) -> None:
        mine = calls[self.rank]
        for other, call in enumerate(calls):
            if call.kind != mine.kind or (same_size and call.payload_bytes != mine.payload_bytes):
                raise CollectiveMismatch(
                    f"ranks of one process group disagree: group rank {self.rank} calls {mine}, "
                    f"group rank {other} calls {call}"
                )


def _shared(path: Path, size: int) -> mmap.mmap:
    """Return the memory of a file of so many bytes or more, which is made where it is not there."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb+") as file:
        if os.fstat(file.fileno()).st_size < size:
            file.truncate(size)
        return mmap.mmap(file.fileno(), size)


def _in_vain(rank: int, what: str, other: int) -> CollectiveMismatch:
    return CollectiveMismatch(f"group rank {rank} {what}, and group rank {other} has ended: a GPU would wait for it")


def _end(number: ctypes.c_uint32) -> None:
    number.value |= _ENDED
    _futex(number, _FUTEX_WAKE, 2**31 - 1)


def _advance(number: ctypes.c_uint32) -> None:
    _fence(number)
    number.value = (number.value + 1) % 2**32
    _futex(number, _FUTEX_WAKE, 2**31 - 1)


def _futex(number: ctypes.c_uint32, operation: int, value: int, timeout: Any = None) -> None:
    _LIBC.syscall(_SYS_FUTEX, ctypes.byref(number), operation, ctypes.c_uint32(value), timeout, None, 0)


def _fence(number: ctypes.c_uint32) -> None:
    # x86 does not reorder stores with stores or loads with loads. Elsewhere FUTEX_WAKE is a full barrier, (B) of
    # the comment at the top of https://github.com/torvalds/linux/blob/v6.12/kernel/futex/waitwake.c.
    if not _STRONGLY_ORDERED:
        _futex(number, _FUTEX_WAKE, 0)


class Loopback:
    """A group without peers: every other rank appears to send what this one sends. For the warm-up only."""

    def __init__(self, *, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.size, self.ranks = rank, len(ranks), tuple(ranks)

    def channel(self, source: int, target: int) -> Channel:
        raise NotImplementedError("the warm-up sends nothing from rank to rank")

    def exchange(self, kind: str, payload: torch.Tensor, *, same_size: bool = True) -> list[torch.Tensor]:
        """`Group.exchange` as if all ranks sent the same payload."""
        return [payload] * self.size


class Fabric:
    """All groups of this rank, connected to the folder that the ranks of a job share, or to loopback groups."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = kinds
        self._open: Callable[[str, Sequence[int], int], Group | Loopback] | None = None
        self._groups: dict[str, Group | Loopback] = {}
        self._owned: set[str] = set()
        self._paths: dict[str, tuple[Path, int]] = {}

    def own(self, name: str, path: Path | None = None, rank: int = 0) -> None:
        """Note a group that was made over this fabric. `path`: of its file, where its name does not tell it apart, in
        which this is `rank`.
        """
        self._owned.add(name)
        self._groups.pop(name, None)
        self._paths.pop(name, None)
        if path is not None:
            self._paths[name] = path, rank

    def end(self) -> None:
        """Tell the other ranks of all groups that this one makes no more exchanges: who waits for it gets an error."""
        opened = [group for group in self._groups.values() if isinstance(group, Group)]
        numbers = [group._numbers[group.rank] for group in opened]
        for path, rank in (at for name, at in self._paths.items() if name not in self._groups):
            memory = _shared(path, (rank + 1) * _LINE_BYTES)
            numbers.append(ctypes.c_uint32.from_buffer(memory, rank * _LINE_BYTES))
        for number in numbers:
            _end(number)

    def owns(self, name: str) -> bool:
        """Return whether the group of that name was made over this fabric."""
        return name in self._owned

    def connect(self, folder: Path | None) -> None:
        """Open groups in `folder` from now on; without one, loopback groups."""

        def open_group(name: str, ranks: Sequence[int], rank: int) -> Group | Loopback:
            if folder is None:
                return Loopback(rank=rank, ranks=ranks)
            digest = hashlib.sha256(f"{name}/{list(ranks)}".encode()).hexdigest()[:16]
            return Group(folder / f"fabric-{digest}", rank=rank, ranks=ranks, kinds=self._kinds)

        self.disconnect()
        self._open = open_group

    def disconnect(self) -> None:
        """Drop all groups. Using one before the next `connect` is an error."""
        self._groups.clear()
        self._owned.clear()
        self._paths.clear()
        self._open = None

    def buffers(self) -> list[torch.Tensor]:
        groups = [group for group in self._groups.values() if isinstance(group, Group)]
        memories = [(group._headers, group._slots) for group in groups]
        memories += [(channel._headers, channel._slots) for group in groups for channel in group._channels.values()]
        return [memory for pair in memories for memory in pair]

    def group(self, name: str, ranks: Callable[[], Sequence[int]], rank: Callable[[], int]) -> Group | Loopback:
        """Return the group called `name`, opened on first use: a collective call that all its ranks must make."""
        if name not in self._groups:
            if name in self._paths:
                group = Group(self._paths[name][0], rank=rank(), ranks=ranks(), kinds=self._kinds)
                self._groups[name] = group
                return group
            assert self._open is not None, "the fabric is not connected"
            self._groups[name] = self._open(name, ranks(), rank())
        return self._groups[name]
