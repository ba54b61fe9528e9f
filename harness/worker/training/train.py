"""Training: a few steps of a target, recorded by probes. `targets/target.py` defines what a target is.

Where a run is resumed, the state of its target is saved, and loaded into others that are built anew; the last of them
trains on. The whole state is digested before and after, so that it can be compared across layouts, bit for bit. Of a
pipeline that is the state of all stages, of which a rank has some.
"""

import gc
import platform
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torchao
from torch import nn
from torch.distributed.tensor import DTensor

from harness.matrix.case import Case, Layout
from harness.matrix.caseid import resumed_in
from harness.matrix.dims import played
from harness.matrix.dims.dimension import Played
from harness.matrix.layout import batch_of, dp_rank, positions_of_ranks
from harness.matrix.linears import copies_of_weights
from harness.request import RunRequest
from harness.trace import RankTrace, StepTrace
from harness.trace.model import Resumed, State, StateChange
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.dispatch_hooks.matmuls import ScaledMMCounter
from harness.worker.one_rank.played import PlayedRanks
from harness.worker.probes.discovery import Digests, Discovery, InputRecorder, parameter_digests, saved_buffers
from harness.worker.probes.probe import ProbeSet
from harness.worker.probes.updates import Updates
from harness.worker.process import internals
from harness.worker.process.process import PROCESS
from harness.worker.targets import data
from harness.worker.targets.contract import build_target, require_loss, require_process_group, require_result
from harness.worker.targets.data import write_weights
from harness.worker.targets.target import IGNORED, Evaluates, Resumes, Target, World
from harness.worker.tensors.digests import ordered_digest
from harness.worker.tensors.names import clean_fqn, dtype_name, mark_owned, optimizers_of
from harness.worker.tensors.places import local_shard, part_at, place_of
from harness.worker.tensors.reduction import gradient_norm, reducing_once, squared_norm_share, with_other_ranks
from harness.worker.training.noise import add_noise

ReportPhase = Callable[[str], None]


class Prepared(NamedTuple):
    """A target that is built and has its initial weights, and the tokens of this rank."""

    case: Case  # as it was built
    world: World
    target: Target
    tokens: torch.Tensor  # [steps, microbatches, local_batch, seq_len + 1]
    labels: torch.Tensor | None  # [steps, microbatches, local_batch, seq_len]; None if every token has one
    positions: torch.Tensor | None  # the same, of tokens in their documents; None without packing
    data_digest: str
    built: Digests  # the parameters as the target built them, where asked for
    inputs: InputRecorder
    updates: Updates

    def batches(self, step: int) -> tuple[Sequence[torch.Tensor], ...]:
        """Return the arguments of the target's step: microbatches, labels if some have none, positions if packed."""
        given = (self.tokens, self.labels, self.positions)
        return tuple(tuple(by_step[step - 1]) for by_step in given if by_step is not None)


def train(
    request: RunRequest,
    device: torch.device,
    report_phase: ReportPhase,
    virtual: tuple[str, ...] = (),
    folder: Path | None = None,
) -> RankTrace:
    """Build and train the case of a request on this rank. Returns its trace.

    `virtual`: parts of the virtual FP8 device that are installed; `folder`: of the job.
    """
    case = request.case
    base_memory = _peak_memory_bytes(device)
    PROCESS.settings.restart()
    report_phase("build")
    steps: list[StepTrace] = []
    resumed = None
    lost = internals.lost_records(request.probes)
    used = [name for name in request.probes if name not in lost]
    plays = played(case) if request.solo else None
    with (
        ProbeSet(used, _as_built(case, request.solo), device, request.numerics, plays=plays) as watching,
        ScaledMMCounter() as scaled_mm,
    ):
        prepared = prepare(case, device, solo_witness=request.solo, digests_built=request.digests_built)
        if request.noise is not None:
            (draw,) = request.noise.draws
            add_noise(prepared.target.model, request.noise, draw)
        PROCESS.settings.record_changes("build")
        discovery = _watch(prepared, watching)
        for step in range(1, len(prepared.tokens) + 1):
            report_phase(f"step {step}")
            watching.begin_step(step)
            steps.append(train_step(prepared, step, scaled_mm, watching))
            PROCESS.settings.record_changes(f"step {step}")
            discovery.end_step()
            prepared.inputs.end_step(step)
            if step == prepared.case.train.resumed_after:
                report_phase(f"resuming after step {step}")
                prepared, resumed = _resumed(prepared, case, step, folder)
                discovery = _watch(prepared, watching, discovery)
                gc.collect()  # what was trained before is gone, as in a new process
                PROCESS.settings.record_changes(f"resuming after step {step}")
    record = discovery.record()
    fqns, filters = [linear.fqn for linear in record.linears], sorted(case.float8.filter_fqns)
    return RankTrace(
        rank=dist.get_rank(),
        steps=tuple(steps),
        converted_fqns=tuple(sorted(linear.fqn for linear in record.linears if linear.converted)),
        unmatched_filters=tuple(entry for entry in filters if not any(entry in fqn for fqn in fqns)),
        peak_memory_bytes=_peak_memory_bytes(device) - base_memory,
        data_digest=prepared.data_digest,
        batch_digests=_batch_digests(case, prepared.tokens),
        software=software(),
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        architecture="" if device.type == "cpu" else _architecture(device),
        virtual=virtual,
        installed=PROCESS.installed,
        arithmetic=request.arithmetic,
        model=msgspec.structs.replace(record, updates=prepared.updates.steps),
        inputs=prepared.inputs.record(),
        state=tuple(PROCESS.settings.changes),
        resumed=resumed,
        not_recorded=lost,
        **watching.results(),
    )


def _watch(prepared: Prepared, watching: ProbeSet, resumed: Discovery | None = None) -> Discovery:
    watching.attach(prepared.target.model)
    return Discovery(prepared.target.model, prepared.case, prepared.built, resumed)


def _resumed(prepared: Prepared, case: Case, step: int, folder: Path | None) -> tuple[Prepared, Resumed]:
    """Return a new target with the state of the trained one, and what became of that state."""
    assert folder is not None, "a run that is resumed has a folder"
    fresh = [prepare(resumed_case, prepared.world.device) for resumed_case in resumed_in(case)]
    resumed = hand_over(prepared.target, [rebuilt.target for rebuilt in fresh], folder, step=step)
    fresh[-1].inputs.continue_from(prepared.inputs)
    fresh[-1].updates.continue_from(prepared.updates)
    return fresh[-1]._replace(built=prepared.built), resumed


def prepare(case: Case, device: torch.device, *, solo_witness: bool = False, digests_built: bool = False) -> Prepared:
    """Build the target of a case on this rank, write its initial weights, and make the tokens it trains on.

    `solo_witness`: as the single-rank reference of the layout. `digests_built`: keep what the target had built.
    """
    pieces = positions_of_ranks(case.layout, case.train.seq_len)
    microbatches = (case.layout.batches if solo_witness else 1) * case.train.accumulation
    world = World(
        device=device,
        fsdp=case.uses_fsdp,
        dp_rank=0 if solo_witness else dp_rank(case.layout, dist.get_rank()),
        microbatches=microbatches,
        local_batch=case.microbatch,
        plays=played(case) if solo_witness else Played(),
    )
    built = _as_built(case, solo_witness)
    target = build_target(built, world)
    digests = parameter_digests(target.model) if digests_built else {}
    weights = write_weights(target.model, case)
    tokens = data.global_tokens(case)
    part = slice(None) if solo_witness else data.batch_slice(case, batch_of(case.layout, dist.get_rank()))
    mine = tokens[:, part].reshape(len(tokens), microbatches, case.microbatch, -1)
    given = tokens_of_rank(mine, device)
    return Prepared(
        case=built,
        world=world,
        target=PlayedRanks(target, case, world.plays) if world.plays.ranks > 1 else target,
        tokens=given,
        labels=_labels(case, given, part) if case.train.counts_labels else None,
        positions=None if case.train.packing == "none" else _shared(data.positions(case), given, part),
        data_digest=data.digest({"tokens": tokens, **data.with_other_stages(weights, built)}),
        built=digests,
        inputs=InputRecorder(
            target.model, tokens, part, pieces if solo_witness else pieces[world.dp_rank % len(pieces) :][:1]
        ),
        updates=Updates(target.model),
    )


def tokens_of_rank(tokens: data.Tokens, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(tokens).to(device)


def _labels(case: Case, tokens: torch.Tensor, part: slice) -> torch.Tensor:
    """Return the labels of the sequences that this rank trains on, `part` of the global batch."""
    return tokens[..., 1:].masked_fill(_shared(data.ignored_labels(case), tokens, part), IGNORED)


def _shared(values: npt.NDArray[Any], tokens: torch.Tensor, part: slice) -> torch.Tensor:
    """Return of values [steps, sequences, positions] those of this rank, in microbatches like `tokens`."""
    return torch.from_numpy(values[:, part]).to(tokens.device).unflatten(1, tokens.shape[1:3])


def train_step(prepared: Prepared, step: int, scaled_mm: ScaledMMCounter, watching: ProbeSet) -> StepTrace:
    """Return one step of the target, after an evaluation if the case has one. Probes see what its optimizer gets."""
    target, batches = prepared.target, prepared.batches(step)
    started, calls_before = time.perf_counter(), scaled_mm.calls
    evaluation_loss = _number(evaluate(target, batches, step)) if prepared.case.train.evaluate else None
    shares: list[torch.Tensor] = []

    @reducing_once()
    def see_gradients() -> None:
        watching.after_backward(target.model)
        copies = copies_of_weights(prepared.case)
        counted = [param for name, param in target.model.named_parameters() if name not in copies]
        shares.append(mark_owned(squared_norm_share(counted) * prepared.case.layout.pp))  # ranks hold one stage

    with prepared.updates.step(step, see_gradients) as updates:
        result = target.step(*batches)
    require_process_group("step")
    loss, norm = require_result(result)
    if not shares:  # an optimizer that did not step: what it would have got is what there is
        see_gradients()
    watching.after_update(target.model)
    return StepTrace(
        step=step,
        loss=_number(loss),
        grad_norm=gradient_norm(shares[0]),
        reported_grad_norm=None if norm is None else _number(norm),
        evaluation_loss=evaluation_loss,
        scaled_mm_calls=scaled_mm.calls - calls_before,
        optimizer_steps=max(updates.values(), default=0),
        seconds=time.perf_counter() - started,
    )


def evaluate(target: Target, batches: Sequence[Sequence[torch.Tensor]], step: int) -> torch.Tensor | float:
    """Return the loss of a batch, given as to `step`, as the target evaluates it.

    Keeps what of torch's state the target left changed by it.
    """
    modes = {fqn: module.training for fqn, module in target.model.named_modules()}
    PROCESS.evaluating = True
    try:
        loss = require_loss(cast("Evaluates", target).evaluate(*batches))
    finally:
        PROCESS.evaluating = False
    phase = f"the evaluation of step {step}"
    PROCESS.settings.record_changes(phase)
    changed = [fqn for fqn, module in target.model.named_modules() if module.training != modes.get(fqn)]
    if changed:
        before, after = ("on", "off") if modes[changed[0]] else ("off", "on")
        after += f" in {len(changed)} of {len(modes)} modules"
        PROCESS.settings.changes.append(StateChange(name="training mode", phase=phase, before=before, after=after))
    return loss


def _batch_digests(case: Case, tokens: torch.Tensor) -> tuple[str, ...]:
    """Return one digest per data-parallel rank in `tokens` [steps, microbatches, sequences, seq_len + 1]."""
    of_ranks = tokens.flatten(1, 2).split(case.local_batch, dim=1)  # those that share sequences once
    return tuple(data.digest({"tokens": batch.cpu().numpy()}) for batch in of_ranks)


def _as_built(case: Case, solo_witness: bool) -> Case:
    return msgspec.structs.replace(case, layout=Layout()) if solo_witness else case


def _number(value: torch.Tensor | float) -> float:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return float(value)


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def software() -> dict[str, str]:
    """Return the versions of the packages that determine the numbers."""
    return {
        "torch": str(torch.__version__),
        "torchao": str(torchao.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _architecture(device: torch.device) -> str:
    """Return the architecture of a GPU: "sm90", "gfx942"."""
    properties = torch.cuda.get_device_properties(device)
    return properties.gcnArchName.partition(":")[0] if torch.version.hip else f"sm{properties.major}{properties.minor}"


def hand_over(trained: Target, targets: Sequence[Target], folder: Path, *, step: int) -> Resumed:
    """Save the target trained for `step` steps, load it into the first of `targets`, save that, and so on."""
    states, wrong = [state_of(trained.model)], []
    for number, target in enumerate(targets):
        place = folder / f"checkpoint-{number}"
        cast("Resumes", trained).save(place)
        dist.barrier()
        cast("Resumes", target).load(place)
        states.append(state_of(target.model))
        differing = _differing(*states[-2:], device=next(trained.model.parameters()).device)
        wrong.append(_wrong_here(trained.model, target.model, differing))
        trained = target
    return Resumed(after_step=step, saved=states[0], loaded=tuple(states[1:]), wrong=tuple(wrong))


@unobserved()
def _differing(saved: State, loaded: State, *, device: torch.device) -> tuple[str, ...]:
    """Return what both have and is not the same on some rank: only this is gathered again, by all ranks."""
    names = sorted(saved)
    differs = torch.tensor([saved[name] != loaded.get(name, saved[name]) for name in names], device=device).int()
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    return tuple(name for name, wrong in zip(names, differs.tolist(), strict=True) if wrong)


@torch.no_grad()
@unobserved()
def _wrong_here(trained: nn.Module, fresh: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Of these names, what this rank holds of the state of `fresh` and is not that part of what `trained` has."""
    saved, loaded = dict(_values(trained)), dict(_values(fresh))
    wholes = with_other_ranks({name: _whole(saved[name]) for name in names if name in saved}) if names else {}
    return tuple(name for name in names if name in loaded and not _has_its_part(wholes[name], loaded[name]))


def _has_its_part(whole: object, loaded: object) -> bool:
    if not (isinstance(whole, torch.Tensor) and isinstance(loaded, torch.Tensor)):
        return repr(whole) == repr(loaded)
    mine = local_shard(loaded)
    expected = whole[part_at(place_of(loaded).offset, mine.shape)]
    return ordered_digest(expected.contiguous()) == ordered_digest(mine.contiguous())


@torch.no_grad()
@unobserved()
def state_of(model: nn.Module) -> State:
    """Parameters and saved buffers of a model, and what its optimizers keep and have for options of each parameter.

    All ranks must call it.
    """
    values = dict(sorted(_values(model), key=lambda pair: pair[0]))
    return dict(sorted(with_other_ranks({name: _written(value) for name, value in values.items()}).items()))


def _values(model: nn.Module) -> Iterator[tuple[str, object]]:
    optimizers = optimizers_of(model)
    yield from saved_buffers(model)
    for name, param in model.named_parameters():
        fqn = clean_fqn(name)
        yield fqn, param
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if any(param is grouped for grouped in group["params"]):
                    yield from ((f"{fqn} {option}", value) for option, value in group.items() if option != "params")
            for kept, value in optimizer.state.get(param, {}).items():
                yield f"{fqn} {kept}", value


def _written(value: object) -> str:
    whole = _whole(value)
    if not isinstance(whole, torch.Tensor):
        return repr(whole)
    return f"{dtype_name(whole.dtype)} {list(whole.shape)} {ordered_digest(whole)}"


def _whole(tensor: object) -> object:
    """Return the logical tensor, without the subclass that FSDP2 casts; what is none stays."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    local: Any = local_shard(tensor)
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()
