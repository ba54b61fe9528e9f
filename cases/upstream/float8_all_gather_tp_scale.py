"""The float8 all-gather of FSDP2 x TP: the scale of one weight on each rank, before and after precomputing it."""

import inspect
import logging
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

RANKS = 4


def run(rank, store, scales):
    logging.disable(logging.WARNING)  # about collectives that could be merged
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        model[0].weight[0] *= 10  # the largest value is in the rows of TP rank 0
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    parallelize_module(model[0], mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    weight = model[0].weight
    shard = weight._local_tensor
    given = [mesh["dp"], weight.size(), weight.stride(), model[0], None]  # what FSDP2 passes
    wanted = len(inspect.signature(shard.fsdp_pre_all_gather).parameters)
    (dynamic,) = shard.fsdp_pre_all_gather(*given[:wanted])[1]
    precompute_float8_dynamic_scale_for_fsdp(model)
    scales[rank], scales[RANKS + rank] = dynamic.item(), shard._precomputed_scale.item()


if __name__ == "__main__":
    scales = mp.get_context("fork").Array("d", 2 * RANKS)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (f"{folder}/store", scales), RANKS, start_method="fork")
    dynamic, precomputed = ([round(scale, 1) for scale in part] for part in (scales[:RANKS], scales[RANKS:]))
    print("ranks:    [dp0 tp0, dp0 tp1, dp1 tp0, dp1 tp1]")
    print("expected:", precomputed, "(precompute_float8_dynamic_scale_for_fsdp)")
    print("actual:  ", dynamic, "(fsdp_pre_all_gather)")
    raise SystemExit(dynamic != precomputed)
