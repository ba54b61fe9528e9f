"""Candidate fix for torch 2.13: a kernel that is given other loops forgets that it reads a mutated buffer.

    fp8-harness run pr --select 'compile=inductor tp>1' --inject cases/fixes/cast_after_all_reduce.py:apply

To fuse pointwise kernels of different ranges, inductor computes the loops of one of them anew
(`SchedulerNode.recompute_size_and_body`), and with them what it reads. A buffer that was mutated has another name for
those that read it later, but the new reads are renamed only where the kernel has fake dependencies. The others depend
on the buffer as it was first written: a cast runs before the all_reduce of its amax.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.scheduler import SchedulerNode


def apply() -> None:
    """Rename what every kernel reads whose loops are computed anew, in this process."""
    stock: Any = SchedulerNode.recompute_size_and_body

    def recompute_size_and_body(node: SchedulerNode, *args: Any, **kwargs: Any) -> None:
        stock(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    changed: Any = SchedulerNode
    changed.recompute_size_and_body = recompute_size_and_body
