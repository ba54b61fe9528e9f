"""torchtitan's `Trainer.train_step` on two CPU ranks whose every token has a loss of 2: the largest loss of a rank."""

import os
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer, dist_utils


def logged_by(rank: int, cp: int, queue: mp.Queue) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(29500 + cp))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("loss",))
    dist_utils.clip_grad_norm_ = lambda *_, **__: torch.zeros(())
    labels = torch.zeros(8, dtype=torch.int64)
    if cp == 1 and rank == 0:
        labels[:] = IGNORE_INDEX
    mine = labels.chunk(cp)[rank] if cp > 1 else labels  # the model gets a part of a row
    trainer = MagicMock(
        gradient_accumulation_steps=1,
        num_pp_microbatches=1,
        device=torch.device("cpu"),
        model_parts=[],
        ntokens_seen=8,
        step=1,
        parallel_dims=SimpleNamespace(
            cp=cp,
            dp_enabled=cp == 1,
            dp_cp_enabled=True,
            pp_enabled=False,
            ep_enabled=False,
            get_mesh=lambda _: mesh,
            get_optional_mesh=lambda name: mesh if name == "loss" else None,
        ),
    )
    trainer.lr_schedulers.get_metrics.return_value = {}
    trainer.forward_backward_step = lambda global_valid_tokens, **_: (
        2.0 * (mine != IGNORE_INDEX).sum() / global_valid_tokens
    )
    Trainer.train_step(trainer, iter([({}, labels)]))
    _, mean, largest, *_ = trainer.metrics_processor.log.call_args.args
    if rank == 0:
        queue.put((mean, largest))
    dist.destroy_process_group()


def run(cp: int) -> tuple[float, float]:
    queue = mp.get_context("fork").SimpleQueue()
    mp.start_processes(logged_by, (cp, queue), nprocs=2, start_method="fork")
    return queue.get()


with_cp, without_labels = run(2), run(1)
print("expected: mean and largest loss (2.0, 2.0) with CP 2, and where a rank has no labels")
print(f"actual:   {with_cp} with CP 2, {without_labels} where a rank has no labels")
raise SystemExit(with_cp != (2.0, 2.0) or without_labels != (2.0, 2.0))
