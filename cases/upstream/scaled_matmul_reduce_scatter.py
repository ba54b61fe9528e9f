"""fused_scaled_matmul_reduce_scatter of a collapsed [batch, seq, K] operand: pipelined against its fallback."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.multiprocessing as mp

RANKS, BATCH, SEQ, K, N = 2, 4, 8, 32, 16


def exchange(produce, output, group_name, out_chunk_dim=0):
    """Stand in for _pipelined_produce_and_all2all, which needs CUDA peer memory: each chunk goes to its rank."""
    chunks = torch.stack(output.chunk(RANKS))
    for rank, chunk in enumerate(chunks):
        produce(rank, chunk)
    received = [torch.empty_like(chunks) for _ in range(RANKS)]
    dist.all_gather(received, chunks)
    output.copy_(torch.cat([sent[dist.get_rank()] for sent in received]))


def run(rank, store, wrong):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    symm_mem._pipelined_produce_and_all2all = exchange
    torch.manual_seed(rank)
    a = torch.randn(BATCH, SEQ, K).to(torch.float8_e4m3fn).flatten(0, 1)  # as the pass of inductor collapses it
    b = torch.randn(N, K).to(torch.float8_e4m3fn).t()
    one, shape, group, dtype = torch.ones(()), [BATCH, SEQ, N], dist.group.WORLD.group_name, torch.bfloat16
    scatter = {"orig_scatter_dim": 1, "scatter_dim_after_maybe_reshape": 0, "output_shape": shape, "group_name": group}
    expected = symm_mem._fused_scaled_matmul_reduce_scatter_fallback(
        a, b, one, one, reduce_op="sum", out_dtype=dtype, **scatter
    )
    actual = symm_mem._fused_scaled_matmul_reduce_scatter_impl(
        mm_out_op=torch.ops.aten._scaled_mm.out,
        A=a,
        B=b,
        A_scale=one,
        kwargs={"scale_b": one, "out_dtype": dtype},
        out_dtype=dtype,
        reduce_op="sum",
        **scatter,
    )
    different = (actual.float() - expected.float()).norm(dim=-1) > 0.05 * expected.float().norm(dim=-1)
    if rank == 0:
        print("expected:", expected[:, 0, 0].tolist(), "(fallback: output[:, 0, 0] of rank 0)")
        print("actual:  ", actual[:, 0, 0].tolist(), f"({int(different.sum())} of {different.numel()} rows differ)")
    wrong[rank] = int(different.sum())


if __name__ == "__main__":
    wrong = mp.get_context("fork").Array("i", RANKS)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (f"{folder}/store", wrong), RANKS, start_method="fork")
    raise SystemExit(any(wrong))
