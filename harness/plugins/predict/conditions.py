"""Conditions: what may slow this machine down while something is timed. The load of a CPU, the clocks of GPUs."""

import os
import re
import threading
from collections.abc import Sequence
from typing import Self

import msgspec

from harness.engine.hardware import Device, ask_driver

_PERIOD_S = 2.0
_QUERY = ("--query-gpu=clocks.sm,temperature.gpu,clocks_throttle_reasons.active", "--format=csv,noheader,nounits")
_ROW = re.compile(r"^(\d+), (\d+), 0x([0-9a-fA-F]+)$", re.MULTILINE)
# Bits of these reasons: NVML's nvmlClocksThrottleReasons, called nvmlClocksEventReasons since driver 535.
_REASONS = {"power": 0x04 | 0x80, "hardware": 0x08, "heat": 0x20 | 0x40}


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen. Clocks, heat and reasons are over all GPUs; None and empty on a CPU, or without nvidia-smi."""

    load: float  # processes that want a CPU, over the last minute
    lowest_sm_mhz: int | None = None
    highest_sm_mhz: int | None = None
    celsius: int | None = None  # the highest
    throttled: tuple[str, ...] = ()  # why a GPU lowered its clocks: "power", "hardware", "heat"

    @property
    def words(self) -> str:
        clocks = f", SM clocks {self.lowest_sm_mhz} to {self.highest_sm_mhz} MHz" if self.lowest_sm_mhz else ""
        heat = f", {self.celsius} °C" if self.celsius is not None else ""
        throttled = f", throttled by {' and '.join(self.throttled)}" if self.throttled else ""
        return f"load {self.load:.1f}{clocks}{heat}{throttled}"


def conditions(device: Device) -> Conditions:
    rows = _ROW.findall(ask_driver(os.environ, *_QUERY)) if device != "cpu" else []
    clocks, active = [int(row[0]) for row in rows], [int(row[2], 16) for row in rows]
    return Conditions(
        load=os.getloadavg()[0],
        lowest_sm_mhz=min(clocks, default=None),
        highest_sm_mhz=max(clocks, default=None),
        celsius=max((int(row[1]) for row in rows), default=None),
        throttled=tuple(name for name, bits in _REASONS.items() if any(bits & active_bits for active_bits in active)),
    )


def worst(seen: Sequence[Conditions]) -> Conditions:
    return Conditions(
        load=max(sample.load for sample in seen),
        lowest_sm_mhz=min((of.lowest_sm_mhz for of in seen if of.lowest_sm_mhz is not None), default=None),
        highest_sm_mhz=max((of.highest_sm_mhz for of in seen if of.highest_sm_mhz is not None), default=None),
        celsius=max((sample.celsius for sample in seen if sample.celsius is not None), default=None),
        throttled=tuple(name for name in _REASONS if any(name in sample.throttled for sample in seen)),
    )


class ConditionsMonitor:
    """A context that samples the conditions every two seconds, because an idle GPU says nothing about a busy one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: list[Conditions] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="conditions", daemon=True)

    def _look(self) -> None:
        self._seen.append(conditions(self._device))
        while not self._over.wait(_PERIOD_S):
            self._seen.append(conditions(self._device))

    @property
    def seen(self) -> Conditions:
        return worst(self._seen)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
