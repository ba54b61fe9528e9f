"""What ranks multiply is what the formula says; dispatch hooks see all that runs; kernels of an eager linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.checks.measuring import measured, moved
from harness.matrix.case import Float8
from harness.matrix.caseid import parse_case_id
from harness.matrix.recipes import Recipe
from harness.plugins.predict.roofline import EAGER_KERNELS
from harness.plugins.release.gate import gate
from harness.plugins.release.sides import Kind
from harness.result import Measured
from harness.worker.dispatch_hooks import collectives, products
from harness.worker.dispatch_hooks.hook import install_hook, install_hooks, unobserved
from harness.worker.dispatch_hooks.matmuls import ScaledMMCounter
from harness.worker.targets.reference.float8 import convert
from harness.worker.virtual import casts, device
from tests.builders import make_result, make_results, make_witnesses, run_of
from tests.plugins.release.unit.test_gate import TERMS
from tests.programs import run_script
from tests.worker.runs import sweep

casts.install()  # before anything imports torchao's stubs
install_hooks()
CASES = (  # more, compiled ones too, are in `test_clean_runs.py` and `test_compiled.py`
    "single-bf16-ac.op-bias-v2048-s1-f64",  # saves no matmul that adds a bias
    "single-tensorwise-v2048-s1-eval-f64",
    "single-tensorwise-pad-v2048-gb1-sl40-s1-f64",
    sweep("single-tensorwise-ac.full-v2048-s1-f64"),
    sweep("tp2-rowwise-bias-v2048-s2-f64-tol.0.02"),
    sweep("fsdp2-rowwise-ac.op-v2048-s1-b16"),
    sweep("fsdp2-tensorwise-ag.fp8-v2048-s1-accum2-b16"),
    sweep("tp2-rowwise_with_gw_hp-v2048-s1-f64"),
    sweep("atp2-bf16-ac.full-graph-v2048-gb4-s1-b16"),
)
HOST = "single-rowwise-v2048-s1-f64"
CHECKPOINTED = "single-tensorwise-ac.layer2-v2048-s1-f64"
RECOMPUTES_MORE = """
from harness.worker.targets.reference import build, parallel
from harness.matrix.case import Checkpointing

def apply():
    build.apply_checkpointing = lambda layers, _: parallel.apply_checkpointing(layers, Checkpointing(mode="full"))
"""


@pytest.fixture
def numbers(train):
    def of(name: str, *injections: str) -> Measured:
        case = parse_case_id(name)
        run = run_of(*train(case, probes=("flops", "operands"), injections=injections))
        measurement = measured(case, run, make_witnesses(case))
        assert measurement is not None
        return measurement

    return of


@pytest.mark.parametrize("name", CASES)
def test_flops_calls_and_casts_are_those_of_the_formula(numbers, name):
    measurement = numbers(name)
    assert measurement.flops == measurement.expected_flops
    assert measurement.cast_calls == measurement.expected_cast_calls


@pytest.mark.parametrize(
    ("name", "planted", "change"),
    [
        (HOST, "fault:weight_gradient_in_high_precision", {"matmuls in float8": -1, "matmuls in float64": 1}),
        (CHECKPOINTED, "apply", {"matmuls in float8": 1, "attention in float64": 1}),
    ],
)
def test_planted_faults_move_flops(numbers, plant, name, planted, change):
    before, after = numbers(name), numbers(name, *plant(RECOMPUTES_MORE, planted))
    assert "FLOPs" in moved(before, after)
    signs = {words: np.sign(multiplied.flops - before.flops[words].flops) for words, multiplied in after.flops.items()}
    assert {words: sign for words, sign in signs.items() if sign} == change
    decision = gate(*(make_results(make_result(name, measured=measurement)) for measurement in (before, after)), TERMS)
    assert Kind.MATMULS in {reason.kind for reason in decision.gating}


def test_products_count_once_and_fake_ones_do_not():
    seen = []
    products.observers.append(seen.append)
    try:
        a, b = torch.ones(4, 8), torch.ones(8, 2)
        a @ b
        torch.addmm(torch.ones(2), a, b)
        torch.bmm(a[None].repeat(3, 1, 1), b[None].repeat(3, 1, 1))
        a.to("meta") @ b.to("meta")
    finally:
        products.observers.remove(seen.append)
    assert [(product.part, product.flops) for product in seen] == [("matmuls", 128), ("matmuls", 128), ("matmuls", 384)]


WATCHED = (f"{Path(__file__).parent / 'fabricwitness.py'}:apply",)


@pytest.mark.parametrize(
    "text", ["hsdp2x2-tensorwise-ag.fp8pre-v2048-gb4-s1-f32", "tp2-tensorwise-tpstyle.fp8-ac.op-v2048-gb4-s1-b16"]
)
def test_hooks_see_every_exchange_on_the_fabric_and_no_other(train, text: str):
    train(parse_case_id(text), probes=("sketches", "traffic"), injections=WATCHED)


def multiply(dtype: torch.dtype = torch.float8_e4m3fn, *, at: str = "cpu") -> tuple[torch.Tensor, ...]:
    a = torch.ones(16, 16, device=at).to(dtype)
    return a, a.t(), torch.ones((), device=at), torch.ones((), device=at)


def test_only_what_runs_is_told_once_through_autograd_and_modes():
    device.install()
    a, b, *scales = multiply()
    with ScaledMMCounter() as counted:
        torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
        torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, out=torch.empty(16, 16, dtype=torch.bfloat16))
        with torch.inference_mode():
            torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
        assert counted.calls == 3
        torch._scaled_mm(*multiply(at="meta"), out_dtype=torch.bfloat16)
        with FakeTensorMode():
            torch._scaled_mm(*multiply(), out_dtype=torch.bfloat16)
            torch._scaled_mm(*multiply(at="cuda"), out_dtype=torch.bfloat16)
        with unobserved(), unobserved():
            torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
        assert counted.calls == 3
        torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
    torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
    assert counted.calls == 4


def test_an_operator_has_one_hook():
    with pytest.raises(RuntimeError, match="already a kernel"):
        install_hook(torch.ops.aten._scaled_mm.default, before=lambda *_, **__: None)


# Point-to-point operators, of which no layout of the matrix makes use, and checks that send nothing.
WITHOUT_HOOK = {"send", "recv_", "recv_any_source_", "monitored_barrier_", "check_for_nan"}


def test_every_collective_of_torch_has_a_hook():
    names = {name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    assert names == collectives.HOOKS.keys() | WITHOUT_HOOK


def test_probes_and_hooks_serve_a_device_that_is_no_cpu():
    run_script("from tests.worker import otherdevice; otherdevice.check_casts(); otherdevice.check_hooks()")


_ALLOCATES = ("detach", "alias", "empty", "empty_like", "empty_strided", "_unsafe_view")


class Kernels(TorchDispatchMode):
    """Counts operators on plain tensors that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        with self:  # in the function of an autograd.Function an operator arrives before it is taken apart
            parts = operator.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        self.count += not operator.is_view and operator._schema.name.partition("::")[2] not in _ALLOCATES
        return operator(*args, **(kwargs or {}))


def kernels(recipe: Recipe) -> int:
    """Of forward and backward of one linear."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False)).bfloat16()
    convert(model, Float8(recipe=recipe))
    given, gradient = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True), torch.ones(256, 256).bfloat16()
    with Kernels() as counted:
        model(given).backward(gradient)
    return counted.count


@pytest.mark.parametrize("recipe", EAGER_KERNELS)
def test_kernels_of_an_eager_linear(recipe: Recipe) -> None:
    assert kernels(recipe) - kernels("bf16") == EAGER_KERNELS[recipe]
