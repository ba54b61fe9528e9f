"""The rank program of torch's judge: the operators that a case calls on DTensors, and torch's validation of these.

Torch's validation compares a rule for sharding with the operator on whole tensors, in one process that simulates two
ranks. It takes operators by their name in torch's list of samples (OpInfo), in float32.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.trace.operator_checks import StrategyQuestion, Validated, Validation
from harness.worker import main
from harness.worker.injection import inject

if TYPE_CHECKING:
    from harness.engine.program import RankContext

RANKS = 2


def preload(options: Mapping[str, str]) -> None:
    """As for training; of a validation nothing, since the virtual device must not answer for torch."""
    if "validation" in options:
        torch.set_num_threads(1)
        with contextlib.suppress(ImportError):  # the answer says so
            importlib.import_module(options["validation"])
    else:
        main.preload(options)


def rank_main(context: RankContext) -> bytes:
    try:
        question = msgspec.msgpack.decode(context.payload, type=StrategyQuestion)
    except msgspec.ValidationError:
        with _Operators() as seen:
            main.rank_main(context)
        return msgspec.msgpack.encode(sorted(seen.names))
    for patch in question.injections:
        inject(patch)
    return msgspec.msgpack.encode(validate(question))


class _Operators(TorchDispatchMode):
    """Collects what is called on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.names.add(func.__name__.partition(".")[0])
            return NotImplemented
        return func(*args, **kwargs or {})


def validate(question: StrategyQuestion) -> Validation:
    """What torch says of its rules for these operators."""
    try:
        judge: Any = importlib.import_module(question.module)
    except ImportError as error:
        return Validation(unavailable=str(error))
    known: dict[str, str] = {}
    for info in judge.op_db:
        known.setdefault(info.aten_name.rpartition(".")[2], info.name)
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    validated = {}
    for name in question.operators:
        sample = known.get(name.strip("_"))
        if sample is not None:
            said = judge.compare_operator(sample, world_size=RANKS, incorrect_only=True)
            validated[name] = Validated(right=said.true_positives, wrong=len(said.false_positives))
    return Validation(operators=validated)
