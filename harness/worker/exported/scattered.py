"""Tells wrong rows of async TP's fused matmul and reduce-scatter, called as torch's fusion pass calls it."""

from __future__ import annotations

import runpy
import sys

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.device_mesh import init_device_mesh

from harness.worker.exported.cpu import scaled_mm, scaled_mm_out
from harness.worker.exported.given import BATCH, DEGREE, DIM, FEATURES, TOKENS
from harness.worker.exported.llama import DEVICE


def produce_and_exchange(produce, output, group_name, out_chunk_dim=0):
    chunks = output.chunk(dist.get_world_size(), dim=out_chunk_dim)
    produced = torch.empty(len(chunks), *chunks[0].shape, dtype=output.dtype)
    for rank, chunk in enumerate(produced):
        produce(rank, chunk)
    received = [torch.empty_like(produced) for _ in chunks]
    dist.all_gather(received, produced)
    for chunk, each in zip(chunks, received, strict=True):
        chunk.copy_(each[dist.get_rank()])


def stand_in():
    """On a CPU the operator is that of CUDA, but ranks exchange chunks by a collective."""
    torch.library.impl("aten::_scaled_mm", "cpu", scaled_mm)
    torch.library.impl("aten::_scaled_mm.out", "cpu", scaled_mm_out)
    torch.library.impl(
        "symm_mem::fused_scaled_matmul_reduce_scatter", "cpu", symm_mem._fused_scaled_matmul_reduce_scatter
    )
    symm_mem._pipelined_produce_and_all2all = produce_and_exchange


def main():
    group = init_device_mesh(DEVICE, (DEGREE,), mesh_dim_names=("tp",)).get_group()
    if DEVICE == "cpu":
        stand_in()
    else:
        symm_mem.enable_symm_mem_for_group(group.group_name)
    for file, _, function in (patch.rpartition(":") for patch in sys.argv[1:]):
        runpy.run_path(file)[function]()
    torch.manual_seed(group.rank())
    x = torch.randn(BATCH, TOKENS, FEATURES, device=DEVICE).to(torch.float8_e4m3fn)
    w = torch.randn(DIM, FEATURES, device=DEVICE).to(torch.float8_e4m3fn)
    one, rows, dtype = torch.ones((), device=DEVICE), x.flatten(0, 1), torch.bfloat16
    product = torch._scaled_mm(rows, w.t(), one, one, out_dtype=dtype).unflatten(0, x.shape[:2]).float()
    dist.all_reduce(product)
    expected = product.chunk(DEGREE, dim=1)[group.rank()]  # scattered along the sequence
    found = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        # as the fusion pass calls it: batch and sequence are collapsed, so the dim to scatter, once 1, is 0
        *(rows, w.t(), one, one, "sum", 1, 0, group.group_name, [*x.shape[:2], DIM]),
        out_dtype=dtype,
    ).view_as(expected)
    wrong = (found - expected).norm(dim=-1) > 0.1 * expected.norm(dim=-1)
    sys.stdout.write(
        f"rank {group.rank()}: {'FAULT: wrong rows' if wrong.any() else 'fixed: the rows are right'}\n"
        f"  expected  the rows of a matmul, then a reduce-scatter: {expected[..., 0].flatten()[:4].tolist()} ...\n"
        f"  found     {int(wrong.sum())} of {wrong.numel()} are wrong: {found[..., 0].flatten()[:4].tolist()} ...\n"
    )
    return int(wrong.any())
