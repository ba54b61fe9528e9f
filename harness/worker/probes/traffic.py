"""Counts the collectives that the target calls. See `harness/trace/counts.py`.

What the harness itself sends to measure a run is left out: it runs inside `unobserved()` (`dispatch_hooks/hook.py`).
"""

import time
from collections import Counter, defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from harness.matrix.case import Case
from harness.matrix.layout import axis_of_group
from harness.trace.counts import TrafficRecord
from harness.worker.dispatch_hooks import collectives
from harness.worker.dispatch_hooks.collectives import Exchange
from harness.worker.probes.probe import Probe
from harness.worker.tensors.names import dtype_name


class _Key(NamedTuple):
    """What exchanges are added up by. Ranks and dtype are put into words only at the end: this runs on every call."""

    step: int
    ranks: tuple[int, ...]
    kind: str
    op: str
    dtype: torch.dtype


class TrafficProbe(Probe):
    """Records the traffic of every step, from its begin to the end of its update."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self._elements: defaultdict[_Key, list[int]] = defaultdict(list)
        self._starts: defaultdict[_Key, list[tuple[float, int]]] = defaultdict(list)
        self._began_s = 0.0

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._began_s = time.perf_counter()

    def install(self) -> None:
        self.observe(collectives.observers, self._observe)

    def _observe(self, exchange: Exchange) -> None:
        if self._step:
            key = _Key(self._step, exchange.ranks, exchange.kind, exchange.op, exchange.dtype)
            self._elements[key].append(exchange.elements)
            if self._step == self._case.train.steps:
                nbytes = exchange.elements * exchange.dtype.itemsize
                self._starts[key].append((time.perf_counter() - self._began_s, nbytes))

    def after_update(self, model: nn.Module) -> None:
        self._step = 0

    def result(self) -> tuple[TrafficRecord, ...]:
        """Return one record for every step, axis, kind, reduction and dtype that occurred, in that order."""
        records = (self._record(key, elements) for key, elements in self._elements.items())
        return tuple(
            sorted(records, key=lambda record: (record.step, record.axis, record.kind, record.op, record.dtype))
        )

    def _record(self, key: _Key, elements: list[int]) -> TrafficRecord:
        return TrafficRecord(
            step=key.step,
            axis=axis_of_group(self._case.layout, dist.get_rank(), key.ranks),
            kind=key.kind,
            op=key.op,
            dtype=dtype_name(key.dtype),
            payload_bytes=sum(elements) * key.dtype.itemsize,
            sizes=dict(sorted(Counter(elements).items())),
            starts=tuple(self._starts[key]),
        )
