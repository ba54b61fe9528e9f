"""Hooks for planting faults: wrappers around torch, torchao and the harness, and what is trained at the moment."""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torchao.float8 import float8_scaling_utils, fsdp_utils
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from harness.matrix.case import Case
from harness.worker.probes.discovery import linears
from harness.worker.process.process import PROCESS
from harness.worker.training import train

ODD_RANK = 1  # the rank of single-rank faults
LATE = 8  # a step that only long cases have, and that no check replays

Change = Callable[..., Any]
Plant = Callable[[], object]  # injects a fault in this process


def planted(hook: Callable[..., object], *where: Any) -> Callable[[Change], Plant]:
    """Makes a fault of the function below it: `hook` injects that as a change of what is named here."""
    return lambda change: functools.partial(hook, *where, change)


def wrap(owner: Any, name: str, change: Change) -> None:
    """Replace a function or method by `change(stock, *args, **kwargs)`; static and class methods stay what they are."""
    attribute = vars(owner).get(name)
    if isinstance(attribute, (staticmethod, classmethod)):
        setattr(owner, name, type(attribute)(_around(attribute.__func__, change)))
    else:
        setattr(owner, name, _around(getattr(owner, name), change))


def wrap_everywhere(owner: Any, name: str, change: Change) -> None:
    """`wrap` a function of a module under every name by which another module has imported it already."""
    stock = getattr(owner, name)
    changed = _around(stock, change)
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for alias in [alias for alias, value in names.items() if value is stock]:
            names[alias] = changed


def wrap_result(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Replace what a function or method returns by `change(result)`."""
    wrap(owner, name, lambda stock, *args, **kwargs: change(stock(*args, **kwargs)))


def _around(stock: Change, change: Change) -> Change:
    return lambda *args, **kwargs: change(stock, *args, **kwargs)


def on_odd_rank() -> bool:
    """Return True on the rank of single-rank faults."""
    return dist.get_rank() == ODD_RANK


def on_last_rank() -> bool:
    """True on the last rank of the world, which holds the shards that end early and the sequences that come last."""
    return dist.get_rank() == dist.get_world_size() - 1


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, without a copy; other tensors as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.change(grads[0]), None


def with_gradient(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the same tensor, whose gradient is replaced by `change(gradient)`."""
    changed: torch.Tensor = _OtherGradient.apply(tensor, change)
    return changed


class _Run:
    """What this process trains: the case from when it is built, and the target that was built last."""

    case: Case
    target: Any
    trained = 0

    @property
    def step(self) -> int:
        """Which step it is, from 1; 0 before the first."""
        return self.trained or PROCESS.step


class _Script(NamedTuple):
    """What a script trains stands for a target."""

    model: nn.Module


RUN = _Run()


@functools.cache
def follow_run() -> None:
    """Keep `RUN` up to date from now on."""

    def prepare(stock: Any, case: Case, *args: Any, **kwargs: Any) -> Any:
        RUN.case = case
        prepared = stock(case, *args, **kwargs)
        RUN.target = prepared.target
        return prepared

    def train_step(stock: Any, prepared: Any, step: int, *rest: Any) -> Any:
        RUN.trained = step
        return stock(prepared, step, *rest)

    def built(case: Case, model: nn.Module) -> None:
        RUN.case, RUN.target = case, _Script(model)

    wrap(train, "prepare", prepare)
    wrap(train, "train_step", train_step)
    PROCESS.followers.append(built)


def _wrap_casts(cast: Change) -> None:
    """Replace every cast to float8 by `cast(stock, hp_tensor, scale, *rest)`."""
    for module in (float8_scaling_utils, fsdp_utils):
        wrap(module, "hp_tensor_and_scale_to_float8", cast)


def before_casts(change: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]) -> None:
    """Let every cast to float8 use the scale `change(scale, hp_tensor, role)`. The role is a GemmInputRole."""
    _wrap_casts(
        lambda stock, hp_tensor, scale, *rest, **kwargs: stock(
            hp_tensor, change(scale, hp_tensor, _role_of(rest, kwargs)), *rest, **kwargs
        )
    )


def after_casts(change: Callable[[Any, torch.Tensor, Any], object]) -> None:
    """Call `change(part, hp_tensor, role)` after every cast to float8, whose local Float8TrainingTensor is `part`."""

    def cast(stock: Any, hp_tensor: torch.Tensor, scale: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        result = stock(hp_tensor, scale, *rest, **kwargs)
        part = local(result)
        assert isinstance(part, Float8TrainingTensor), f"a cast returned {type(part)}"
        change(part, hp_tensor, _role_of(rest, kwargs))
        return result

    _wrap_casts(cast)


def _role_of(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the GemmInputRole in the arguments of a cast after tensor and scale."""
    return kwargs.get("gemm_input_role", rest[2] if len(rest) > 2 else None)


def in_forward_of(wanted: Callable[[Float8Linear], bool]) -> Callable[[], bool]:
    """Return a function that says whether the forward of a Float8Linear runs that was `wanted` when it began."""
    running = running_linear(wanted)
    return lambda: running() is not None


def running_linear(wanted: Callable[[Float8Linear], bool] = lambda _: True) -> Callable[[], Float8Linear | None]:
    """Return a function that gives the Float8Linear whose forward runs, if it was `wanted` when that began."""
    running: list[Float8Linear | None] = [None]

    def forward(stock: Any, linear: Float8Linear, x: torch.Tensor) -> torch.Tensor:
        running[0] = linear if wanted(linear) else None
        try:
            return stock(linear, x)
        finally:
            running[0] = None

    wrap(Float8Linear, "forward", forward)
    return lambda: running[0]


def after_all_gather(change: Callable[[torch.Tensor, dist.ProcessGroup], object]) -> None:
    """Call `change(output, group)` after every FSDP2 all-gather: the shards of all ranks of the group in one tensor."""

    def foreach_all_gather(stock: Any, params: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(params, group, *args, **kwargs)
        if result is not None:
            change(result.all_gather_output, group)
        return result

    wrap(_fsdp_param_group, "foreach_all_gather", foreach_all_gather)


def after_build(change: Callable[[nn.Module], object]) -> None:
    """Call `change(model)` when a target is built and has its weights, before the first step."""
    follow_run()

    def prepare(stock: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = stock(*args, **kwargs)
        change(RUN.target.model)
        return prepared

    wrap(train, "prepare", prepare)
    PROCESS.followers.append(lambda _, model: change(model))


Around = Callable[[Callable[[], Any], nn.Module], Any]


def around(method: str, change: Around) -> None:
    """Replace a method of the target that was built last by `change(stock, model)`."""
    target = RUN.target
    stock = getattr(target, method, None)
    if stock is not None:
        setattr(target, method, lambda *args: change(functools.partial(stock, *args), target.model))


def around_evaluation(change: Around) -> None:
    """Replace every evaluation by `change(stock, model)`, which returns its loss."""
    after_build(lambda model: around("evaluate", change))


def around_load(change: Around) -> None:
    """Replace every load of a state by `change(stock, model)`."""
    after_build(lambda model: around("load", change))


def _behind(change: Callable[[nn.Module], object]) -> Around:
    def behind(stock: Callable[[], Any], model: nn.Module) -> Any:
        result = stock()
        change(model)
        return result

    return behind


def after_evaluation(change: Callable[[nn.Module], object]) -> None:
    around_evaluation(_behind(change))


def after_load(change: Callable[[nn.Module], object]) -> None:
    around_load(_behind(change))


def after_update(change: Callable[[nn.Module], object]) -> None:
    around_update(_behind(change))


def before_update(change: Callable[[nn.Module], object]) -> None:
    def before(stock: Callable[[], Any], model: nn.Module) -> None:
        change(model)
        stock()

    around_update(before)


def after_backward(change: Callable[[nn.Module], object]) -> None:
    """Call `change(model)` once, when the gradients of a step are complete, before anything reads them."""
    follow_run()
    changed = set[int]()

    @torch.no_grad()
    def before_first_update(*_: Any) -> None:
        if RUN.step not in changed:  # a model may have several optimizers
            changed.add(RUN.step)
            change(RUN.target.model)

    register_optimizer_step_pre_hook(before_first_update)


def around_update(change: Around) -> None:
    """Replace the step of every optimizer by `change(stock, model)`."""
    follow_run()
    running = list[Any]()

    @torch.no_grad()
    def update(stock: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        stepping = functools.partial(stock, optimizer, *args, **kwargs)
        if running:  # one of several that another one steps
            stepping()
            return
        running.append(optimizer)
        try:
            change(stepping, RUN.target.model)
        finally:
            running.clear()

    changed: set[type] = set()

    def in_class(stock: Any, optimizer: Optimizer) -> None:  # when the first optimizer of a class is made
        kind = type(optimizer)
        if changed.isdisjoint(kind.__mro__):
            changed.add(kind)
            step_of_class: Any = kind.step
            if getattr(step_of_class, "hooked", False):  # when ranks were warmed up: it would call hooks a second time
                setattr(kind, "step", step_of_class.__wrapped__)  # noqa: B010
            wrap(kind, "step", update)
        stock(optimizer)

    wrap(Optimizer, "_patch_step_function", in_class)


def in_parameter_groups(change: Callable[[dict[str, Any]], object]) -> None:
    """Call `change(group)` on every parameter group that an optimizer gets, with its options."""

    def add_param_group(stock: Any, optimizer: Optimizer, group: dict[str, Any]) -> None:
        stock(optimizer, group)
        change(optimizer.param_groups[-1])

    wrap(Optimizer, "add_param_group", add_param_group)


def around_loss(change: Callable[..., torch.Tensor]) -> None:
    """Replace cross entropy by `change(stock, logits, labels, **options)`."""

    signature = inspect.signature(F.cross_entropy)

    def cross_entropy(stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments
        logits, labels = (given.pop(name) for name in ("input", "target"))
        return change(stock, logits, labels, **given)

    wrap_everywhere(F, "cross_entropy", cross_entropy)


def before_microbatch(change: Callable[[nn.Module, int], object]) -> None:
    """Call `change(model, number)` before every forward of the whole model; numbers count from 1 in every step."""
    seen = [0, 0]

    def before(model: nn.Module, *_: Any) -> None:
        seen[:] = [RUN.step, seen[1] + 1 if seen[0] == RUN.step else 1]
        change(model, seen[1])

    after_build(lambda model: model.register_forward_pre_hook(before, prepend=True))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks as they are wrapped: the children of the container with most parameters; without one, the model."""
    containers = [
        module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module)
    ]
    largest = max(
        containers, key=lambda container: sum(param.numel() for param in container.parameters()), default=None
    )
    return [model] if largest is None else list(largest.children())


def last_block(model: nn.Module) -> nn.Module:
    """Return the last block, inside of what checkpointing and compilation wrap around it."""
    block = blocks(model)[-1]
    for wrapped in ("_orig_mod", "_checkpoint_wrapped_module"):
        block = getattr(block, wrapped, block)
    return block


def first_weight(model: nn.Module) -> torch.Tensor:
    """Return the weight of the first linear that is trained."""
    weights = [linear.weight for linear in linears(model).values() if linear.weight.requires_grad]
    assert weights, "no linear of the model is trained"
    return weights[0]


def narrowing_linear(by_fqn: Mapping[str, nn.Linear]) -> str:
    """Return the name of the last of these linears that has fewer outputs than inputs, as the second of an MLP has."""
    names = [fqn for fqn, linear in by_fqn.items() if linear.out_features < linear.in_features]
    assert names, "no linear has fewer outputs than inputs"
    return names[-1]


def widening_weight(model: nn.Module) -> torch.Tensor:
    """The weight of the first linear of the last block with more outputs than inputs, as the first of an MLP has."""
    among = linears(last_block(model)).values()
    weights = [linear.weight for linear in among if linear.out_features > linear.in_features]
    assert weights, "no linear of the last block has more outputs than inputs"
    return weights[0]


def last_weight_like_the_first(model: nn.Module) -> torch.Tensor:
    """Return the last weight of a linear with the shape of the first one's, as the projections of attention have."""
    shape = first_weight(model).shape
    return [linear.weight for linear in linears(model).values() if linear.weight.shape == shape][-1]


def two_alike(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of the last two linears that have the same shape."""
    weights = [linear.weight for linear in reversed(linears(model).values())]
    alike = [
        (one, other)
        for one, other in itertools.combinations(weights, 2)
        if one.shape == other.shape and one is not other
    ]
    assert alike, "no two linears have the same shape"
    return alike[0]


def norms(model: nn.Module) -> list[Any]:
    """Return the modules with a vector of their own, except linears: norms, of whatever class."""
    norm_modules = [module for module in model.modules() if not isinstance(module, nn.Linear) and _vectors(module)]
    assert norm_modules, "the model has no norm with a weight"
    return norm_modules


def norm_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the vectors of norms."""
    return [param for norm in norms(model) for param in _vectors(norm)]


def _vectors(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters(recurse=False) if param.dim() == 1]
