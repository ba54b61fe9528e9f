"""Counts what this rank multiplies. See `harness/trace/counts.py`."""

from collections import defaultdict

import torch
from torch import nn

from harness.matrix.case import Case
from harness.trace.counts import FlopsRecord
from harness.worker.dispatch_hooks import matmuls, products
from harness.worker.dispatch_hooks.products import Product, matmul_flops, precision_of
from harness.worker.probes.probe import Probe


class FlopsProbe(Probe):
    """Records one `FlopsRecord` for every step, part and precision, in that order."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self._flops: defaultdict[tuple[int, str, torch.dtype], list[int]] = defaultdict(list)

    def install(self) -> None:
        self.observe(products.observers, self._observe)
        self.observe(
            matmuls.scaled_observers, lambda a, b, *_: self._observe(Product("matmuls", a.dtype, matmul_flops(a, b)))
        )
        self.observe(
            matmuls.grouped_observers, lambda call: self._observe(Product("matmuls", call.a.dtype, call.flops))
        )

    def _observe(self, product: Product) -> None:
        if self._step:
            self._flops[self._step, product.part, product.dtype].append(product.flops)

    def after_update(self, model: nn.Module) -> None:
        self._step = 0

    def result(self) -> tuple[FlopsRecord, ...]:
        """Return what was counted; the two formats of float8 count as one precision."""
        by_precision: defaultdict[tuple[int, str, str], list[int]] = defaultdict(list)
        for (step, part, dtype), flops in self._flops.items():
            by_precision[step, part, precision_of(dtype)] += flops
        return tuple(
            FlopsRecord(step=step, part=part, precision=precision, calls=len(flops), flops=sum(flops))
            for (step, part, precision), flops in sorted(by_precision.items())
        )
