"""The linears of a case: which are converted, how often each runs in a step of one rank, its matmuls and its casts.

Of a Llama they follow from the case. Of any other model they are those that its single-rank reference was found to
have, which runs without injections; what is recomputed is found in the run. Casts are derived from torchao 0.18:
`Float8Linear`, its tensor-parallel styles and its FSDP2 extension.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from harness.matrix import linears
from harness.matrix.case import Case
from harness.matrix.layout import DP_AXES
from harness.matrix.recipes import E4M3, E5M2, OPERANDS, TENSOR, Operand
from harness.matrix.upstream import SEPARATE_BACKWARD_CASTS, Changes
from harness.registry import is_llama
from harness.trace.model import ModelRecord
from harness.trace.operands import CastPhase, CastRecord, Role

# The names under which an output layer is left out unless a case converts it too.
_HEADS = (linears.OUTPUT_FQN, "lm_head")


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """`calls`: how often the forward of a converted linear runs in a step, by FQN; `recomputed`: and again in backward.

    `input_sites`: the modules that cast the inputs of converted linears, by FQN. Of these linears `on_tp` have a weight
    that is distributed over TP ranks, `styled` a float8 TP style, which casts nothing again in backward, and `gathered`
    a weight that FSDP2 gathers in float8, and `own_forward` a forward of the target, which may keep casts of weights.
    """

    converted: tuple[str, ...]  # sorted
    calls: Mapping[str, int]
    recomputed: Mapping[str, int]
    on_tp: frozenset[str]
    styled: frozenset[str]
    gathered: frozenset[str]
    input_sites: Mapping[str, str]
    own_forward: frozenset[str] = frozenset()

    def held(self, fqns: Collection[str]) -> "Model":
        """Of these converted linears alone."""
        kept = frozenset(fqns)
        calls, recomputed = ({fqn: counts[fqn] for fqn in fqns} for counts in (self.calls, self.recomputed))
        return msgspec.structs.replace(
            self,
            converted=tuple(fqns),
            calls=calls,
            recomputed=recomputed,
            on_tp=self.on_tp & kept,
            styled=self.styled & kept,
            gathered=self.gathered & kept,
        )


def llama_model(case: Case) -> Model:
    converted = linears.converted_fqns(case)
    has_styles = case.float8.tp_styles == "float8" and case.layout.tp > 1
    styled = frozenset(fqn for fqn in converted if has_styles and fqn != linears.OUTPUT_FQN)
    shares = {fqn for fqn in styled if linears.linear_name(fqn) not in linears.ROWWISE}
    return Model(
        converted=converted,
        calls=dict.fromkeys(converted, case.train.accumulation),
        recomputed={fqn: case.train.accumulation * linears.is_checkpointed(case, fqn) for fqn in converted},
        on_tp=frozenset(converted),
        styled=styled,
        gathered=frozenset(converted if case.gathers_float8 else ()),
        input_sites={fqn: fqn.rpartition(".")[0] if fqn in shares else fqn for fqn in converted},
    )


def found_model(case: Case, reference: ModelRecord, run: ModelRecord, casts: Iterable[CastRecord] = ()) -> Model:
    """Return the linears of a model that is not known: `reference` is the record of its single-rank reference.

    `run` and `casts` are of one rank: which modules have a float8 TP style, and cast, is the choice of the target.
    """
    fqns = sorted(linear.fqn for linear in reference.linears if _is_asked_for(case, linear.fqn))
    weights = {parameter.fqn: parameter for parameter in run.parameters}
    tied = {linear.fqn for linear in reference.linears if linear.tied}  # an embedding cannot look up float8
    inputs = {(cast.fqn, cast.phase) for cast in casts if cast.role == "input"}
    in_forward = {fqn for fqn, phase in inputs if phase == "forward"}
    return Model(
        converted=tuple(fqns),
        calls={fqn: reference.calls.get(fqn, 0) // case.layout.dp for fqn in fqns},
        recomputed={fqn: run.recomputed.get(fqn, 0) for fqn in fqns},
        on_tp=frozenset(
            fqn for fqn in fqns if (weight := weights.get(f"{fqn}.weight")) is not None and "tp" in weight.axes
        ),
        styled=frozenset(
            fqn for fqn in fqns if case.float8.tp_styles == "float8" and inputs and (fqn, "backward") not in inputs
        ),
        gathered=frozenset(fqn for fqn in fqns if case.gathers_float8 and fqn not in tied),
        input_sites={fqn: _input_site(fqn, in_forward) for fqn in fqns},
        own_forward=frozenset(linear.fqn for linear in reference.linears if linear.own_forward),
    )


def _input_site(fqn: str, casting: Collection[str]) -> str:
    """Return the nearest of the `casting` modules at or above a linear; the linear itself where there is none."""
    parts = fqn.split(".")
    above = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
    return next((module for module in above if module in casting), fqn)


def accumulates(case: Case, model: Model | None) -> bool:
    """Return True if data-parallel ranks add up the gradients of several calls before they add up theirs, or may do so.

    The single-rank reference does the same where it knows the rank of a forward pass
    (`worker/one_rank/played.py`).
    """
    if is_llama(case.target) or model is None or case.layout.dp == 1:
        return False
    return any(calls != 1 for calls in model.calls.values())  # in compiled runs calls are not counted: 0


def _is_asked_for(case: Case, fqn: str) -> bool:
    if not case.float8.enabled or any(entry in fqn for entry in case.float8.filter_fqns):
        return False
    return case.float8.output_layer or fqn.rpartition(".")[2] not in _HEADS


def recomputed_matmuls(case: Case, model: Model) -> tuple[int, int]:
    """Return the range of scaled matmuls that checkpointing recomputes of an unknown model.

    `selective_op` keeps the results of some matmuls, and which ones is the choice of the target.
    """
    most = sum(model.recomputed.values())
    return (0 if case.checkpointing.mode == "selective_op" else most), most


# Scaled matmuls of a rank in one step


def calls_of_linears(case: Case, model: Model) -> int:
    """Scaled matmuls of one rank in one step but recomputed ones: those in float8 of every call, and its evaluation."""
    forward, dgrad, wgrad = map(case.float8.traits.multiplies, OPERANDS)
    return (forward * (1 + case.train.evaluate) + dgrad + wgrad) * sum(model.calls.values())


def recomputed_calls(case: Case, model: Model) -> int:
    """Forward scaled matmuls that checkpointing recomputes, in one rank and one step.

    `selective_op` saves every second matmul of a block (torchtitan 0.2.2, `_apply_op_sac`), converted or not: the
    policy sees `aten.mm` of a Float8TrainingTensor or DTensor, so its list needs no `_scaled_mm` to include them.
    """
    if not case.float8.traits.multiplies("forward"):
        return 0
    return case.train.accumulation * sum(
        is_multiplied_again(case, *_place_in_block(case, fqn)) for fqn in model.converted if fqn != linears.OUTPUT_FQN
    )


def _place_in_block(case: Case, fqn: str) -> tuple[int, str]:
    """Return the block of a linear, and the name of the dense linear that stands where it does: of a shared expert."""
    layer = int(fqn.split(".")[1])
    return layer, linears.BLOCK_LINEARS[linears.block_linears(case.model, layer).index(linears.linear_name(fqn))]


def is_multiplied_again(case: Case, layer: int, name: str) -> bool:
    """Return True if the forward of this linear of a block, in whatever precision, is executed again in backward.

    A compiled block does not recompute what backward does not read. An eager one stops once it has the last tensor that
    backward reads, which `aten.mm` saves before it multiplies: the last linear multiplies again in float8 only.
    """
    if not linears.is_recomputed(case, layer, name):
        return False
    if case.compile != "none":
        return not _is_unused_in_backward(case, name)
    return name != linears.BLOCK_LINEARS[-1] or linears.is_converted(case, f"layers.{layer}.{name}")


def _is_unused_in_backward(case: Case, name: str) -> bool:
    """True if backward does not read the output of this linear: it is the last, or its scattered output is saved."""
    if name == linears.BLOCK_LINEARS[-1]:
        return True
    return name == "attention.wo" and case.layout.shares_of_sequence > 1 and case.checkpointing.mode == "selective_op"


class CastForm(NamedTuple):
    axiswise_dim: int | None
    source_dtype: str
    target_dtype: str


class CastSite(NamedTuple):
    fqn: str
    role: Role
    phase: CastPhase


class CompiledCasts(NamedTuple):
    """How many casts of a step compiled blocks must execute, of those that no compiler may merge.

    Each is of another tensor: weights, and gradients of outputs, which alone are cast to e5m2.
    """

    weights_forward: int
    e5m2_forward: int
    e5m2_backward: int


OF_GATHERS = frozenset({"all_gather", "gathered"})  # phases: FSDP2 casts, not a linear, and how often is its choice
_FORWARDS: tuple[CastPhase, ...] = ("evaluation", "forward", "recompute")


def expected_casts(case: Case, model: Model) -> dict[CastSite, tuple[CastForm, ...]]:
    """Return the forms of the casts at every site, in execution order. FSDP2 may cast more often at `all_gather`."""
    expected: dict[CastSite, tuple[CastForm, ...]] = {}
    for fqn in model.converted:
        calls, again = model.calls[fqn], model.recomputed[fqn]
        evaluated = calls * case.train.evaluate
        times_of: dict[CastPhase, int] = {
            "all_gather": 1,
            "gathered": evaluated + 2 * calls + again,
            "evaluation": evaluated,
            "recompute": again,
        }
        casts_again = fqn not in model.styled
        for site, forms in (
            *_inputs(case, fqn, model.input_sites[fqn], casts_again=casts_again),
            *_weights(case, fqn, gathered=fqn in model.gathered),
            *_grad_outputs(case, fqn, casts_again=casts_again),
        ):
            times = times_of.get(site.phase, calls)
            if times and forms:
                expected[site] = forms * times
    return expected


def compiled_casts(case: Case, fqns: Collection[str], changes: Changes) -> CompiledCasts:
    """Return the casts of compiled blocks in one step. `fqns`: the converted linears in them."""
    weights, gradients = len(fqns), len(fqns)
    if SEPARATE_BACKWARD_CASTS in changes and case.layout.tp > 1 and case.float8.traits.one_scale_per_tensor:
        weights += sum(not case.checkpointing.wraps(int(fqn.split(".")[1])) for fqn in fqns)
        if case.float8.tp_styles != "float8":  # a style casts a gradient once, before both of its matmuls
            gradients += sum(fqn.split(".", 2)[2] not in linears.ROWWISE for fqn in fqns)
    return CompiledCasts(
        weights_forward=0 if case.gathers_float8 else weights,
        e5m2_forward=0,
        e5m2_backward=gradients if case.float8.traits.grad_output_dtype == E5M2 else 0,
    )


def _inputs(case: Case, fqn: str, site: str, *, casts_again: bool) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    yield from _forwards(site, "input", _forms(case, "i", -1, E4M3))
    if casts_again:
        yield CastSite(fqn, "input", "backward"), _forms(case, "i_gw", 0, E4M3)


def _weights(case: Case, fqn: str, *, gathered: bool) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    if gathered:
        form = CastForm(None, case.parameter_dtype, E4M3)
        yield CastSite(fqn, "weight", "all_gather"), (form,)
        yield CastSite(fqn, "weight", "gathered"), (form,)  # read in every forward, and in backward
        return
    forward, backward = (0, -1) if case.float8.traits.kernel == "float8" else (-1, 0)  # it casts the transposed weight
    yield from _forwards(fqn, "weight", _forms(case, "w", forward, E4M3))
    yield CastSite(fqn, "weight", "backward"), _forms(case, "w_gi", backward, E4M3)


def _grad_outputs(case: Case, fqn: str, *, casts_again: bool) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    dtype = case.float8.traits.grad_output_dtype
    forms = _forms(case, "go", -1, dtype)
    if casts_again:
        forms += _forms(case, "go_gw", 0, dtype)  # torchao casts it once for dgrad and once for wgrad
    yield CastSite(fqn, "grad_output", "backward"), forms


def _forwards(site: str, role: Role, forms: tuple[CastForm, ...]) -> Iterator[tuple[CastSite, tuple[CastForm, ...]]]:
    for phase in _FORWARDS:
        yield CastSite(site, role, phase), forms


def _forms(case: Case, operand: Operand, dim: int, dtype: str) -> tuple[CastForm, ...]:
    """Return how an operand is cast that a matmul contracts along `dim`; () in high precision."""
    block = case.float8.traits.block_of(operand)
    return () if block is None else (CastForm(None if block == TENSOR else dim, case.train.dtype, dtype),)


# Which ranks must share the scale of a cast, and which hold the same shard of its tensor


def scale_axes(case: Case, cast: CastRecord) -> Collection[str]:
    """Mesh axes along which ranks share one scale: the tensor is replicated there, or sharded along the scaled dim.

    A weight is the same on every data-parallel rank, and one tensor for everything that multiplies it.
    """
    dim = scaled_dim(cast)
    spanned = {"Replicate()"} if cast.block[1] else {"Replicate()", f"Shard({dim})"}
    placed = zip(cast.mesh_axes, cast.placements, strict=True)
    axes = {axis for axis, placement in placed if dim is None or placement in spanned}
    if cast.role == "weight":
        axes |= set(DP_AXES)
    return axes


def replica_axes(cast: CastRecord) -> Collection[str]:
    """Return the mesh axes along which the ranks hold the same shard of the tensor."""
    axes = {axis for axis, placement in zip(cast.mesh_axes, cast.placements, strict=True) if placement == "Replicate()"}
    if cast.role == "weight" and cast.phase not in ("all_gather", "gathered"):
        axes |= set(DP_AXES)
    return axes


def scaled_dim(cast: CastRecord) -> int | None:
    """Return the dim that one scale spans, counted from 0; None when one scale spans the tensor."""
    return None if cast.axiswise_dim is None else cast.axiswise_dim % len(cast.shape)
