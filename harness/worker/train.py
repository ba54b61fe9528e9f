"""Training: a few steps of a built target, recorded by probes. The target is built in `targets/reference/build.py`."""

from __future__ import annotations

import contextlib
import platform
import resource
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchao
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import loss_parallel

from harness.matrix.case import Case
from harness.request import Noise
from harness.trace import RankTrace, StepTrace
from harness.worker import data
from harness.worker.probes.graphs import GraphProbe
from harness.worker.probes.matmuls import ScaledMMCounter
from harness.worker.probes.module_tensors import ModuleTensorProbe
from harness.worker.probes.operands import OperandProbe
from harness.worker.probes.probe import ProbeFactory, ProbeSet
from harness.worker.probes.saved_memory import SavedMemoryProbe
from harness.worker.probes.sketches import SketchProbe
from harness.worker.probes.traffic import TrafficProbe
from harness.worker.reduction import reduce_over_ranks
from harness.worker.targets.reference.build import Target, build
from harness.worker.targets.reference.float8 import after_optimizer_step
from harness.worker.targets.reference.noise import add_noise

ReportPhase = Callable[[str], None]

# By the field of RankTrace that each fills.
PROBES: dict[str, ProbeFactory] = {
    "sketches": SketchProbe,
    "operands": OperandProbe,
    "traffic": TrafficProbe,
    "saved_memory": SavedMemoryProbe,
    "graphs": GraphProbe,
    "module_tensors": ModuleTensorProbe,
}


# Not used in compiled runs, whose code does not call what the operand probe patches: the graph probe watches instead.
EAGER_PROBES = ("operands",)


def train(  # noqa: PLR0913  what a request may ask for
    case: Case,
    device: torch.device,
    report_phase: ReportPhase,
    virtual: tuple[str, ...],
    *,
    probes: Sequence[str] = (),
    solo_witness: bool = False,
    noise: Noise | None = None,
) -> RankTrace:
    """Build and train one case on this rank. Returns its trace."""
    base_memory = _peak_memory_bytes(device)
    report_phase("build")
    steps = []
    if case.compile != "none":
        probes = [name for name in probes if name not in EAGER_PROBES]
    with ProbeSet(probes, PROBES, case, device) as watching, ScaledMMCounter(device) as scaled_mm:
        target = build(case, device, solo_witness=solo_witness)
        if noise is not None:
            add_noise(target.model, noise)
        watching.attach(target.model, target.meshes)
        for step, replays in enumerate(target.tokens, start=1):
            report_phase(f"step {step}")
            watching.begin_step(step)
            steps.append(train_step(case, target, step, replays, scaled_mm, watching))
    return RankTrace(
        rank=dist.get_rank(),
        steps=tuple(steps),
        converted_fqns=target.conversion.converted_fqns,
        unmatched_filters=target.conversion.unmatched_filters,
        peak_memory_bytes=_peak_memory_bytes(device) - base_memory,
        data_digest=target.data_digest,
        batch_digests=tuple(data.digest({"tokens": batch.cpu().numpy()}) for batch in target.tokens.unbind(1)),
        software=software(),
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        virtual=virtual,
        **watching.results(),
    )


def train_step(
    case: Case, target: Target, step: int, replays: torch.Tensor, scaled_mm: ScaledMMCounter, watching: ProbeSet
) -> StepTrace:
    """Forward, backward, gradient norm, update. The loss is the mean over the tokens of the global batch."""
    started, calls_before = time.perf_counter(), scaled_mm.calls
    loss = torch.stack([forward_backward(case, target, batch) for batch in replays]).sum()
    watching.after_backward(target.model)
    reduced = reduce_over_ranks(loss, target.model, 1 if target.meshes.tp is None else target.meshes.tp.size())
    target.optimizer.step()
    target.optimizer.zero_grad()
    after_optimizer_step(target.model, case.float8)
    watching.after_update(target.model)
    return StepTrace(
        step=step,
        loss=reduced.loss,
        grad_norm=reduced.grad_norm,
        scaled_mm_calls=scaled_mm.calls - calls_before,
        seconds=time.perf_counter() - started,
    )


def forward_backward(case: Case, target: Target, batch: torch.Tensor) -> torch.Tensor:
    """Accumulate gradients of one batch [local_batch, seq_len + 1]; returns its share of the global loss, detached."""
    inputs, labels = batch[:, :-1], batch[:, 1:]
    sharded_loss = target.meshes.tp is not None and case.layout.loss_parallel
    with loss_parallel() if sharded_loss else contextlib.nullcontext():
        logits = mask_padded_vocab(target.model(inputs), case)
        loss = summed_loss(logits, labels) / global_token_count(case)
        loss.backward()
    loss = loss.detach()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def global_token_count(case: Case) -> int:
    """Tokens over which the loss of one step is averaged, on all data-parallel ranks."""
    return case.train.tokens


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over the tokens of this rank, at least in float32, as torchtitan computes it."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1), reduction="sum")


def mask_padded_vocab(logits: torch.Tensor, case: Case) -> torch.Tensor:
    """Logits [..., padded vocab] with those of the padding set to -inf, so that its probability is zero."""
    vocab_size = case.model.vocab_size
    if vocab_size == case.model.padded_vocab_size:
        return logits
    if not isinstance(logits, DTensor):
        return logits.index_fill(-1, torch.arange(vocab_size, logits.size(-1), device=logits.device), -torch.inf)
    mesh, placements = logits.device_mesh, logits.placements
    _, offsets = compute_local_shape_and_global_offset(logits.shape, mesh, placements)
    local = logits.to_local()
    first = min(max(vocab_size - offsets[-1], 0), local.size(-1))
    padding = torch.arange(first, local.size(-1), device=local.device)
    masked = local.index_fill(-1, padding, -torch.inf)
    return DTensor.from_local(masked, mesh, placements, shape=logits.shape, stride=logits.stride())


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def software() -> dict[str, str]:
    """Versions of the packages that determine the numbers."""
    return {
        "torch": str(torch.__version__),
        "torchao": str(torchao.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
