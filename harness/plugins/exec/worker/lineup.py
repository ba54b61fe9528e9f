"""Lines up one rank with many: what ranks were given and started from is recorded, and given to one rank whole.

The ranks of a script record the first steps: whole weights at the first forward, what `DataLoader` yields, what the
model is called with and what losses are told is right, gradients before they are clipped, and updates. One rank that
runs the same command gets the batches of all data-parallel ranks one behind the other, and in every step the weights
that the ranks had: each step is compared by itself, and nothing drifts. Float8 linears multiply the batch of each rank
by itself, whose scales are of that batch.
"""

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader
from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from harness.plugins.exec.request import ExecRequest, OneRankRecord
from harness.plugins.exec.worker.derive import groups
from harness.plugins.exec.worker.follow import Exchanges, follow, outermost
from harness.worker.dispatch_hooks.hook import unobserved
from harness.worker.probes.sketches import sketch
from harness.worker.process.process import in_backward
from harness.worker.tensors.names import clean_fqn, dtype_name, mark_owned
from harness.worker.tensors.places import local_part, local_shard, local_tensor, part_at, place_of
from harness.worker.tensors.reduction import reduced_gradient

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_")
_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "kl_div", "binary_cross_entropy_with_logits")
Rows = list[torch.Tensor]


Given = dict[str, list[Rows]]  # by what gave it: "model", "cross_entropy", "loader 0"; the tensors of every call


def install(request: ExecRequest) -> None:
    """Record in this process and its forks, or train one rank on what is recorded."""
    if request.keep_inputs:
        source = Path(request.inputs) if request.inputs else None
        Lineup(Path(request.keep_inputs), request.steps, source).install()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _kept(values: Any) -> Rows:
    leaves = tree_flatten(values)[0]
    tensors = (local_part(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    return [mark_owned(tensor.detach().cpu().clone()) for tensor in tensors]


def _same(one: Rows, other: Rows) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def joined(ranks: Sequence[Rows]) -> tuple[list[torch.Tensor | None], bool]:
    """Return the tensors of all ranks one behind the other, None for what is of no batch; and whether that is all."""
    if len({len(of_rank) for of_rank in ranks}) > 1:
        return [], False
    rows = [next((tensor.shape[0] for tensor in of_rank if tensor.dim()), 0) for of_rank in ranks]
    whole, complete = list[torch.Tensor | None](), True
    for parts in zip(*ranks, strict=True):
        differ = not all(part.shape == parts[0].shape and torch.equal(part, parts[0]) for part in parts)
        is_batch = all(part.dim() and part.shape[0] == count for part, count in zip(parts, rows, strict=True))
        fits = all(part.dim() and part.shape[1:] == parts[0].shape[1:] for part in parts)
        whole.append(torch.cat(parts) if fits and (is_batch or differ) else None)
        complete &= fits or not differ or not parts[0].dim()
    return whole, complete


def put(values: Any, whole: Sequence[torch.Tensor | None]) -> Any:
    """Return `values` with their tensors replaced by those of all ranks."""
    leaves, form = tree_flatten(values)
    given = iter(whole)
    new = []
    for leaf in leaves:
        tensor = next(given, None) if isinstance(leaf, torch.Tensor) else None
        new.append(leaf if tensor is None else tensor.clone().requires_grad_(leaf.requires_grad))
    return tree_unflatten(new, form)


class Lineup:
    """Of one process. `source`: the folder where ranks recorded, where this is the one rank."""

    def __init__(self, folder: Path, steps: int, source: Path | None) -> None:
        self.folder, self.steps, self.source = folder, steps, source
        self.step = 0
        self.given, self.calls, self.lined = Given(), dict[str, int](), dict[str, str]()
        self.ranks = list[Given]()
        self.labels, self.losses, self.sketches = list[int](), list[float](), dict[tuple[int, str, str], Any]()
        self.dtype, self.loss_dtype, self.tokens = "", "", 1
        self.model: nn.Module | None = None
        self._optimizers = list[weakref.ref[Optimizer]]()
        self._has_stepped, self._has_gradients, self._iterators = True, False, 0
        self._over = False
        self._has_labels = source is None  # the loss is told of the rows that the model got

    def install(self) -> None:
        follow(Optimizer, "__init__", after=lambda made, *_, **__: self._optimizers.append(weakref.ref(made)))
        follow(torch.autograd, "backward", before=self._backward)
        for owner in (nn.utils, nn.utils.clip_grad):
            for name in filter(functools.partial(hasattr, owner), _CLIPS):
                follow(owner, name, before=lambda *_, **__: self._gradients())
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(lambda *_: self._updated())
        for name in _LOSSES:
            self._losses_of(name)
        loader: Any = DataLoader
        batches = loader.__iter__
        loader.__iter__ = lambda of: self._yielded(batches(of))
        module: Any = nn.Module
        self._call = module.__call__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.find(module)
            return self._call(module, *args, **kwargs)

        module.__call__ = called
        self._exchanges = Exchanges()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A closure that the optimizer is given makes the gradients."""
        closure = kwargs.get("closure", next(iter(args[1:]), None))
        if closure is None:
            self._gradients()
            return None

        def followed() -> Any:
            loss = closure()
            self._gradients()
            return loss

        return args[:1], {**kwargs, "closure": followed}

    # The model

    def find(self, module: nn.Module) -> None:
        """Follow this module from now on if it is called to be trained and has every parameter of the optimizers."""
        if not self._optimizers or not torch.is_grad_enabled() or in_backward() or torch.compiler.is_compiling():
            return
        optimizers = (optimizer for made in self._optimizers if (optimizer := made()) is not None)
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        trained = {id(param) for group in groups for param in group["params"] if param.requires_grad}
        if not trained <= {id(param) for param in module.parameters()}:
            return
        stock: Any = nn.Module
        stock.__call__ = self._call
        self.model = module
        if self.source is not None:
            self._read()
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_forward, always_call=True)
        linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
        for linear in linears[-1:]:
            linear.register_forward_hook(lambda _, __, output: setattr(self, "dtype", dtype_name(output.dtype)))

    @property
    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        assert self.model is not None
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                yield clean_fqn(name).removeprefix("module."), param

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or in_backward():
            return None
        if self._has_stepped:
            if self.step == self.steps:
                self._over = True
                if self.source is not None:  # nothing more is compared
                    os._exit(0)
                return None
            self._begin()
        self._exchanges.inside = True
        handed = self._hand("model", (args, kwargs))
        tensors = (leaf for leaf in tree_flatten(handed or (args, kwargs))[0] if isinstance(leaf, torch.Tensor))
        self.tokens = next((tensor.numel() for tensor in tensors), 1)
        return handed

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._exchanges.inside = False
        leaves = tree_flatten(dict(output) if isinstance(output, Mapping) else output)[0]
        scalars = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel() == 1)
        self._has_labels |= any(scalar.requires_grad for scalar in scalars)

    @unobserved()
    @torch.no_grad()
    def _begin(self) -> None:
        self.step, self._has_stepped, self._has_gradients = self.step + 1, False, False
        self.losses.append(0.0)
        self.labels.append(0)
        file = f"weights-{self.step}-{{}}.pt"
        if self.source is None:
            held = {name: (place_of(param)[:2], local_shard(param).clone()) for name, param in self.parameters}
            torch.save(held, self.folder / file.format(_rank()))
        else:
            self._write(sorted(self.source.glob(file.format("*"))))
        for name, param in self.parameters:
            self._sketch(name, "initial", param)

    def _write(self, files: Sequence[Path]) -> None:
        """Write the weights that all ranks had into the model of this one."""
        named, missing, written = dict(self.parameters), dict(self.parameters), set[tuple[str, tuple[int, ...]]]()
        for file in files:
            for name, ((shape, offset), shard) in torch.load(file).items():
                param = named.get(name)
                if param is None or place_of(param).shape != shape:
                    self.lined["weights"] = f"one rank has no parameter {name} of shape {tuple(shape)}"
                    continue
                mine = local_shard(param)[part_at(offset, shard.shape)]
                if missing.pop(name, None) is None and (name, offset) in written and not torch.equal(mine, shard):
                    self.lined["weights"] = f"ranks have other values of one part of {name}"
                written.add((name, offset))
                mine.copy_(shard)
        if missing:
            self.lined.setdefault("weights", f"the ranks have no parameter {next(iter(missing))}")
        weights = [local_tensor(param) for param in named.values()]
        wrapped = [each for each in weights if isinstance(each, WeightWithDynamicFloat8CastTensor)]
        if self.model is not None and any(each._precomputed_scale is not None for each in wrapped):
            precompute_float8_dynamic_scale_for_fsdp(self.model)

    def _sketch(self, name: str, kind: Any, tensor: torch.Tensor) -> None:
        self.sketches[self.step, kind, name] = sketch(name, kind, self.step, tensor)

    @unobserved()
    @torch.no_grad()
    def _gradients(self) -> None:
        """Sketch gradients as they are before anything clips them."""
        if self._has_stepped or self._has_gradients:
            return
        self._has_gradients = True
        for name, param in self.parameters:
            grad = reduced_gradient(param)
            if grad is not None:
                self._sketch(name, "grad", grad)

    @unobserved()
    @torch.no_grad()
    def _updated(self) -> None:
        """Sketch parameters. A step with several optimizers is over with the last of them."""
        if self.model is None or not self.step or self._over:
            return
        self._has_stepped = True
        for name, param in self.parameters:
            self._sketch(name, "param", param)
        self._save()

    def _save(self) -> None:
        assert self.model is not None
        modules = self.model.named_modules()
        random = [name for name, each in modules if isinstance(each, nn.Dropout) and each.p and each.training]
        if random:
            self.lined["dropout"] = f"{random[0]} draws other random numbers on one rank: set it to 0"
        if self._exchanges.first:
            self.lined["the forward"] = f"ranks share sequences, experts or stages by {self._exchanges.first}"
        if self.source is None:
            torch.save(self.given, self.folder / f"inputs-{_rank()}.pt")
        record = OneRankRecord(
            rank=_rank(),
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            losses=tuple(self.losses),
            loss_dtype=self.loss_dtype,
            labels=tuple(self.labels),
            shares_linears=any(name == "tp" for name, _ in groups(self.model)),
            dtype=self.dtype,
            tokens=self.tokens,
            batches=max(1, len(self.ranks)),
            sketches=tuple(self.sketches.values()),
            not_lined_up=self.lined,
        )
        (self.folder / f"lineup-{_rank()}.msgpack").write_bytes(msgspec.msgpack.encode(record))

    # What is given

    @unobserved()
    def _hand(self, name: str, values: Any) -> Any:
        """Record what is given; on one rank, return what all ranks were given in this call."""
        at = self.calls[name] = self.calls.get(name, -1) + 1
        if self.source is None:
            self.given.setdefault(name, []).append(_kept(values))
            return None
        calls = [of_rank.get(name, []) for of_rank in self.ranks]
        whole, complete = list[torch.Tensor | None](), all(len(of_rank) > at for of_rank in calls)
        problem = f"one rank calls it {at + 1} times, the ranks {min(map(len, calls), default=0)} times"
        if complete:
            whole, complete = joined([of_rank[at] for of_rank in calls])
            problem = "what ranks are given are no parts of one batch: other shapes"
        own = _kept(values)
        if not complete or len(own) != len(whole):
            if not name.startswith("loader"):  # what a loader yields shows in what the model is called with
                self.lined.setdefault(name, problem)
            return None
        same = all(one is None or torch.equal(one, mine) for one, mine in zip(whole, own, strict=True))
        if not name.startswith("loader"):
            self._has_labels = name != "model" or same
        return put(values, whole)

    def _read(self) -> None:
        """Read what ranks were given: of ranks with the same, such as those of tensor parallelism, one is enough."""
        assert self.source is not None
        for file in sorted(self.source.glob("inputs-*.pt"), key=lambda file: int(file.stem.partition("-")[2])):
            given = torch.load(file)
            if not any(_same(given["model"][0], other["model"][0]) for other in self.ranks):
                self.ranks.append(given)
        for module in () if self.model is None else self.model.modules():
            if type(module) is Float8Linear and len(self.ranks) > 1:
                by_rank: Any = functools.partial(_of_each_rank, module.forward, len(self.ranks))
                module.forward = by_rank

    def _backward(self, tensors: Any = (), *_: Any, **__: Any) -> None:
        loss = tensors[0] if isinstance(tensors, tuple | list) and tensors else tensors
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and not in_backward() and not self._has_stepped:
            with unobserved(), torch.no_grad():
                self.losses[-1] += float(local_shard(loss))
                if not self._has_labels:
                    what = "the loss is told of other rows than the model: they come from no DataLoader"
                    self.lined["labels"] = what
                self.loss_dtype = dtype_name(loss.dtype)

    def _losses_of(self, name: str) -> None:
        stock = getattr(nn.functional, name)

        def loss(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            trains = self.model is not None and torch.is_grad_enabled() and not (in_backward() or self._has_stepped)
            if trains:
                with unobserved():
                    self.labels[-1] += int((local_part(target) != kwargs.get("ignore_index", -100)).sum())
            if trains and not self._exchanges.inside:
                handed = self._hand(name, target)
                target = target if handed is None else handed
            return stock(input, target, *args, **kwargs)

        setattr(nn.functional, name, outermost(stock, loss))

    def _yielded(self, batches: Iterator[Any]) -> Iterator[Any]:
        name, self._iterators = f"loader {self._iterators}", self._iterators + 1
        for batch in batches:
            if self.step == self.steps and self._has_stepped:
                yield batch
                continue
            if self.source is not None and not self.ranks:
                self._read()
            new = self._hand(name, batch)
            yield batch if new is None else new


def _of_each_rank(forward: Callable[[Any], torch.Tensor], ranks: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return what a float8 linear makes of the batch of every rank by itself."""
    if tensor.shape[0] % ranks:
        return forward(tensor)
    return torch.cat([forward(part) for part in tensor.chunk(ranks)])
