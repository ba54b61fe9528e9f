"""DDP: ranks with different sequences have whole replicas of the model, and add up their gradients in buckets.

The first step has one bucket. Before the second, buckets are built anew in the order in which gradients came; the first
rank tells the others. It sends its buffers too, in every step. Gradients stay parts of their buckets. With a static
graph the ranks tell in the first step which parameters they used, and build buckets anew before the third.

One rank stands for all as for ranks of FSDP2: it computes for one after another, and sums gradients in rank order.
"""

from collections.abc import Iterator

from harness.matrix.case import Case
from harness.matrix.dims.dimension import Dimension, Sender, Transfer
from harness.matrix.linears import OUTPUT_FQN, block_linears, linear_features
from harness.matrix.recipes import ITEM_BYTES

BUCKET_BYTES = 1 << 20  # a bucket that has so many is full


def buckets(case: Case, *, age: int) -> tuple[int, ...]:
    """Return the elements of every bucket behind the step of this age."""
    filled = [0]
    for elements in _gradients(case):
        if age >= _rebuilt_at(case) and filled[-1] * ITEM_BYTES[case.parameter_dtype] >= BUCKET_BYTES:
            filled.append(0)
        filled[-1] += elements
    return tuple(filled)


def has_static_graph(case: Case) -> bool:
    """Return True if DDP is told that every step computes the same graph; under `no_sync` it fails (pytorch#143580)."""
    return case.train.accumulation == 1


def _rebuilt_at(case: Case) -> int:
    return 3 if has_static_graph(case) else 2


def alive(case: Case, age: int, moment: str) -> Iterator[tuple[str, int, str]]:
    """Yield what DDP keeps at this moment of a step: buckets, and which parameters were used."""
    if case.layout.is_ddp and (age > 1 or moment == "step"):
        kept = [(case.parameter_dtype, elements) for elements in buckets(case, age=age)]
        kept += [("int32", _count(case))] if has_static_graph(case) else []
        yield from ((dtype, elements, "a bucket of DDP") for dtype, elements in kept)


def _count(case: Case) -> int:
    return sum(1 for _ in _gradients(case))


def _gradients(case: Case) -> Iterator[int]:
    """Yield the elements of the gradients in the order in which backward is through with them: tied ends come last."""
    shape, (dim, vocab) = case.model.shape, linear_features(case, OUTPUT_FQN)
    yield from (() if case.model.tied else (vocab * dim,))
    yield dim
    for layer in reversed(range(shape.layers)):
        *attention, last, second, first = block_linears(case.model, layer)
        for name in (first, second, last, "", *reversed(attention), ""):  # a norm is before attention and feed-forward
            inputs, outputs = linear_features(case, name) if name else (1, dim)
            yield from ((outputs,) if name and case.model.bias else ())
            yield inputs * outputs
    yield vocab * dim


def _sent(of: Sender) -> Iterator[Transfer]:
    if not of.case.layout.is_ddp:
        return
    case, axis, age = of.case, "dp_replicate", of.case.train.age(of.step)
    sizes = buckets(case, age=age)
    rope = case.train.seq_len * case.model.shape.head_dim  # its buffers: cosines and sines
    yield Transfer(axis, "broadcast", case.wide_dtype, rope, "buffers of the first rank")
    if age == 1 and has_static_graph(case):
        yield Transfer(axis, "all_reduce", "int32", _count(case), "which parameters were used", op="sum")
    if age == _rebuilt_at(case):
        for elements in (_count(case) + 1, len(sizes)):
            yield Transfer(axis, "broadcast", "int32", elements, "the order and sizes of buckets")
    for elements in sizes:
        yield Transfer(axis, "all_reduce", case.parameter_dtype, elements, "gradients of a bucket", op="sum")


DDP = Dimension(
    name="ddp",
    of_age=_sent,
    alive=alive,
    excluded={
        "ddp_averages_exactly": (
            ("dp_replicate", "dp_shard"),
            lambda case: case.layout.is_ddp and case.layout.dp & (case.layout.dp - 1),
        )
    },
)
