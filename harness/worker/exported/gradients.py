"""Tells wrong numbers: the gradients of the run are not those of one rank."""

from __future__ import annotations

import sys

import torch.distributed as dist

from harness.worker.exported.given import LIMIT
from harness.worker.exported.llama import gradients, prepare


def main():
    prepare()
    found, expected = gradients(parallel=True), gradients(parallel=False)
    off = {name: ((found[name] - grad).norm() / grad.norm()).nan_to_num(9e9) for name, grad in expected.items()}
    worst = max(off, key=off.get)
    wrong = off[worst] > LIMIT
    sys.stdout.write(
        f"rank {dist.get_rank()}: {'FAULT: wrong gradients' if wrong else 'fixed: gradients are right'}\n"
        f"  expected  the gradients of one rank, up to {LIMIT:g}; norm of {worst} {expected[worst].norm():.5g}\n"
        f"  found     {worst} is {off[worst]:.3g} off; norm {found[worst].norm():.5g}\n"
    )
    return int(wrong)
