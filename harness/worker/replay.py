"""The replay: one rank repeats every module of a parallel run on the operands that the run recorded.

It trains as the single-rank reference does, compares the tensors before and behind every module
with those that the run recorded, and goes on with the recorded ones. So nothing accumulates from module to module:
attention, residual sums and the loss are repeated from recorded results as well, and so are the sum of gradients over
data-parallel ranks and the optimizer's step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from harness.matrix.case import Case, Checkpointing
from harness.matrix.layout import dp_rank
from harness.matrix.numerics import replayed_steps
from harness.matrix.targets import is_llama
from harness.request import RunRequest
from harness.trace import RankTrace, StepTrace
from harness.trace.tensors import FLOAT8, ModuleDistance, ModuleShard, ModuleTensorKind
from harness.worker.discovery import converted_linears
from harness.worker.probes.cast_numbers import dtype_name
from harness.worker.probes.module_tensors import MODULES, NORMS, is_wide
from harness.worker.probes.places import local_shard
from harness.worker.probes.sketches import clean_fqn
from harness.worker.train import Prepared, prepare, software


class Key(NamedTuple):
    """One tensor of a run. `part`: the data-parallel rank it belongs to; None for parameters and their gradients."""

    step: int
    part: int | None
    fqn: str
    call: int
    kind: ModuleTensorKind


class Recorded(NamedTuple):
    """One logical tensor as the run had it. `spread` and `parts` are those of `ModuleDistance`."""

    tensor: torch.Tensor
    spread: float
    parts: int
    problem: str | None


def assembled(case: Case, ranks: Sequence[Sequence[ModuleShard]], device: torch.device) -> dict[Key, Recorded | None]:
    """The logical tensors of a run, from the shards of all its ranks; None for what was float8 already."""
    shards: dict[Key, list[ModuleShard]] = defaultdict(list)
    for rank, recorded in enumerate(ranks):
        for shard in recorded:
            part = None if shard.kind in ("grad", "param") else dp_rank(case.layout, rank)
            shards[Key(shard.step, part, shard.fqn, shard.call, shard.kind)].append(shard)
    return {key: _whole(found, device) for key, found in shards.items()}


def _whole(shards: Sequence[ModuleShard], device: torch.device) -> Recorded | None:
    first = shards[0]
    if first.dtype == FLOAT8:
        return None
    dtype: torch.dtype = getattr(torch, first.dtype)
    owned = [shard for shard in shards if shard.data is not None]
    whole = torch.zeros(first.shape, dtype=dtype)
    covered, squares = 0, 0.0
    for shard in owned:
        local = (
            torch.frombuffer(bytearray(shard.data or b""), dtype=dtype) if shard.data else torch.empty(0, dtype=dtype)
        )
        local = local.view(shard.local_shape)
        place = tuple(slice(at, at + size) for at, size in zip(shard.offset, shard.local_shape, strict=True))
        whole[place] += local
        covered += local.numel()
        squares += local.double().square().sum().item()
    norm = whole.double().norm().item()
    summed = first.summed
    spread = math.sqrt(squares) / norm if summed and norm else 0.0
    parts = max(1, round(covered / max(1, whole.numel())))
    return Recorded(
        whole.to(device), spread, parts, _problem(shards, covered, whole.numel() * (parts if summed else 1))
    )


def _problem(shards: Sequence[ModuleShard], covered: int, wanted: int) -> str | None:
    replicas: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for shard in shards:
        if not shard.summed:
            replicas[shard.offset].add(shard.digest)
    if any(len(digests) > 1 for digests in replicas.values()):
        return "ranks that hold the same tensor hold different values"
    return None if covered == wanted else f"the ranks hold {covered} of {wanted} elements"


class Call(NamedTuple):
    """One call of a module: the data-parallel rank whose tokens it is for, and its number among those for it."""

    part: int | None
    number: int


_OF_PARAMETER = Call(None, 0)


class Replay:
    """Compares as the solo witness trains, and replaces what it computed by what the run had."""

    def __init__(self, recorded: dict[Key, Recorded | None], dp: int) -> None:
        self._recorded = recorded
        self._dp = dp
        self._gradient_factor = 0.0  # not known before the first gradient
        self._left = set(recorded)
        self._step = 0
        self._boundaries: list[_ModuleBoundary] = []
        self.distances: list[ModuleDistance] = []

    def attach(self, model: nn.Module) -> None:
        calls = Counter(key.fqn for key in self._recorded if key[:2] == (1, 0) and key.kind == "output")
        for name, module in model.named_modules():
            if isinstance(module, MODULES):
                fqn = clean_fqn(name)
                boundary = _ModuleBoundary(fqn, self, max(1, calls[fqn]), in_place=isinstance(module, NORMS))
                self._boundaries.append(boundary)
                module.register_forward_pre_hook(boundary.before)
                module.register_forward_hook(boundary.after)

    def begin_step(self, step: int) -> None:
        self._step = step
        for boundary in self._boundaries:
            boundary.calls = 0

    @torch.no_grad()
    def replaced(self, fqn: str, call: Call, kind: ModuleTensorKind, computed: torch.Tensor) -> torch.Tensor:
        """The tensor of the run in place of `computed`; the two are compared on the first call."""
        key = Key(self._step, call.part, fqn, call.number, kind)
        if key not in self._recorded:
            if not (kind == "grad_input" and self._recorded.get(key._replace(kind="input"), key) is None):
                self._note(key, computed, problem="the run did not record it")
            return computed
        recorded, first = self._recorded[key], key in self._left
        self._left.discard(key)
        if recorded is None:
            return computed
        if kind in ("grad_output", "grad_input"):
            recorded = self._of_mean(recorded, computed)
        alike = recorded.tensor.dtype == computed.dtype and recorded.tensor.shape == computed.shape
        if first:
            form = None if alike else f"it is {_form(recorded.tensor)}, the replay's is {_form(computed)}"
            self._note(key, computed, recorded, form or recorded.problem)
        return recorded.tensor if alike else computed

    def _of_mean(self, recorded: Recorded, computed: torch.Tensor) -> Recorded:
        """A recorded gradient as one rank has it, which divides the loss by the number of data-parallel ranks.

        Ranks divide it too, or leave that to FSDP2, which averages gradients of parameters: the first gradient tells.
        Those of a Llama divide by all tokens: `dp` is 1.
        """
        if not self._gradient_factor:
            norms = recorded.tensor.double().norm().item(), computed.double().norm().item()
            self._gradient_factor = min((1.0, float(self._dp)), key=lambda factor: abs(norms[0] - factor * norms[1]))
        return recorded._replace(tensor=recorded.tensor / self._gradient_factor)

    def finish(self) -> None:
        """Note every tensor that the run recorded and the replay never computed."""
        for key in sorted(self._left, key=str):
            recorded = self._recorded[key]
            if recorded is not None:
                self._note(key, recorded.tensor, problem="the replay did not compute it")

    def _note(
        self, key: Key, computed: torch.Tensor, recorded: Recorded | None = None, problem: str | None = None
    ) -> None:
        comparable = recorded is not None and problem is None
        self.distances.append(
            ModuleDistance(
                **key._asdict(),
                dtype=dtype_name(computed.dtype),
                distance=_distance(recorded.tensor, computed) if recorded is not None and comparable else math.nan,
                spread=0.0 if recorded is None else recorded.spread,
                parts=1 if recorded is None else recorded.parts,
                problem=problem,
            )
        )


def replay(request: RunRequest, device: torch.device) -> RankTrace:
    """The distances of a recorded run, and the loss and gradient norm of its own logits and gradients at every step."""
    # Recomputation repeats what forward computed, and would be taken for another call of a module.
    case = msgspec.structs.replace(request.case, checkpointing=Checkpointing())
    prepared = prepare(case, device, solo_witness=True)
    model = prepared.target.model
    watching = Replay(assembled(case, request.replayed, device), 1 if is_llama(case.target) else case.layout.dp)
    watching.attach(model)
    last = replayed_steps(case, request.numerics)
    steps = tuple(_replay_step(prepared, watching, step) for step in range(1, last + 1))
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
        module_distances=tuple(watching.distances),
    )


def _replay_step(prepared: Prepared, watching: Replay, step: int) -> StepTrace:
    """One step in which the optimizer gets the gradients of the run, and leaves the parameters of the run.

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
            squares += _replace(watching, fqn, "grad", param.grad)

    def after(optimizer: Optimizer, *_: object) -> None:
        for fqn, param in waiting(optimizer, "param"):
            _replace(watching, fqn, "param", param)

    watching.begin_step(step)
    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    loss, _ = prepared.target.step(*prepared.batches(step))
    for hook in hooks:
        hook.remove()
    return StepTrace(step=step, loss=float(loss), grad_norm=math.sqrt(squares), scaled_mm_calls=0, seconds=0.0)


@torch.no_grad()
def _replace(watching: Replay, fqn: str, kind: ModuleTensorKind, tensor: torch.Tensor | None) -> float:
    """Replace a parameter, or its gradient, in place by the run's. Returns the sum of its squares."""
    if tensor is None:
        return math.nan
    local = local_shard(tensor)
    local.copy_(watching.replaced(fqn, _OF_PARAMETER, kind, local))
    return local.double().square().sum().item()


class _ModuleBoundary:
    """The pre- and post-hooks of one module, which replace computed tensors by those of the run.

    The input of a norm is the residual stream, which has other readers. It is overwritten in place, so that they read
    what the run had as well, and so that gradients are summed in the order in which the run summed them.
    """

    def __init__(self, fqn: str, watching: Replay, calls_per_part: int, *, in_place: bool) -> None:
        self._fqn = fqn
        self._watching = watching
        self._calls_per_part = calls_per_part
        self._in_place = in_place
        self.calls = 0  # in this step, those that are complete

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        given = args[0]
        if not is_wide(given):
            return None  # tokens
        if self._in_place:
            given.data.copy_(self._watching.replaced(self._fqn, self._call, "input", given))
            return None
        return (self._replaced("input", given, "grad_input"), *args[1:])

    def after(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        replaced = self._replaced("output", output, "grad_output")
        self.calls += 1
        return replaced

    @property
    def _call(self) -> Call:
        return Call(*divmod(self.calls, self._calls_per_part))

    def _replaced(self, kind: ModuleTensorKind, computed: torch.Tensor, gradient: ModuleTensorKind) -> torch.Tensor:
        recorded: torch.Tensor = _Replace.apply(computed, self._fqn, self._call, (kind, gradient), self._watching)
        return recorded


class _Replace(torch.autograd.Function):
    """Hands on the tensor of the run in the forward pass, and its gradient in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        computed: torch.Tensor,
        fqn: str,
        call: Call,
        kinds: tuple[ModuleTensorKind, ModuleTensorKind],
        watching: Replay,
    ) -> torch.Tensor:
        kind, gradient = kinds
        ctx.gradient = fqn, call, gradient, watching
        return watching.replaced(fqn, call, kind, computed).clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        fqn, call, gradient, watching = ctx.gradient
        return watching.replaced(fqn, call, gradient, grads[0]).clone(), None, None, None, None


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|; 0 for two zeros, NaN where a value is not finite."""
    found, expected = found.double(), expected.double()
    if not (found.isfinite().all() and expected.isfinite().all()):
        return math.nan
    distance, norm = (found - expected).norm().item(), expected.norm().item()
    return distance / norm if norm else (math.inf if distance else 0.0)


def _form(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
