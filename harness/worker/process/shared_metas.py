"""Shapes and dtypes of what DTensor's operators return, which ranks of one fork server compute once and not each.

DTensor runs an operator on fake tensors to learn them: with tensor parallelism a third of what an eager rank computes.
They depend on the operator and its arguments alone. Ranks write them to memory that they inherited, and read what
others wrote. A rank with an injection shares nothing, and neither an operator that is not torch's nor one of
several results is shared.
"""

import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator

_BYTES = 8 << 20  # what is full stays as it is
_HEAD = 8  # bytes: how many are written
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)


class SharedMetas:
    """A table in memory that a process shares with those forked from it. One that is killed leaves it whole."""

    def __init__(self) -> None:
        self._file = os.memfd_create("metas")
        os.ftruncate(self._file, _BYTES)
        self._memory = mmap.mmap(self._file, _BYTES)
        self._read, self._known = _HEAD, dict[str, Any]()

    def get(self, key: str) -> Any:
        """Return what a process stored for the key, or None."""
        end = self._written() if key not in self._known else self._read
        while self._read < end:
            start = self._read + 4
            self._read = start + int.from_bytes(self._memory[self._read : start], "little")
            self._known.update([msgspec.msgpack.decode(self._memory[start : self._read])])
        return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store a value for all, unless the table is full."""
        data = msgspec.msgpack.encode((key, value))
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # the kernel frees it where its owner dies
        try:
            start = self._written() + 4
            if start + len(data) <= _BYTES:
                self._memory[start - 4 : start + len(data)] = len(data).to_bytes(4, "little") + data
                self._memory[:_HEAD] = (start + len(data)).to_bytes(_HEAD, "little")
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _written(self) -> int:
        return int.from_bytes(self._memory[:_HEAD], "little") or _HEAD

    def share(self) -> None:
        """Let DTensor's operators of this rank read here what other ranks computed, and write what they did not."""
        stock = ShardingPropagator._propagate_tensor_meta_non_cached

        def propagate(propagator: Any, op_schema: Any) -> Any:
            key = _key(op_schema) if detect_fake_mode() is None else ""
            if key and (known := self.get(key)) is not None:
                shape, stride, dtype = known
                return TensorMeta(torch.Size(shape), tuple(stride), getattr(torch, dtype))
            meta = stock(propagator, op_schema)
            if key and isinstance(meta, TensorMeta):
                self.put(key, (meta.shape, meta.stride, str(meta.dtype).removeprefix("torch.")))
            return meta

        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[assignment,method-assign]


def _key(op_schema: Any) -> str:
    """Return what decides: the operator and its arguments, a tensor as shape, stride and dtype; "" for others."""
    try:
        words = map(_text, (op_schema.args_schema, op_schema.kwargs_schema))
        return f"{op_schema.op}{''.join(words)}" if op_schema.op.namespace == "aten" else ""
    except TypeError:
        return ""


def _text(argument: Any) -> str:
    if isinstance(argument, DTensorSpec):
        meta = argument.tensor_meta
        if meta is None or not all(type(size) is int for size in (*meta.shape, *meta.stride)):
            raise TypeError("a shape that is not known")
        return f"T{(*meta.shape, meta.stride, meta.dtype)}"
    if type(argument) in (list, tuple):
        return f"[{','.join(map(_text, argument))}]"
    if isinstance(argument, Mapping):
        return f"{{{','.join(f'{name}={_text(value)}' for name, value in argument.items())}}}"
    if type(argument) not in _PLAIN:
        raise TypeError(type(argument))
    return repr(argument)
