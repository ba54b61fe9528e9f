"""Records every cast to float8 and every scaled matmul. See `harness/trace/operands.py`.

The seams are those of torchao 0.18: every cast ends in `hp_tensor_and_scale_to_float8`, every matmul of a linear runs
in `matmul_with_hp_or_float8_args`, FSDP2 casts in `FSDPParam.all_gather_inputs`. The wrappers only say where the run
is and look at what comes out; they are the outermost, so that they see what a patch under them did. The operands of a
matmul are those that its dispatcher hook reports.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torchao.float8 import float8_linear, float8_scaling_utils, float8_training_tensor, fsdp_utils
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from harness.matrix.case import Case
from harness.trace.operands import (
    GEMM_OPERANDS,
    Aged,
    CastPhase,
    CastRecord,
    GemmRole,
    KeptWeight,
    MatmulRecord,
    OperandTrace,
    Role,
)
from harness.worker.dispatch_hooks import matmuls
from harness.worker.probes.cast_numbers import Cast, read_scale
from harness.worker.probes.casts import UNKNOWN, CastMeter, Lifetimes, Pass, PendingCast, PendingMatmul, Use
from harness.worker.probes.discovery import forward_owner
from harness.worker.probes.fsdp_params import ManagedParam, fsdp_params, is_gathered
from harness.worker.probes.probe import Probe
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.tensors.digests import Contents
from harness.worker.tensors.names import clean_fqn, dtype_name
from harness.worker.tensors.places import local_part, local_tensor, mesh_axes
from harness.worker.virtual.scaled_mm import scales_of_blocks


def gathered_weights(model: nn.Module) -> dict[nn.Module, ManagedParam]:
    """For every module whose weight FSDP2 gathers in float8, what FSDP2 knows of that weight."""
    return {
        param._module_info.module: param
        for param in fsdp_params(model)
        if param._module_info.param_name == "weight"
        and isinstance(local_tensor(param.sharded_param), WeightWithDynamicFloat8CastTensor)
    }


def own_rows(module: nn.Module, param: ManagedParam) -> Cast | None:
    """This rank's rows of the weight that `module` is about to use, its master weights taken for the source.

    None while FSDP2 has not gathered it in float8.
    """
    weight = local_part(module.get_parameter("weight"))
    if not isinstance(weight, Float8TrainingTensor):
        return None
    dim = param.fsdp_placement.dim
    begin = param.mesh_info.shard_mesh_rank * param.padded_sharded_param_size[dim]
    bits = weight._data.narrow(dim, min(begin, weight._data.size(dim)), param.sharded_size[dim])
    return Cast(local_part(param.sharded_param), bits, weight._scale, weight._axiswise_dim)


_CAST = "hp_tensor_and_scale_to_float8"
_MATMULS = (torch.ops.aten.mm, torch.ops.aten.addmm)
_CASTING_MODULES = (float8_training_tensor, float8_scaling_utils, fsdp_utils)  # they import it by name

Phase = Literal["evaluation", "forward", "recompute", "backward", "all_gather"]


class _Place:
    """Where the run is: in which module and phase, and how many matmuls that phase has seen there."""

    __slots__ = ("by", "fqn", "linear", "matmuls", "operands", "parameter", "phase")

    def __init__(self, by: Pass, phase: Phase, parameter: DTensor | None = None) -> None:
        self.by, self.fqn, self.phase, self.matmuls = by, by.fqn, phase, 0
        self.linear: nn.Module | None = None  # whose forward runs
        self.operands: dict[int, Role] = {}  # of a linear in blocks: which is in which memory
        self.parameter = parameter  # the sharded parameter of which FSDP2 casts the local, plain tensor

    def next_gemm(self) -> GemmRole:
        """torchao's backward computes the gradient of the input first, then of the weight."""
        self.matmuls += 1
        if self.phase == "backward":
            return "dgrad" if self.matmuls == 1 else "wgrad"
        return "forward" if self.phase == "all_gather" else self.phase


class OperandProbe(Probe):
    """Records an `OperandTrace`."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self._styles_cast = case.float8.tp_styles == "float8"
        self._casts: list[CastRecord] = []
        self._matmuls: list[MatmulRecord] = []
        self._seen_casts: list[PendingCast] = []
        self._seen_matmuls: list[PendingMatmul] = []
        self._index = 0
        self._contents = Contents()
        self._meter = CastMeter(self._contents)
        self._lifetimes = Lifetimes(case.train.accumulation, self._contents)
        self._held: list[Float8TrainingTensor] = []  # the operands of the matmul that is about to run
        self._aged: list[Aged] = []
        self._kept: list[KeptWeight] = []
        self._places = [_Place(self._lifetimes.begin(0, UNKNOWN, "forward"), "forward")]
        self._fqns: dict[nn.Module, str] = {}
        self._watched: set[type] = {float8_linear.Float8Linear}
        self._gathered: dict[str, tuple[nn.Module, Any]] = {}

    def install(self) -> None:
        for module in _CASTING_MODULES:
            self.replace(module, _CAST, self._watch_cast(getattr(module, _CAST)))
        linear, matmul = float8_linear.Float8Linear, float8_linear.matmul_with_hp_or_float8_args
        self.replace(linear, "forward", self.watch_linear(linear.forward))
        for function in (matmul, float8_scaling_utils.NoopFwToFloat8BwDynamic):
            self.replace(function, "forward", staticmethod(self._remember_place(function.forward)))
            watched = self.watch_backward(function.backward, uses_weight=function is matmul)
            self.replace(function, "backward", staticmethod(watched))
        if self._case.compile == "none":
            dispatch: Any = vars(Float8TrainingTensor)["__torch_dispatch__"]
            self.replace(Float8TrainingTensor, "__torch_dispatch__", self._watch_operators(dispatch))
        self.replace(FSDPParam, "all_gather_inputs", self._watch_all_gather(vars(FSDPParam)["all_gather_inputs"]))
        self.observe(matmuls.scaled_observers, self._on_matmul)

    def attach(self, model: nn.Module) -> None:
        """Learn the names of modules, which weights are gathered in float8, and watch hooks that cast."""
        self._fqns = {module: clean_fqn(fqn) for fqn, module in model.named_modules()}
        self._gathered = {self._fqns[module]: (module, param) for module, param in gathered_weights(model).items()}
        self._watch_subclasses()
        shards = {param.sharded_param for param in fsdp_params(model)}
        managed = {fqn for module, fqn in self._fqns.items() if shards.intersection(module.parameters(recurse=False))}
        self._lifetimes.attach(model, managed)
        if self._styles_cast:
            for module in self._fqns:
                if any(isinstance(part, float8_linear.Float8Linear) for part in module.modules()):
                    self._watch_hooks(module)

    def begin_step(self, step: int) -> None:
        """Remember which step it is. No cast of an earlier step repeats in it, and none of a target that is built."""
        if self._step == 0:
            self._seen_casts.clear()
            self._seen_matmuls.clear()
        self._record_seen()
        super().begin_step(step)
        self._places[0].by = self._lifetimes.begin(step, UNKNOWN, "forward")

    def note_microbatches(self, count: int) -> None:
        self._lifetimes.microbatches = count

    def after_update(self, model: nn.Module) -> None:
        """Note which weights FSDP2 still holds gathered."""
        for param in filter(is_gathered, fsdp_params(model)):
            held = param._module_info
            fqn = self._fqns.get(held.module, UNKNOWN)
            self._kept.append(KeptWeight(step=self._step, fqn=fqn, name=held.param_name))

    def result(self) -> OperandTrace:
        self._record_seen()
        return OperandTrace(
            casts=tuple(self._casts),
            matmuls=tuple(self._matmuls),
            aged=tuple(self._aged),
            kept=tuple(self._kept),
        )

    def _record_seen(self) -> None:
        """Make the records of a whole step after its end: in between, code and data would miss the cache every time."""
        self._meter.settle()
        self._casts += [cast.record() for cast in self._seen_casts]
        self._matmuls += [matmul.record() for matmul in self._seen_matmuls]
        self._seen_casts.clear()
        self._seen_matmuls.clear()
        self._meter.forget()
        self._contents.release()
        self._aged += self._lifetimes.end_step()

    # Where the run is.

    @property
    def place(self) -> _Place:
        return self._places[-1]

    def _enter(self, fqn: str, phase: Phase, parameter: DTensor | None = None) -> None:
        self._places.append(_Place(self._lifetimes.begin(self._step, fqn, phase), phase, parameter))

    def watch_linear(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            phase = _forward_phase()
            if self.place.linear is module and self.place.phase == phase:  # it calls that of its base class
                return original(module, *args, **kwargs)
            self._enter(self._fqns.get(module, UNKNOWN), phase)
            self.place.linear = module
            try:
                self._record_gathered()
                return original(module, *args, **kwargs)
            finally:
                self._places.pop()

        return forward

    def remember(self, ctx: Any) -> None:
        """Let the backward of `ctx` know where its forward ran."""
        ctx.harness_pass = self.place.by

    def _watch_subclasses(self) -> None:
        """A user's own kind of `Float8Linear`, such as one that keeps casts, may have its own forward."""
        kinds = {forward_owner(module) for module in self._fqns if isinstance(module, float8_linear.Float8Linear)}
        for kind in kinds - self._watched:
            self._watched.add(kind)
            self.replace(kind, "forward", self.watch_linear(vars(kind)["forward"]))

    def _remember_place(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            self.remember(ctx)
            return original(ctx, *args, **kwargs)

        return forward

    def watch_backward(self, original: Callable[..., Any], *, uses_weight: bool = False) -> Callable[..., Any]:
        def backward(ctx: Any, *args: Any) -> Any:
            # Its forward may have run before anything was recorded.
            by = getattr(ctx, "harness_pass", None) or self._lifetimes.begin(self._step, UNKNOWN, "backward")
            self._places.append(_Place(by, "backward"))
            try:
                if uses_weight:
                    self._record_gathered()
                return original(ctx, *args)
            finally:
                self._places.pop()

        return backward

    def _watch_all_gather(self, original: property) -> property:
        def all_gather_inputs(param: Any) -> Any:
            self._enter(self._fqns.get(param._module_info.module, UNKNOWN), "all_gather", param.sharded_param)
            try:
                return original.__get__(param)
            finally:
                self._places.pop()

        return property(all_gather_inputs)

    def _watch_hooks(self, module: nn.Module) -> None:
        """torchao's tensor-parallel styles cast in the hooks of a module, before and after its forward."""

        def enter(module: nn.Module, _: Any) -> None:
            self._enter(self._fqns[module], _forward_phase())

        def leave(*_: Any) -> None:
            self._places.pop()

        self._installed.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        self._installed.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _watch_operators(self, original: Any) -> Any:
        """The operands of a matmul as they were cast: what a scaled matmul is given may be a copy in another order."""

        def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in _MATMULS:
                self._held = list(args[-2:])
            try:
                return original.__func__(cls, func, types, args, kwargs)
            finally:
                self._held = []

        return classmethod(dispatch)

    # What is recorded.

    def _watch_cast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def cast(source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(source, *args, **kwargs)
            with _invisible():
                self._record_cast(source, result)
            return result

        return cast

    def _record_cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """The cast that just happened. Its result says what it is for and along which dim it was scaled."""
        place, local = self.place, local_part(result)
        self._add_cast(
            place,
            place.phase,
            Cast(local_part(source), local._data, local._scale, local._axiswise_dim),
            logical=result if place.parameter is None else place.parameter,
            role=local._gemm_input_role.value,
        )

    def record_cast(self, cast: Cast, *, logical: torch.Tensor, role: Role) -> None:
        """Record a cast that just happened in the linear that runs; `logical` is its source."""
        with _invisible():
            self._add_cast(self.place, self.place.phase, cast, logical=logical, role=role)

    def _record_gathered(self) -> None:
        """Record the weight that FSDP2 gathered for the current linear, as if it were cast now."""
        place = self.place
        if place.fqn not in self._gathered:
            return
        module, param = self._gathered[place.fqn]
        with _invisible():
            rows = own_rows(module, param)
            if rows is not None:
                self._add_cast(place, "gathered", rows, logical=param.sharded_param, role="weight")

    def _add_cast(self, place: _Place, phase: CastPhase, cast: Cast, *, logical: torch.Tensor, role: Role) -> None:
        if PROCESS.unobserved:
            return
        sharded = logical if isinstance(logical, DTensor) else None
        measurement = self._meter.see(cast)
        if phase != "gathered":
            self._lifetimes.cast(Use(self._index, place.by, role, phase), cast, measurement.content)
        self._seen_casts.append(
            PendingCast(
                partial(
                    CastRecord,
                    index=self._next_index(),
                    step=self._step,
                    fqn=place.fqn,
                    role=role,
                    phase=phase,
                    shape=tuple(logical.shape),
                    local_shape=tuple(cast.bits.shape),
                    mesh_axes=() if sharded is None else mesh_axes(sharded.device_mesh, self._case.layout),
                    source_dtype=dtype_name(cast.source.dtype),
                    target_dtype=dtype_name(cast.bits.dtype),
                    axiswise_dim=cast.axiswise_dim,
                    block=cast.block,
                ),
                () if sharded is None else sharded.placements,
                measurement,
            )
        )

    def _on_matmul(self, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
        place, gemm = self.place, self.place.next_gemm()
        self._look_at_age(gemm, [(a, scale_a), (b, scale_b)])
        if self._case.float8.traits.block:
            scale_a, scale_b = scales_of_blocks(a, b, scale_a, scale_b)
        with _invisible():
            self._seen_matmuls.append(
                PendingMatmul(
                    partial(
                        MatmulRecord,
                        index=self._next_index(),
                        step=self._step,
                        fqn=place.fqn,
                        gemm=gemm,
                        m=a.shape[0],
                        k=a.shape[1],
                        n=b.shape[1],
                        a_dtype=dtype_name(a.dtype),
                        b_dtype=dtype_name(b.dtype),
                    ),
                    read_scale(scale_a),
                    read_scale(scale_b),
                    self._contents.read(a),
                    self._contents.read(b),
                )
            )

    def _look_at_age(self, gemm: GemmRole, given: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        place = self.place
        operands = [(operand._data, operand._scale) for operand in self._held] or given
        for role, (data, scale) in zip(GEMM_OPERANDS[gemm], operands, strict=True):
            if role != "weight" or place.fqn not in self._gathered:  # of what is gathered, memory is used again
                self._lifetimes.multiply(Use(self._index, place.by, role, gemm), data=data, scale=scale)

    def _next_index(self) -> int:
        self._index += 1
        return self._index - 1


def _forward_phase() -> Phase:
    """Count a forward that runs inside a backward pass as a recomputation."""
    return "evaluation" if PROCESS.evaluating else "recompute" if in_backward() else "forward"


_NOTHING = contextlib.nullcontext()


def _invisible() -> contextlib.AbstractContextManager[Any]:
    """Neither autograd nor a dispatch mode, such as selective checkpointing's, sees what the probe computes."""
    if _len_torch_dispatch_stack():
        return _undispatched()
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


@contextlib.contextmanager
def _undispatched() -> Iterator[None]:
    """What is computed in here reaches no dispatch mode. Only for tensors that are plain."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        yield
