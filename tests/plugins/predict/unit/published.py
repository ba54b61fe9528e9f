"""Published speeds with their sources, which predictions are compared with (`docs/performance.md`)."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from harness.matrix.case import Case
from harness.matrix.caseid import parse_case_id
from harness.plugins.predict.machine import Machine, machine, peak

# Meta's H100: HBM2e with 2.4 TB/s, 500 W, and 400 Gb/s to other nodes.
GRAND_TETON = Machine(peak=replace(peak("h100"), memory_tb_s=2.4))
_STORED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as fast as in BF16 a case was measured to train, and tokens a second and device where stated.

    `fitted`: rates of `machine.py` were chosen with this row.
    """

    name: str
    case: Case
    machine: Machine
    ratio: float
    bf16_tokens_s: float | None = None
    fitted: bool = False
    source: str


class PublishedLinear(msgspec.Struct, frozen=True, kw_only=True):
    """One linear alone on an H100, compiled: forward and both gradients of m tokens, with casts in float8 by row."""

    m: int
    k: int  # in_features
    n: int  # out_features
    bf16_ms: float
    float8_ms: float


LINEARS = msgspec.convert(_STORED["linear"], tuple[PublishedLinear, ...])


def published() -> tuple[Published, ...]:
    """Every row, those that rates were fitted to first."""
    return tuple(_published(**row) for row in _STORED["row"])


def _published(
    case: str, *, device: str = "", bf16: float | None = None, float8: float = 0.0, ratio: float = 0.0, **stated: Any
) -> Published:
    return Published(
        case=parse_case_id(case),
        machine=machine(device) if device else GRAND_TETON,
        ratio=float8 / bf16 if bf16 else ratio,
        bf16_tokens_s=bf16,
        **stated,
    )
