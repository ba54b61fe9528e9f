"""Sketches: what all ranks hold adds up to the unsharded tensor, and looking at it changes no number."""

from __future__ import annotations

import math
import struct

import msgspec
import numpy as np
import pytest
import torch

from harness.checks.assembly import SketchKey, assemble, relative_distance, unequal_replicas
from harness.matrix.caseid import parse_case_id
from harness.trace import RankTrace
from harness.trace.model import SKETCH_SIZE, TensorSketch
from harness.worker.probes.sketches import sketch
from harness.worker.targets import data
from harness.worker.targets.data import write_weights
from harness.worker.targets.reference.model import Llama
from harness.worker.tensors.names import clean_fqn
from tests.builders import make_trace
from tests.worker.runs import numbers, sweep

# A learning rate that moves no bit: the final parameters are the initial weights, which every layout gets whole.
STILL = "lr1e-300"


def unsharded(text: str) -> dict[str, torch.Tensor]:
    """The initial weights of a case, with the rows that pad the vocabulary."""
    case = parse_case_id(text)
    model = Llama(case.model, seq_len=case.train.seq_len)
    write_weights(model, case)
    return {fqn: param.detach().double() for fqn, param in model.named_parameters()}


def whole(tensor: torch.Tensor) -> RankTrace:
    """A trace of one rank that holds one tensor alone."""
    return make_trace(sketches=(sketch("w", "param", 1, tensor),))


@pytest.mark.parametrize(
    "text",
    [
        f"single-tensorwise-ac.op-v2050-gb4-s1-{STILL}-f32",
        sweep(f"tp2-tensorwise-v2050-gb4-s1-{STILL}-f64"),
        sweep(f"tp4-rowwise-v2050-gb4-s1-{STILL}-f32"),
        f"tp2-nosp-nolp-bf16-v2050-vpad128-gb4-s1-{STILL}-f32",
        sweep(f"tp2-tensorwise-tpstyle.fp8-ac.full-v2048-gb4-s1-{STILL}-b16"),
        sweep(f"fsdp2-tensorwise-ag.fp8pre-v2050-gb4-s1-{STILL}-b16"),
        f"fsdp3-rowwise-v2050-gb6-s1-{STILL}-f32",
        f"hsdp2x2-tensorwise-v2050-gb4-s1-{STILL}-f64",
        sweep(f"fsdp2-tp2-tensorwise-ag.fp8-v2050-gb4-s1-{STILL}-b16"),
        sweep(f"fsdp2-tp2-nosp-bf16-v2050-gb4-s1-{STILL}-f64"),
        f"fsdp3-tp2-bf16-v2050-gb6-s1-{STILL}-f32",
    ],
)
def test_pieces_of_all_ranks_add_up_to_the_unsharded_tensor(train, text: str):
    traces = train(parse_case_id(text), probes=("sketches",))
    expected = unsharded(text)
    found = assemble(traces)
    assert {key.fqn for key in found if key.kind == "param"} == set(expected)
    assert {key.fqn for key in found if key.kind == "grad"} == set(expected)
    for key, tensor in found.items():
        assert tensor.complete and tensor.shape == tuple(expected[key.fqn].shape), key
    for fqn, tensor in expected.items():
        (one,) = assemble([whole(tensor)]).values()
        param = found[SketchKey(1, "param", fqn)]
        assert relative_distance(param, one) < 1e-14, fqn
        assert param.norm == pytest.approx(tensor.norm().item(), rel=1e-12), fqn
    assert unequal_replicas(traces) == []
    assert norm(traces) == pytest.approx(traces[0].steps[0].grad_norm, rel=1e-12)


def norm(traces: tuple[RankTrace, ...]) -> float:
    """Of the gradients of the first step: `train.py` computes it without sketches."""
    grads = (tensor for key, tensor in assemble(traces).items() if key.kind == "grad" and key.step == 1)
    return math.sqrt(sum(tensor.norm**2 for tensor in grads))


@pytest.mark.parametrize(
    "text",
    [
        sweep("tp2-tensorwise-tpstyle.fp8-ac.full-v2050-gb4-s2-b16"),
        "fsdp2-tensorwise-ag.fp8pre-v2048-gb4-s2-b16",
        sweep("tp2-nosp-rowwise-ac.op-v2048-gb4-s3-f32"),
    ],
)
def test_looking_changes_no_number(train, text: str):
    case = parse_case_id(text)

    off, on = train(case), train(case, probes=("sketches",))
    assert numbers(on) == numbers(off)
    assert all(trace.sketches is None for trace in off) and all(trace.sketches for trace in on)


def sums(tensor_sketch: TensorSketch) -> np.ndarray:
    return np.array(struct.unpack(f"<{SKETCH_SIZE}d", tensor_sketch.sums))


def one_hot(row: int, column: int) -> np.ndarray:
    values = torch.zeros(64, 48)
    values[row, column] = 3.0
    return sums(sketch("w", "grad", 1, values))


def test_a_sketch_is_sums_with_signs_of_the_position():
    signs = [one_hot(row, column) / 3 for row in range(0, 64, 9) for column in range(0, 48, 7)]
    assert all(set(np.abs(pattern)) == {1.0} for pattern in signs)
    assert len({pattern.tobytes() for pattern in signs}) == len(signs), "two positions look the same"
    values = torch.zeros(64, 48)
    values[9, 7], values[18, 14] = 2.0, -5.0
    assert np.array_equal(sums(sketch("w", "grad", 1, values)), (2 * one_hot(9, 7) - 5 * one_hot(18, 14)) / 3)


def test_rows_that_changed_places_and_a_transpose_are_seen():
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    (right,) = assemble([whole(values)]).values()
    swapped = values.clone()
    swapped[[3, 4]] = values[[4, 3]]
    for wrong, far in ((swapped, 0.1), (values.t(), 1.0), (values.roll(1, 0), 1.0), (-values, 1.0)):
        (assembled,) = assemble([whole(wrong)]).values()
        assert relative_distance(assembled, right) > far


def test_one_bit_changes_the_digest():
    values = torch.ones(4, 4)
    flipped = values.clone()
    flipped[2, 3] = 1 + 2**-23
    assert sketch("w", "grad", 1, values).digest != sketch("w", "grad", 1, flipped).digest
    assert sketch("w", "grad", 1, values).digest == sketch("w", "param", 2, values.clone()).digest


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0)])
def test_an_empty_piece_is_nothing(shape: tuple[int, ...]):
    piece = sketch("w", "grad", 1, torch.empty(shape))
    assert not sums(piece).any() and piece.norm_squared == 0.0 and piece.local_shape == shape


def test_nan_is_kept():
    with_nan = sketch("w", "grad", 1, torch.tensor([1.0, math.nan]))
    assert np.isnan(sums(with_nan)).all() and math.isnan(with_nan.norm_squared)


def test_wrappers_leave_no_trace_in_a_name():
    assert clean_fqn("layers.0._checkpoint_wrapped_module.attention.wq.weight") == "layers.0.attention.wq.weight"


def test_a_sketch_is_small():
    values = torch.from_numpy(data.make_weight("layers.0.attention.wq.weight", (128, 128), seed=0))
    assert len(msgspec.msgpack.encode(sketch("layers.0.attention.wq.weight", "grad", 1, values))) < 600
