"""Tells wrong numbers: the gradients of the run, or what one of its linears computes, are not those of one rank."""

from __future__ import annotations

import sys

import torch.distributed as dist

from harness.worker.exported.given import LIMIT, LINEARS
from harness.worker.exported.linears import linears
from harness.worker.exported.llama import gradients, prepare


def main():
    prepare()
    found, expected = gradients(parallel=True), gradients(parallel=False)
    pairs = {f"the gradient of {name}": (found[name], grad, LIMIT) for name, grad in expected.items()}
    if LINEARS:
        pairs |= linears()
    off = {name: ((a - b).norm() / b.norm()).nan_to_num(9e9) for name, (a, b, _) in pairs.items()}
    worst = max(off, key=lambda name: off[name] / pairs[name][2])
    (a, b, limit), wrong = pairs[worst], off[worst] > pairs[worst][2]
    sys.stdout.write(
        f"rank {dist.get_rank()}: {'FAULT: wrong numbers' if wrong else 'fixed: numbers are right'}\n"
        f"  expected  {worst} as of one rank, up to {limit:g}; norm {b.norm():.5g}\n"
        f"  found     it is {off[worst]:.3g} off; norm {a.norm():.5g}\n"
    )
    return int(wrong)
