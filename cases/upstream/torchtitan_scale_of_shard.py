"""torchtitan's Float8Linear, column-parallel over two CPU ranks: what the weight of dgrad is scaled by."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchao.float8 import Float8LinearConfig, float8_linear
from torchtitan.components.quantization import Float8Linear
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.decoder_sharding import colwise_config


def scales_of(rank: int, ranks: int, queue: mp.Queue) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(29400 + ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    set_spmd_backend("spmd_types")
    parallel_dims.device_type = "cpu"
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=ranks, pp=1, ep=1, world_size=ranks)
    recipe = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    linear = Float8Linear.Config(in_features=64, out_features=64, _torchao_config=recipe)
    linear.sharding_config = colwise_config()
    found, cast = [], float8_linear.hp_tensor_to_float8_dynamic

    def watch(*args, **kwargs):
        result = cast(*args, **kwargs)
        if kwargs.get("gemm_input_role") is float8_linear.GemmInputRole.WEIGHT and result._scale.numel() == 1:
            found.append(result._scale.item())
        return result

    float8_linear.hp_tensor_to_float8_dynamic = watch
    built = linear.build()
    with torch.no_grad():  # the largest value is in the first half of the rows
        built.weight.copy_(torch.linspace(4, 1, 64).unsqueeze(1).expand(64, 64))
    dims.build_mesh()
    built.parallelize(dims)
    built.to(torch.bfloat16)
    with get_spmd_context(parallel_dims=dims)():
        built(torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)).float().sum().backward()
    queue.put((rank, found[0]))
    dist.destroy_process_group()


def run(ranks: int) -> list[float]:
    queue = mp.get_context("fork").SimpleQueue()
    mp.start_processes(scales_of, (ranks, queue), nprocs=ranks, start_method="fork")
    return [scale for _, scale in sorted(queue.get() for _ in range(ranks))]


(expected,), actual = run(1), run(2)
print(f"expected: {expected} is the scale of the weight in dgrad, on one rank and on every rank of TP 2")
print(f"actual:   {actual} on the ranks of TP 2")
raise SystemExit(any(scale != expected for scale in actual))
