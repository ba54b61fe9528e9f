"""Watches what a script trains: finds its model and its optimizers, and records the first steps of them by the probes.

Nothing of the script is changed. Steps come from hooks of all optimizers, the model is the outermost module in whose
forward their parameters are used. A step ends where the next forward of the model begins, so that what a script does
behind its optimizer belongs to it. No rank sends anything here: a script may do on one rank what it does on no other.
"""

import math
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from harness.matrix.case import Case
from harness.plugins.exec.request import RECORDED, UNCOMPILED, ProcessRecord
from harness.plugins.exec.worker.derive import Unlike, derive, rank, world_size
from harness.plugins.exec.worker.follow import Exchanges, follow
from harness.plugins.exec.worker.script import line_of_frame
from harness.request import Arithmetic, numerics_of
from harness.trace import RankTrace, StepTrace
from harness.worker.dispatch_hooks.hook import install_hooks, unobserved
from harness.worker.dispatch_hooks.matmuls import ScaledMMCounter
from harness.worker.probes.discovery import Discovery, is_converted
from harness.worker.probes.probe import ProbeSet
from harness.worker.probes.updates import Updates
from harness.worker.process import internals
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.tensors.digests import digest
from harness.worker.tensors.names import clean_fqn, mark_owned
from harness.worker.tensors.places import local_part, local_shard
from harness.worker.tensors.reduction import reducing_once, squared_norm_share
from harness.worker.training.train import software
from harness.worker.virtual.device import install as install_virtual

NO_FORWARD = "no module was called whose parameters its optimizer has"
NO_STEP = "no step of its optimizer ended"
_ROUNDED = 1e-6  # what scaling a gradient may turn it
_KEPT = 64  # losses of later steps that are looked at together


class Recording:
    """The first steps of one model, from its first forward on."""

    def __init__(self, watcher: "Watcher", model: nn.Module, case: Case) -> None:
        unfit = {name: "blocks are compiled" for name in UNCOMPILED if case.compile != "none"}
        self.case, self.model, self.steps = case, model, list[StepTrace]()
        self.lost = {**watcher.lost, **{name: unfit[name] for name in watcher.records if name in unfit}}
        self._watcher, self._entered = watcher, ExitStack()
        numerics = numerics_of(watcher.device.type, "shared", watcher.arithmetic)
        used = [name for name in watcher.records if name not in self.lost]
        self._probes = self._entered.enter_context(ProbeSet(used, case, watcher.device, numerics))
        self._matmuls = self._entered.enter_context(ScaledMMCounter())
        self._probes.attach(model)
        self._discovery = Discovery(model, case, {})
        self._updates = Updates(model)
        self.exchanges = Exchanges()
        self._entered.callback(self.exchanges.close)
        self._step = ExitStack()  # that is open
        self._shapes = list[list[tuple[int, ...]]]()  # of what the model is called with, in every step
        self.inputs = list[str]()  # and its digests
        self.converted = tuple(clean_fqn(name) for name, module in model.named_modules() if is_converted(module))
        self.losses = list[float]()  # of the open step
        self._shares = list[torch.Tensor]()
        self.is_open = self.evaluates = False

    def open(self) -> None:
        self._probes.begin_step(len(self.steps) + 1)
        self._calls, self._started, self._forwards = self._matmuls.calls, time.perf_counter(), 0
        self._taken = self._step.enter_context(self._updates.step(len(self.steps) + 1, self._see_gradients))
        self._shapes.append([])
        self.inputs.append("")
        self.batches = list[str]()  # the same, of each call in the open step
        self.losses.clear()
        self._shares.clear()
        self.is_open = True
        PROCESS.step = len(self.steps) + 1

    @reducing_once()
    def _see_gradients(self) -> None:
        self._probes.after_backward(self.model)
        self._shares.append(mark_owned(squared_norm_share(list(self.model.parameters()))))

    def forward(self, args: Any, kwargs: Any) -> None:
        """The model is called to be trained."""
        self._forwards += 1
        self.exchanges.inside = True
        tensors = [local_part(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._shapes[-1] += [tuple(tensor.shape) for tensor in tensors]
        with unobserved():
            self.batches.append("".join(digest(tensor.detach()) for tensor in tensors))
        self.inputs[-1] += self.batches[-1]

    @property
    def has_stepped(self) -> bool:
        return self.is_open and bool(self._taken)

    def close(self) -> None:
        """The step is over. `grad_norm` is that of this rank's share: the controller adds up their squares."""
        if not self._shares:
            self._see_gradients()
        self._step.close()
        self._probes.after_update(self.model)
        self._probes.note_microbatches(max(1, self._forwards))
        self.steps.append(
            StepTrace(
                step=len(self.steps) + 1,
                loss=sum(self.losses),
                grad_norm=self._shares[0].sqrt().item(),
                scaled_mm_calls=self._matmuls.calls - self._calls,
                optimizer_steps=max(self._taken.values(), default=0),
                seconds=time.perf_counter() - self._started,
            )
        )
        train = self.case.train
        if self._forwards > train.accumulation:
            self.case = replace(self.case, train=replace(train, accumulation=self._forwards))
        self._discovery.end_step()
        PROCESS.settings.record_changes(f"step {len(self.steps)}")
        self.is_open = False

    def trace(self) -> RankTrace:
        """Return what was recorded, and record no more."""
        record = replace(self._discovery.record(), updates=self._updates.steps)
        results = self._probes.results()
        self._entered.close()
        lost, watcher = dict(self.lost), self._watcher
        differ = any(shapes != self._shapes[0] for shapes in self._shapes[: len(self.steps)])
        rebuilds = isinstance(self.model, DistributedDataParallel) and "DDP rebuilds its buckets"
        differs = (differ and "shapes of inputs differ") or (self.evaluates and "the model is evaluated") or rebuilds
        if "saved_memory" in results and differs:
            lost["saved_memory"], results["saved_memory"] = f"{differs} between steps", None
        return RankTrace(
            rank=rank(),
            steps=tuple(self.steps),
            converted_fqns=tuple(sorted(linear.fqn for linear in record.linears if linear.converted)),
            unmatched_filters=(),
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            data_digest="",
            software=software(),
            device="cpu" if watcher.device.type == "cpu" else torch.cuda.get_device_name(watcher.device),
            virtual=watcher.virtual,
            installed=PROCESS.installed,
            arithmetic=watcher.arithmetic,
            model=record,
            state=tuple(PROCESS.settings.changes),
            not_recorded=lost,
            **results,
        )


def _gradient(optimizer: Optimizer) -> torch.Tensor | None:
    """Return the smallest gradient that is not zero, of what this rank holds; None where all are cleared."""
    given = (param.grad for group in optimizer.param_groups for param in group["params"])
    grads = [local_shard(grad) for grad in given if grad is not None]
    return next((grad for grad in sorted(grads, key=torch.numel) if grad.any()), None)


def _wrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are the only one of another, as DDP and `torch.compile` wrap them."""
    while len(children := list(model.children())) == 1:
        model = children[0]
        yield model


class Watcher:
    """Watches every optimizer of this process, and of those that are forked from it, once it is installed.

    `virtual`: the parts of the virtual device; `steps`: how many are recorded whole. Later ones are counted, and their
    losses must be finite.
    """

    def __init__(
        self,
        *,
        steps: int = 3,
        records: Sequence[str] = RECORDED,
        virtual: tuple[str, ...] = (),
        arithmetic: Arithmetic = "exact",
        device: torch.device | None = None,
    ) -> None:
        self.steps, self.records, self.virtual, self.arithmetic = steps, tuple(records), virtual, arithmetic
        self.device = device or torch.device("cpu")
        self.lost = internals.lost_records(self.records)  # before a fault is planted where probes look
        self.count = 0  # steps of the optimizer that took most
        self.case: Case | None = None
        self.trace: RankTrace | None = None
        self.not_watched = ""
        self._told: dict[str, Any] = {}  # of a recording that has ended, beside its trace
        self.not_finite: tuple[int, float] | None = None  # the first step whose loss is no number, and that
        self._backwards = 0  # passes that began
        self._loss: Callable[[], torch.Tensor | None] = lambda: None  # what the last one began from
        self._stepped: dict[int, list[int]] = {}  # by optimizer, the passes before each step
        self._uncleared: dict[int, int] = {}  # the same behind the last one, of those whose gradients are still there
        self._mistakes: dict[str, tuple[int, str]] = {}
        # Of the open step: before each pass, whether the gradients of the one before were gone; and the last of them.
        self._gone, self._last = list[bool](), list[torch.Tensor]()
        self._loses = list[bool]()  # of each recorded step, whether it takes the gradients of its last pass alone
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._parts: list[nn.Module] = []  # outermost modules that have some of the parameters alone
        self._outer: nn.Module | None = None
        self._recording: Recording | None = None
        self._hooks, self._search = ExitStack(), ExitStack()
        self._installed = ExitStack()
        self._later: list[tuple[int, torch.Tensor]] = []

    def install(self) -> None:
        """Watch from now on."""
        PROCESS.settings.restart()
        self._installed.callback(follow(Optimizer, "__init__", after=self._after_init))
        self._installed.callback(
            follow(torch.autograd, "backward", before=self._before_backward, after=self._after_backward)
        )
        for module in (dist, dist.distributed_c10d):
            self._installed.callback(follow(module, "destroy_process_group", before=lambda *_, **__: self.finish()))
        self._installed.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._installed.callback(register_optimizer_step_post_hook(self._after_step).remove)

    def uninstall(self) -> None:
        """Record what there is, and watch no longer."""
        self.finish()
        self._installed.close()

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Record this model from now on, whose optimizer was built before."""
        self._optimizers.append(weakref.ref(optimizer))
        self._attach(model)

    def record(self) -> ProcessRecord:
        """Return what this process did, and record no more."""
        size = world_size() if self.case is None else self.case.world_size
        return self.contribute(ProcessRecord(pid=os.getpid(), rank=rank(), world_size=size))

    def contribute(self, record: ProcessRecord) -> ProcessRecord:
        """Return the record of this process with what trained in it, and record no more."""
        try:
            self.finish()
        except Exception as error:  # the process ends, however it does
            self.not_watched = f"what was recorded cannot be read: {type(error).__name__}: {error}"
        mine = {} if self.trace is None else {"rank": self.trace.rank}
        loses = len(self._loses) > 1 and all(self._loses)  # in one alone, a step may have been skipped
        return replace(
            record,
            **mine,
            **self._told,
            steps=self.count,
            case=self.case,
            trace=self.trace,
            not_finite=self.not_finite,
            not_watched=self.not_watched,
            backwards=self._backwards,
            stepped=tuple(map(tuple, self._stepped.values())),
            mistakes={kind: at for kind, at in self._mistakes.items() if kind != "cleared" or loses},
        )

    def finish(self) -> None:
        """Make the trace of the steps that have ended. Nothing is recorded behind them."""
        recording, self._recording = self._recording, None
        self._search.close()
        self._hooks.close()
        if recording is not None:
            if recording.has_stepped:
                recording.close()
            trace, case = recording.trace(), recording.case
            self.case = replace(case, train=replace(case.train, steps=max(len(trace.steps), 1)))
            inputs = tuple(recording.inputs[: len(trace.steps)])
            self._told = {"inputs": inputs, "converted": recording.converted, "exchanged": recording.exchanges.first}
            if trace.steps:
                self.trace = trace
            else:
                self.not_watched = NO_STEP
        elif self.trace is None and self.count and not self.not_watched:
            self.not_watched = NO_FORWARD if self.count > 1 else NO_STEP
        self._look_at_losses()

    # Optimizers

    def _after_init(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        first = not self._optimizers
        self._optimizers.append(weakref.ref(optimizer))
        if first and self.trace is None:
            hooks = nn.modules.module
            self._search.callback(hooks.register_module_forward_pre_hook(self._enter).remove)
            self._search.callback(hooks.register_module_forward_hook(self._leave, always_call=True).remove)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.setdefault(id(optimizer), []).append(self._backwards)
        if self._recording is not None:
            passes, batches = len(self._gone), self._recording.batches
            others = passes == len(batches) == len({*batches}) > 1  # the same batch again is meant
            self._loses.append(others and all(self._gone[1:]) and self._is_of_last_pass(optimizer))

    @unobserved()
    @torch.no_grad()
    def _is_of_last_pass(self, optimizer: Optimizer) -> bool:
        """Return whether gradients are those of the last pass, clipped or not: a script may add them up by itself."""
        now, last = _gradient(optimizer), next(iter(self._last), None)
        if now is None or last is None or now.shape != last.shape:
            return False
        cosine = torch.nn.functional.cosine_similarity(now.double().flatten(), last.double().flatten(), dim=0)
        return bool(cosine > 1 - _ROUNDED)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._backwards > self._uncleared.get(id(optimizer), self._backwards):
            self._note("kept")
        self._uncleared[id(optimizer)] = self._backwards
        self._gone.clear()
        self._last.clear()
        self.count = max(map(len, self._stepped.values()))

    def _note(self, kind: str) -> None:
        """Note a mistake in a step that is recorded, with the line of the script."""
        if self._recording is not None:
            step, line = len(self._recording.steps) + 1, line_of_frame(sys._getframe(1))
            self._mistakes.setdefault(kind, (step, line))

    @property
    def _live(self) -> list[Optimizer]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _trained(self) -> set[int]:
        groups = [group for optimizer in self._live for group in optimizer.param_groups]
        return {id(param) for group in groups for param in group["params"] if param.requires_grad}

    # The model

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._outer is not None:
            return
        self._outer = module
        if not torch.is_grad_enabled() or in_backward():
            return
        trained = self._trained()
        mine = trained.intersection(map(id, module.parameters()))
        is_part = any(module is part for part in self._parts)  # FSDP may have left it gathered
        if not mine and not is_part:
            return
        if not is_part:
            self._parts.append(module)
        if len(mine) == len(trained):
            self._attach(module, args)
        elif self.count:  # every module that has some of them was called in the first step
            self._attach(nn.ModuleList(self._parts), args)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module is self._outer:
            self._outer = None

    def _attach(self, model: nn.Module, args: Any = None) -> None:
        self._search.close()
        try:
            with unobserved():
                case = derive(model, self._live, self.steps)
                for built in PROCESS.followers:
                    built(case, model)
                self._recording = Recording(self, model, case)
        except Unlike as error:
            self.not_watched = str(error)
            return
        for part in model if isinstance(model, nn.ModuleList) and args is not None else [model]:
            before = part.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            self._hooks.callback(before.remove)
            self._hooks.callback(part.register_forward_hook(self._after_forward, always_call=True).remove)
        for part in _wrapped(model):
            self._hooks.callback(part.register_forward_pre_hook(self._before_wrapped).remove)
            self._hooks.callback(part.register_forward_hook(self._after_forward, always_call=True).remove)
        self._evaluating = False
        if args is not None:  # it is being called
            self._before_forward(model, args, {})

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        recording = self._recording
        if recording is None or torch.compiler.is_compiling() or in_backward() or self._evaluating:
            return
        if recording.has_stepped:
            recording.close()
            if len(recording.steps) == self.steps:
                self.finish()
                return
        if not torch.is_grad_enabled():
            self._evaluate(recording)
            return
        if not recording.is_open:
            recording.open()
        recording.forward(args, kwargs)

    def _before_wrapped(self, *_: Any) -> None:
        """A script may evaluate the module that DDP or `torch.compile` wraps."""
        if self._recording is not None and not (torch.is_grad_enabled() or in_backward() or self._evaluating):
            self._evaluate(self._recording)

    def _evaluate(self, recording: Recording) -> None:
        recording.evaluates = True
        PROCESS.unobserved, PROCESS.evaluating, self._evaluating = PROCESS.unobserved + 1, True, True

    def _after_forward(self, *_: Any) -> None:
        if self._recording is not None:
            self._recording.exchanges.inside = False
        if self._evaluating:
            PROCESS.unobserved, PROCESS.evaluating, self._evaluating = PROCESS.unobserved - 1, False, False

    # Losses

    def _before_backward(self, tensors: Any = (), *_: Any, **__: Any) -> None:
        loss = tensors[0] if isinstance(tensors, (tuple, list)) and tensors else tensors
        if in_backward():
            return
        self._backwards += 1
        if self._recording is not None:
            self._look_for_mistakes(loss)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        with unobserved(), torch.no_grad():
            value = mark_owned(local_shard(loss).clone())
            recording = self._recording
            if recording is not None and recording.is_open:
                recording.losses.append(float(value))
            elif self.trace is not None:
                self._later.append((self.count + 1, value))
                if len(self._later) >= _KEPT:
                    self._look_at_losses()

    @torch.no_grad()
    def _look_for_mistakes(self, loss: Any) -> None:
        """Of what backward begins from, and of gradients that are there before it."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            if loss is self._loss():
                self._note("twice")
            self._loss = weakref.ref(loss)
        with unobserved():
            for optimizer in self._live if self._uncleared else ():
                if _gradient(optimizer) is None:
                    self._uncleared.pop(id(optimizer), None)
            self._gone.append(bool(self._last) and _gradient(self._live[0]) is None)
        if self._gone[-1]:
            self._note("cleared")

    @unobserved()
    @torch.no_grad()
    def _after_backward(self, *_: Any, **__: Any) -> None:
        if self._recording is not None and not in_backward() and len(live := self._live) == 1:
            made = _gradient(live[0])
            self._last = [] if made is None else [mark_owned(made.clone())]

    def _look_at_losses(self) -> None:
        for step, value in self._later:
            if self.not_finite is None and not math.isfinite(number := float(value)):
                self.not_finite = step, number
        self._later.clear()


class Watched:
    """What `watching` yields: behind its block, `record` is that of this rank."""

    record: ProcessRecord


@contextmanager
def watching(model: nn.Module, optimizer: Optimizer, *, steps: int = 3) -> Iterator[Watched]:
    """Record the first steps of a model in a running job, on the device where its parameters are."""
    device, watched = next(model.parameters()).device, Watched()
    install_hooks(compiled=False)
    virtual = install_virtual(compiled=False) if device.type == "cpu" else ()
    arithmetic: Arithmetic = "kernel" if device.type == "cuda" else "exact"
    watcher = Watcher(steps=steps, virtual=virtual, arithmetic=arithmetic, device=device)
    watcher.install()
    try:
        watcher.watch(model, optimizer)
        yield watched
    finally:
        watcher.uninstall()
        watched.record = watcher.record()
