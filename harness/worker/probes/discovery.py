"""Discovers what a target has built: linears, conversions, checkpointed and compiled regions, parameters.

The tensors that the model is called with are searched for the sequences of the run: a target may take the tokens of
another rank, of its own data loader, or the labels instead of the inputs. No global number shows that where its
single-rank reference does the same.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torchao.float8.float8_linear import Float8Linear

from harness.matrix.case import Case
from harness.trace.model import Buffer, Linear, ModelRecord, Parameter, StepInputs
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.targets.data import Tokens
from harness.worker.tensors.digests import ordered_digest
from harness.worker.tensors.names import clean_fqn, dtype_name
from harness.worker.tensors.places import is_wrapped, local_shard, mesh_axes, place_of, unwrapped


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {clean_fqn(fqn): module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}


def converted_linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {fqn: module for fqn, module in linears(model).items() if is_converted(module)}


_TRAINS = re.compile(r"torchao\.(float8|prototype\.\w+_training)\b")


def is_converted(linear: nn.Module) -> bool:
    """Return True for a linear of torchao's, and for one of torch's whose weight torchao has wrapped."""
    if not isinstance(linear, nn.Linear):
        return False
    if any(_TRAINS.match(kind.__module__) for kind in type(linear).__mro__):
        return True
    weight = linear.weight
    return is_wrapped(weight.data) or (isinstance(weight, DTensor) and is_wrapped(weight._local_tensor))


def forward_owner(linear: Float8Linear) -> type:
    """Return the class whose `forward` runs: `Float8Linear`, or a kind of it that a target defines."""
    return next(kind for kind in type(linear).__mro__ if "forward" in vars(kind))


Digests = dict[str, str]  # by FQN


def parameter_digests(model: nn.Module) -> Digests:
    return {clean_fqn(fqn): ordered_digest(local_shard(parameter)) for fqn, parameter in model.named_parameters()}


class Discovery:
    """What a built model consists of; counts the calls of its linears, in eager runs, from then on.

    `built`: what its parameters were before the harness wrote its weights. `resumed`: what was discovered before the
    run was resumed, whose saved buffers are those that training began with.
    """

    def __init__(self, model: nn.Module, case: Case, built: Digests, resumed: Self | None = None) -> None:
        self._model = model
        self._built = built
        self._initial = parameter_digests(model)
        before = {} if resumed is None else {buffer.fqn: buffer for buffer in resumed.buffers}
        saved = {fqn for fqn, _ in saved_buffers(model)} & before.keys()
        buffers = (_buffer(fqn, buffer) for fqn, buffer in model.named_buffers())
        self.buffers: tuple[Buffer, ...] = tuple(
            before[buffer.fqn] if buffer.fqn in saved else buffer for buffer in buffers
        )
        self._changed = set() if resumed is None else {buffer.fqn for buffer in resumed.buffers_now() if buffer.changed}
        self._layout = case.layout
        # By FQN, of forward and of recomputation: in the current step, and the maximum over finished steps.
        self._calls: list[Counter[str]] = [Counter(), Counter()]
        self._most: list[Counter[str]] = [Counter(), Counter()]
        for fqn, linear in linears(model).items() if case.compile == "none" else ():
            linear.register_forward_pre_hook(self._counting(fqn))

    def _counting(self, fqn: str) -> Any:
        def count(*_: Any) -> None:
            if not PROCESS.evaluating:
                self._calls[in_backward()][fqn] += 1

        return count

    def buffers_now(self) -> tuple[Buffer, ...]:
        """Return the buffers as training began with them, and which of them it has changed."""
        now = {clean_fqn(fqn): ordered_digest(local_shard(buffer)) for fqn, buffer in self._model.named_buffers()}
        changed = self._changed | {began.fqn for began in self.buffers if now.get(began.fqn) != began.digest}
        return tuple(replace(began, changed=began.fqn in changed) for began in self.buffers)

    def end_step(self) -> None:
        self._most = [most | calls for most, calls in zip(self._most, self._calls, strict=True)]
        self._calls = [Counter(), Counter()]

    def record(self) -> ModelRecord:
        modules = (module for module in self._model.modules() if not isinstance(module, nn.Linear))
        others = {parameter for module in modules for parameter in module.parameters(recurse=False)}
        return ModelRecord(
            linears=tuple(
                Linear(
                    fqn=fqn,
                    in_features=linear.in_features,
                    out_features=linear.out_features,
                    converted=is_converted(linear),
                    tied=linear.weight in others,
                    own_forward=isinstance(linear, Float8Linear) and forward_owner(linear) is not Float8Linear,
                )
                for fqn, linear in linears(self._model).items()
            ),
            parameters=tuple(self._parameter(fqn, param) for fqn, param in self._model.named_parameters()),
            checkpointed=_names(self._model, CheckpointWrapper),
            compiled=_names(self._model, OptimizedModule),
            calls=dict(sorted(self._most[0].items())),
            recomputed=dict(sorted(self._most[1].items())),
            buffers=self.buffers_now(),
            constants=_constants(self._model),
        )

    def _parameter(self, fqn: str, param: nn.Parameter) -> Parameter:
        local, name, held = local_shard(param), clean_fqn(fqn), unwrapped(param)
        return Parameter(
            fqn=name,
            shape=tuple(param.shape),
            dtype=dtype_name(local.dtype),
            local_elements=local.numel(),
            axes=mesh_axes(held.device_mesh, self._layout) if isinstance(held, DTensor) else (),
            trained=param.requires_grad,
            offset=place_of(param).offset,
            built=self._built.get(name, ""),
            updated=ordered_digest(local) != self._initial.get(name),
        )


def _constants(model: nn.Module) -> dict[str, str]:
    """Sizes are left out: those that a module keeps may be of its shard."""
    constants = {
        clean_fqn(f"{fqn}.{name}"): getattr(module, name)
        for fqn, module in model.named_modules()
        for name in getattr(module, "__constants__", ())
    }
    return {fqn: repr(value) for fqn, value in constants.items() if isinstance(value, float | str | None)}


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that are a part of the state of a model, by FQN."""
    for fqn, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield clean_fqn(f"{fqn}.{name}".lstrip(".")), buffer


def _buffer(fqn: str, buffer: torch.Tensor) -> Buffer:
    local = local_shard(buffer)
    return Buffer(
        fqn=clean_fqn(fqn), shape=tuple(local.shape), dtype=dtype_name(local.dtype), digest=ordered_digest(local)
    )


def _names(model: nn.Module, kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(clean_fqn(f"{fqn}.").rstrip(".") for fqn, module in model.named_modules() if isinstance(module, kind))


_INTEGERS = (torch.int16, torch.int32, torch.int64)


class InputRecorder:
    """The integer tensors of every forward of the whole model, except evaluations.

    `tokens`: of the whole run [steps, sequences, seq_len + 1]; `mine`: which sequences are meant for this rank;
    `pieces`: the positions that it has of them, or those of every rank that it stands for.
    """

    def __init__(self, model: nn.Module, tokens: Tokens, mine: slice, pieces: Sequence[Sequence[int]]) -> None:
        self._tokens = tokens
        self._mine = mine
        self._pieces = pieces
        self._now: list[Tokens] = []
        self._steps: list[StepInputs] = []
        self._called = self._whole = True
        compiled = isinstance(model, OptimizedModule) or getattr(model, "_compiled_call_impl", None) is not None
        if not compiled:  # a hook would be compiled with it
            model.register_forward_pre_hook(self._record_inputs, with_kwargs=True)

    def _record_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or in_backward() or PROCESS.evaluating:
            return
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.dtype in _INTEGERS and leaf.dim() > 0:
                self._add(leaf)

    def _add(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            self._whole = self._whole and all(placement.is_replicate() for placement in tensor.placements)
            tensor = tensor.to_local()
        values = tensor.detach().cpu().long().numpy().copy()
        if not _are_positions(values):
            self._now.append(values)

    def end_step(self, step: int) -> None:
        self._called = self._called and bool(self._now)
        if self._called:
            tokens = self._tokens[step - 1]
            rows = rows_of_pieces(self._pieces, tokens)
            self._steps.append(_step_inputs(step, self._now, rows, len(tokens), self._mine))
        self._now = []

    def continue_from(self, before: Self) -> None:
        """Prepend the record of the model that was trained before the run was resumed."""
        self._steps = before._steps
        self._called, self._whole = before._called and self._called, before._whole and self._whole

    def record(self) -> tuple[StepInputs, ...] | None:
        """Return what was found in every step; None if not every step called the whole model with whole tensors."""
        return tuple(self._steps) if self._called and self._whole and self._steps else None


def _are_positions(values: Tokens) -> bool:
    """Return True for numbers that count: the positions of tokens, which every stage of a pipeline may get."""
    return values.shape[-1] > 1 and float(np.mean(np.diff(values) == 1)) > 0.5


class Rows(NamedTuple):
    """Inputs and labels of some sequences: [sequences, seq_len] each, or the pieces of them, one behind the other."""

    inputs: Tokens
    labels: Tokens

    def are_in(self, seen: Tokens) -> bool:
        """Return True if a tensor has the inputs or the labels of some of them."""
        known = {row.tobytes() for part in self for row in np.ascontiguousarray(part)}
        return any(row in known for row in _rows(seen, self.inputs.shape[1], known))

    def last_is_in(self, seen: Tokens) -> bool:
        return Rows(self.inputs[-1:], self.labels[-1:]).are_in(seen)


def rows_of_pieces(pieces: Sequence[Sequence[int]], tokens: Tokens) -> Rows:
    """What ranks that have one of these pieces each get of `tokens` [sequences, seq_len + 1]: the first rank first."""
    parts = (tokens[:, :-1], tokens[:, 1:])
    return Rows(*(np.concatenate([part[:, list(piece)] for piece in pieces]) for part in parts))


def _step_inputs(step: int, seen: Sequence[Tokens], rows: Rows, sequences: int, mine: slice) -> StepInputs:
    """Return which of so many sequences are in the tensors that were seen in one step, whole or in pieces."""
    meant = range(*mine.indices(sequences))
    inputs, labels = (_numbers(part, sequences, meant) for part in rows)
    seen_rows = [row for tensor in seen for row in _rows(tensor, rows.inputs.shape[1], inputs.keys() | labels.keys())]
    input_numbers = tuple(number for row in seen_rows for number in inputs.get(row, ()))
    complete = set(meant) <= set(input_numbers)
    return StepInputs(
        step=step,
        inputs=input_numbers,
        labels=tuple(number for row in seen_rows for number in labels.get(row, ())),
        covered=1.0 if complete else _covered(rows.inputs[mine], seen),
        shapes=tuple(tensor.shape for tensor in seen),
    )


def _numbers(rows: Tokens, sequences: int, mine: range) -> dict[bytes, tuple[int, ...]]:
    """Return the numbers of sequences by the bytes of their rows, which are those of all pieces.

    Short ones may occur twice: then those that are `mine`, if any are.
    """
    by_row: dict[bytes, tuple[int, ...]] = {}
    for row, number in zip(np.ascontiguousarray(rows), itertools.cycle(range(sequences)), strict=False):
        by_row[row.tobytes()] = (*by_row.get(row.tobytes(), ()), number)
    return {row: tuple(number for number in numbers if number in mine) or numbers for row, numbers in by_row.items()}


def _rows(tensor: Tokens, length: int, known: set[bytes]) -> list[bytes]:
    """Return the rows of this length in a tensor, in whichever of its forms most of them are known."""
    return max(
        ([row.tobytes() for row in np.ascontiguousarray(form)] for form in _forms(tensor, length)),
        key=lambda rows: sum(row in known for row in rows),
        default=[],
    )


def _forms(tensor: Tokens, length: int) -> list[Tokens]:
    """All ways to read a tensor as sequences: batch first, sequence first, packed, with or without the last label."""
    matrices = [tensor.reshape(-1, tensor.shape[-1])]
    if tensor.ndim == 2:
        matrices.append(tensor.T)
    forms = [matrix[:, :length] for matrix in matrices if matrix.shape[1] in (length, length + 1)]
    if tensor.size % length == 0:
        forms.append(tensor.reshape(-1, length))
    if tensor.size % (length + 1) == 0:
        forms.append(tensor.reshape(-1, length + 1)[:, :length])
    return forms


def _covered(given: Tokens, seen: Sequence[Tokens]) -> float:
    """Return the share of neighboring tokens of `given` that are neighbors along a dim of something that was seen."""
    wanted = set(_neighbors(given))
    seen_pairs = {pair for tensor in seen for form in (tensor, tensor.T) for pair in _neighbors(form)}
    return len(wanted & seen_pairs) / len(wanted) if wanted else 1.0


def _neighbors(tensor: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    return list(zip(tensor[..., :-1].ravel().tolist(), tensor[..., 1:].ravel().tolist(), strict=True))
