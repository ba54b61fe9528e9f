"""The replay of a recorded run: one rank trains as the single-rank reference does, on what the run had recorded.

`one_rank/replay.py` compares and replaces the tensors of its modules. Here are its steps, in which the optimizer gets
the gradients of the run.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from harness.matrix.case import Checkpointing
from harness.matrix.linears import copies_of_weights
from harness.matrix.numerics import averages_gradients, replayed_steps
from harness.request import RunRequest
from harness.trace import RankTrace, StepTrace
from harness.trace.model import ModuleTensorKind
from harness.worker.one_rank.module_ranks import FLOAT8_MATMUL, FirstMatmul
from harness.worker.one_rank.recorded import Values, assembled
from harness.worker.one_rank.replay import OF_PARAMETER, Replay
from harness.worker.probes.discovery import converted_linears
from harness.worker.process.process import PROCESS
from harness.worker.tensors.names import clean_fqn
from harness.worker.tensors.places import local_shard
from harness.worker.training.train import Prepared, prepare, software


def replay(request: RunRequest, device: torch.device) -> RankTrace:
    """The distances of a recorded run, and the loss and gradient norm of its own logits and gradients at every step."""
    # Recomputation repeats what forward computed, and would be taken for another call of a module.
    case = msgspec.structs.replace(request.case, checkpointing=Checkpointing(), compile="none")
    prepared = prepare(case, device, solo_witness=True)
    model, plays = prepared.target.model, prepared.world.plays
    dp = plays.ranks if averages_gradients(case) else 1
    watching = Replay(assembled(case, request.replayed, device), dp, len(plays.positions))
    matmul = FLOAT8_MATMUL
    if case.float8.traits.block:
        from harness.worker.one_rank.block_products import MATMULS

        matmul = MATMULS[case.float8.traits.kernel]
    watching.attach(model, case, FirstMatmul(matmul), compiled=request.case.compile != "none")
    replayed = replayed_steps(request.case, request.numerics)
    neighbors = zip((0, *replayed), replayed, (*replayed[1:], replayed[-1] + 1), strict=False)
    turns = (_Turn(step, before == step - 1, following - 1) for before, step, following in neighbors)
    steps = tuple(_replay_step(prepared, watching, turn) for turn in turns)
    watching.finish()
    return RankTrace(
        rank=dist.get_rank(),
        steps=steps,
        converted_fqns=tuple(sorted(converted_linears(model))),
        unmatched_filters=(),
        peak_memory_bytes=0,
        data_digest=prepared.data_digest,
        software=software(),
        device=device.type,
        virtual=(),
        installed=PROCESS.installed,
        module_distances=tuple(watching.distances),
    )


class _Turn(NamedTuple):
    """One replayed step. `in_state`: the optimizer is in its state, because the step before was replayed too.

    `leaves`: the step with whose parameters the next replayed one begins.
    """

    step: int
    in_state: bool
    leaves: int


def _replay_step(prepared: Prepared, watching: Replay, turn: _Turn) -> StepTrace:
    """Return one step in which the optimizer gets the gradients of the run, and leaves the parameters of the run.

    A parameter may belong to an optimizer and to another that drives it: the first of them counts.
    """
    model, squares = prepared.target.model, 0.0
    replaced: set[tuple[str, ModuleTensorKind]] = set()

    def waiting(optimizer: Optimizer, kind: ModuleTensorKind) -> Iterator[tuple[str, nn.Parameter]]:
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for name, param in model.named_parameters():
            if id(param) in mine and (name, kind) not in replaced:
                replaced.add((name, kind))
                yield clean_fqn(name), param

    def before(optimizer: Optimizer, *_: object) -> None:
        nonlocal squares
        for fqn, param in waiting(optimizer, "grad"):
            square = _replace(watching, fqn, "grad", param.grad)
            squares += 0.0 if fqn in copies_of_weights(prepared.case) else square

    def after(optimizer: Optimizer, *_: object) -> None:
        for fqn, param in waiting(optimizer, "param"):
            _leave(watching, turn, fqn, param)

    watching.begin_step(turn.step)
    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    loss, _ = prepared.target.step(*prepared.batches(turn.step))
    for hook in hooks:
        hook.remove()
    return StepTrace(step=turn.step, loss=float(loss), grad_norm=math.sqrt(squares), scaled_mm_calls=0, seconds=0.0)


def _leave(watching: Replay, turn: _Turn, fqn: str, param: torch.Tensor) -> None:
    if turn.in_state:
        _replace(watching, fqn, "param", param)
    if turn.leaves > turn.step:
        watching.load(fqn, param, turn.leaves)


@torch.no_grad()
def _replace(watching: Replay, fqn: str, kind: ModuleTensorKind, tensor: torch.Tensor | None) -> float:
    """Replace a parameter, or its gradient, in place by the run's. Returns the sum of its squares."""
    if tensor is None:
        return math.nan
    local = local_shard(tensor)
    local.copy_(watching.replaced(fqn, OF_PARAMETER, kind, Values(local)).whole)
    return local.double().square().sum().item()
