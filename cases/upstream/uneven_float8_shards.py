"""The float8 all-gather of FSDP2 with 64 rows on 3 ranks: how many elements each rank sends."""

import tempfile

import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

RANKS = 3


def run(rank, store, sent):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (RANKS,)))
    (parameter,) = model._get_fsdp_state()._fsdp_param_group.fsdp_params
    sent[rank] = sum(tensor.numel() for tensor in parameter.all_gather_inputs)
    sent[RANKS + rank] = parameter.padded_sharded_param_size.numel()


if __name__ == "__main__":
    sent = mp.get_context("fork").Array("i", 2 * RANKS)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (f"{folder}/store", sent), RANKS, start_method="fork")
    print("expected:", sent[RANKS:], "elements (FSDPParam.padded_sharded_param_size)")
    print("actual:  ", sent[:RANKS], "elements, in one all-gather of equal sizes")
    raise SystemExit(sent[:RANKS] != sent[RANKS:])
