"""Records the tensors that the model is called with, and finds the sequences of the run in them.

A target may take the tokens of another rank, of its own data loader, or the labels in place of the inputs: no global
number shows that where its single-rank reference does the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from harness.trace.model import StepInputs
from harness.worker.process.process import PROCESS, in_backward
from harness.worker.targets.data import Tokens

_INTEGERS = (torch.int16, torch.int32, torch.int64)


class InputRecorder:
    """The integer tensors of every forward of the whole model, but for evaluations.

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
        self._now.append(tensor.detach().cpu().long().numpy().copy())

    def end_step(self, step: int) -> None:
        self._called = self._called and bool(self._now)
        if self._called:
            tokens = self._tokens[step - 1]
            rows = rows_of_pieces(self._pieces, tokens)
            self._steps.append(_step_inputs(step, self._now, rows, len(tokens), self._mine))
        self._now = []

    def continue_from(self, before: InputRecorder) -> None:
        """Prepend the record of the model that was trained before the run was resumed."""
        self._steps = before._steps
        self._called, self._whole = before._called and self._called, before._whole and self._whole

    def record(self) -> tuple[StepInputs, ...] | None:
        """What was found in every step; None where not every step called the whole model with whole tensors."""
        return tuple(self._steps) if self._called and self._whole and self._steps else None


class Rows(NamedTuple):
    """Inputs and labels of some sequences: [sequences, seq_len] each, or the pieces of them, one behind the other."""

    inputs: Tokens
    labels: Tokens

    def are_in(self, seen: Tokens) -> bool:
        """True where a tensor has the inputs or the labels of some of them."""
        known = {row.tobytes() for part in self for row in np.ascontiguousarray(part)}
        return any(row in known for row in _rows(seen, self.inputs.shape[1], known))

    def last_is_in(self, seen: Tokens) -> bool:
        return Rows(self.inputs[-1:], self.labels[-1:]).are_in(seen)


def rows_of_pieces(pieces: Sequence[Sequence[int]], tokens: Tokens) -> Rows:
    """What ranks that have one of these pieces each get of `tokens` [sequences, seq_len + 1]: the first rank first."""
    parts = (tokens[:, :-1], tokens[:, 1:])
    return Rows(*(np.concatenate([part[:, list(piece)] for piece in pieces]) for part in parts))


def _step_inputs(step: int, seen: Sequence[Tokens], rows: Rows, sequences: int, mine: slice) -> StepInputs:
    """Which of so many sequences are in the tensors that were seen in one step, whole or in pieces."""
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
    """The numbers of sequences by the bytes of their rows, which are those of all pieces.

    Short ones may occur twice: then those that are `mine`, if any are.
    """
    by_row: dict[bytes, tuple[int, ...]] = {}
    for row, number in zip(np.ascontiguousarray(rows), itertools.cycle(range(sequences)), strict=False):
        by_row[row.tobytes()] = (*by_row.get(row.tobytes(), ()), number)
    return {row: tuple(number for number in numbers if number in mine) or numbers for row, numbers in by_row.items()}


def _rows(tensor: Tokens, length: int, known: set[bytes]) -> list[bytes]:
    """The rows of this length in a tensor, in whichever of its forms most of them are known."""
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
    """The share of the neighbouring tokens of `given` that are neighbours along a dim of something that was seen."""
    wanted = set(_neighbours(given))
    seen_pairs = {pair for tensor in seen for form in (tensor, tensor.T) for pair in _neighbours(form)}
    return len(wanted & seen_pairs) / len(wanted) if wanted else 1.0


def _neighbours(tensor: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    return list(zip(tensor[..., :-1].ravel().tolist(), tensor[..., 1:].ravel().tolist(), strict=True))
