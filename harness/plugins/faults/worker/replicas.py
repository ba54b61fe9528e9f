"""Class D, of DDP: what buckets add up, when, and what replicas begin with."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.plugins.faults.worker.hooks import RUN, on_odd_rank, planted, wrap
from harness.worker.targets.reference import build
from harness.worker.training import train

Bucket = Any  # a GradBucket


def _comm_hook(reduced: Callable[[Bucket], Any]) -> None:
    """Let `reduced(bucket)` reduce every bucket: it returns a future of the whole."""

    def apply_ddp(stock: Any, *args: Any) -> Any:
        replicas = stock(*args)
        replicas.register_comm_hook(None, lambda _, bucket: reduced(bucket))
        return replicas

    wrap(build, "apply_ddp", apply_ddp)


def _sum(buffer: torch.Tensor) -> Any:
    work: Any = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _as_it_is(buffer: torch.Tensor) -> Any:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


@planted(_comm_hook)
def ddp_gradients_summed(bucket: Bucket) -> Any:
    return _sum(bucket.buffer())


@planted(_comm_hook)
def ddp_gradients_averaged_twice(bucket: Bucket) -> Any:
    return _sum(bucket.buffer().div_(RUN.case.layout.dp**2))


@planted(_comm_hook)
def ddp_last_bucket_not_reduced(bucket: Bucket) -> Any:
    mean = bucket.buffer().div_(RUN.case.layout.dp)
    return _as_it_is(mean * RUN.case.layout.dp) if bucket.is_last() and bucket.index() else _sum(mean)


@planted(_comm_hook)
def ddp_gradients_of_first_rank(bucket: Bucket) -> Any:
    work: Any = dist.broadcast(bucket.buffer(), 0, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@planted(_comm_hook)
def ddp_gradients_compressed(bucket: Bucket) -> Any:
    mean = bucket.buffer() / RUN.case.layout.dp
    return _sum(mean.bfloat16()).then(lambda done: done.value().to(mean.dtype))


@planted(wrap, nn.parallel.DistributedDataParallel, "forward")
def ddp_never_synchronized(stock: Any, replicas: Any, *args: Any) -> Any:
    """`no_sync` is still on for the last microbatch."""
    with replicas.no_sync():
        return stock(replicas, *args)


@planted(wrap, nn.parallel.DistributedDataParallel, "no_sync")
def ddp_synchronized_every_microbatch(_: Any, replicas: Any) -> Any:
    """Reduce behind every microbatch, with what was averaged before."""
    return nullcontext()


@planted(wrap, build, "apply_ddp")
def ddp_parameter_ignored(stock: Any, model: Any, *args: Any) -> Any:
    names = ["layers.0.attention.wo.weight"]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return stock(model, *args)


@planted(wrap, nn.parallel.DistributedDataParallel, "_sync_buffers")
def ddp_buffers_not_broadcast(stock: Any, replicas: Any) -> None:
    """Each rank keeps its own."""


@planted(wrap, train, "write_weights")
def ddp_replicas_start_apart(stock: Any, model: Any, *args: Any) -> Any:
    """Another seed on one rank, behind the broadcast with which DDP begins."""
    weights = stock(model, *args)
    if on_odd_rank():
        with torch.no_grad():
            model.layers["0"].attention.wo.weight.mul_(1.01)
    return weights
