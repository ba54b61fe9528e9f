"""Formats of exported weights, a row of `formats.toml` each, and which one a `quantization_config` describes."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import HarnessError


class Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights are stored; the fields are described in `formats.toml`."""

    name: str = ""
    about: str = ""
    dtype: str
    block: tuple[int, int]
    scales: tuple[str, ...]
    suffixes: tuple[str, ...]
    divides: bool = False
    power_of_two: bool = False
    clips: bool = False

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many scales a weight of this shape has, down and across."""
        height, width = self.block[0] or max(rows, 1), self.block[1] or max(columns, 1)
        return -(-rows // height), -(-columns // width)

    @property
    def block_words(self) -> str:
        """The shape of a block: "128x128", "tensor" or "row"."""
        return {(0, 0): "tensor", (1, 0): "row"}.get(self.block, "x".join(map(str, self.block)))


FORMATS: Mapping[str, Format] = {
    name: msgspec.convert({"name": name, **row}, Format)
    for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}
SUFFIXES = tuple(dict.fromkeys(suffix for each in FORMATS.values() for suffix in each.suffixes))


def format_named(name: str | None, config: Mapping[str, Any] | None, *, where: str) -> Format:
    """Return the format of this name, or the one of a configuration. HarnessError where neither says one."""
    fix = f"give --format {', '.join(FORMATS)}."
    if name is not None:
        if name not in FORMATS:
            raise HarnessError(f"unknown format '{name}'.", where="--format", fix=fix)
        return FORMATS[name]
    if not config:
        raise HarnessError("it has no quantization_config, so its format is not known.", where=where, fix=fix)
    found = _of_config(config)
    if found is None:
        method = config.get("quant_method", config.get("quant_algo", "none"))
        raise HarnessError(f"its quantization_config (quant_method {method}) is none of these.", where=where, fix=fix)
    return FORMATS[found]


def _of_config(config: Mapping[str, Any]) -> str | None:
    """Return the name of the format of a `quantization_config`, by the words of those who write them."""
    method = str(config.get("quant_method", config.get("quant_algo", ""))).lower()
    if method == "compressed-tensors":
        weights = weights_of(config)
        strategy = weights.get("strategy")
        if weights.get("num_bits") != 8 or weights.get("type") != "float":
            return None
        return (
            _of_block(weights.get("block_structure"), config) if strategy == "block" else _STRATEGIES.get(str(strategy))
        )
    if method == "fp8":
        return _of_block(config.get("weight_block_size"), config)
    return {"fbgemm_fp8": "fp8_row", "modelopt": "fp8_tensor", "mxfp8": "mxfp8"}.get(method)


_STRATEGIES = {"tensor": "fp8_tensor", "channel": "fp8_row"}


def weights_of(config: Mapping[str, Any], of: str = "weights") -> Mapping[str, Any]:
    """Return how the first group of a configuration of compressed-tensors stores weights, or another part."""
    groups = config.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, dict) else {}
    weights = first.get(of) if isinstance(first, dict) else None
    return weights if isinstance(weights, dict) else {}


def _of_block(block: Sequence[int] | None, config: Mapping[str, Any]) -> str | None:
    if not block:
        return "fp8_tensor"
    if list(block) == [1, 32]:
        return "mxfp8"
    if list(block) != [128, 128]:
        return None
    return "fp8_block128_ue8m0" if str(config.get("scale_fmt", "")).lower() == "ue8m0" else "fp8_block128"
