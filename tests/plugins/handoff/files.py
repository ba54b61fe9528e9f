"""Files of tests without torch: safetensors that are written by hand, and weights that are quantized by numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.plugins.handoff.numbers import STORAGE, rounded, table

Tensors = Mapping[str, tuple[str, Any]]


def stored(values: Any, dtype: str) -> tuple[str, Any]:
    """Return values as safetensors has them: the dtype, and the bits."""
    if dtype == "BF16":
        return dtype, (rounded(values, dtype).astype("<f4").view("<u4") >> 16).astype("<u2")
    if dtype in ("F8_E4M3", "F8_E5M2", "F8_E8M0"):
        codes = {value: code for code, value in reversed(list(enumerate(table(dtype).tolist())))}
        exact = rounded(values, dtype) if dtype != "F8_E8M0" else np.asarray(values)
        return dtype, np.vectorize(lambda value: codes[value], otypes=["u1"])(exact.astype(np.float32))
    return dtype, np.asarray(values).astype(STORAGE[dtype])


def content(tensors: Tensors, meta: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(meta)} if meta else {}
    at, data = 0, b""
    for name, (dtype, raw) in tensors.items():
        bits = np.ascontiguousarray(raw).tobytes()
        header[name] = {"dtype": dtype, "shape": list(raw.shape), "data_offsets": [at, at + len(bits)]}
        at, data = at + len(bits), data + bits
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write(path: Path, tensors: Tensors, meta: Mapping[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content(tensors, meta))
    return path


def weights(*names: str, shape: tuple[int, int] = (8, 64), seed: int = 0) -> dict[str, Any]:
    """Return random weights, which bfloat16 has."""
    numbers = np.random.default_rng(seed)
    return {name: rounded(numbers.standard_normal(shape), "BF16") for name in names}


def source(values: Mapping[str, Any], dtype: str = "BF16") -> Tensors:
    return {name: stored(each, dtype) for name, each in values.items()}


def by_row(values: Mapping[str, Any], suffix: str = "_scale") -> dict[str, tuple[str, Any]]:
    """Return weights in float8 with a scale for each row."""
    found: dict[str, tuple[str, Any]] = {}
    for name, each in values.items():
        scale = (np.abs(each).max(axis=1, keepdims=True) / 448).astype("<f4")
        found[name] = stored(each.astype("<f4") / scale, "F8_E4M3")
        found[f"{name}{suffix}"] = ("F32", scale)
    return found
