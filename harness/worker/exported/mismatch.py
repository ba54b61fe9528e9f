"""Tells ranks that call different collectives: with NCCL they hang, or get each other's bytes."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from harness.worker.exported.llama import gradients, prepare


class Compare(TorchDispatchMode):
    """Before every collective, the ranks of its group tell each other what they are about to call."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        groups = [each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())]
        if op.namespace == "c10d" and groups:
            group = dist.ProcessGroup.unbox(groups[0])
            sizes = [each.nbytes for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
            told = [None] * group.size()
            dist.all_gather_object(told, f"{op} of {sizes} bytes", group)
            if len(set(told)) > 1:
                say("FAULT: with NCCL they hang, or get wrong bytes", str(told))
                raise SystemExit(1)
        return op(*args, **(kwargs or {}))


def say(verdict, found):
    expected = "ranks of a process group that call the same"
    sys.stdout.write(f"rank {dist.get_rank()}: {verdict}\n  expected  {expected}\n  found     {found}\n")


def main():
    prepare()
    with Compare():
        gradients(parallel=True)
    say("fixed", "they do")
    return 0
