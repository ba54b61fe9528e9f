"""`python -m tiny_gpt` trains on one process, `torchrun --nproc-per-node 4 -m tiny_gpt --dp-shard 2 --tp 2` on four."""

from __future__ import annotations

import argparse
import itertools
import os

import torch
import torch.distributed as dist

from tiny_gpt.config import Config, Float8
from tiny_gpt.text import batches
from tiny_gpt.trainer import Trainer


def main() -> None:
    """Train for a few steps and print the loss of each."""
    arguments = parse_arguments()
    device = start()
    torch.manual_seed(0)  # the same initial weights on every rank
    config = Config(
        dp_shard=arguments.dp_shard,
        tp=arguments.tp,
        dtype=arguments.dtype,
        fsdp=arguments.dtype == "bfloat16",
        float8=Float8(recipe=arguments.float8) if arguments.float8 else None,
    )
    trainer = Trainer(config, device)
    text = batches(config, dist.get_rank() // config.tp, device)
    for step, microbatches in enumerate(itertools.islice(text, arguments.steps), start=1):
        loss, norm = trainer.step(microbatches)
        if dist.get_rank() == 0:
            print(f"step {step:3}  loss {loss:.4f}  gradient norm {norm:.3f}", flush=True)  # noqa: T201
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m tiny_gpt", description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dp-shard", type=int, default=1, help="ranks that FSDP2 shards over")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the heads")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--float8", metavar="RECIPE", help="tensorwise, rowwise or rowwise_with_gw_hp; needs a GPU")
    return parser.parse_args()


def start() -> torch.device:
    """Join the ranks that torchrun started, or be the only one; returns the device of this rank."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    backend = "gloo" if device is None else "nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://localhost:0", rank=0, world_size=1)
    return device or torch.device("cpu")


if __name__ == "__main__":
    main()
