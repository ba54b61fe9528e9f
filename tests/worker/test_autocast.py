"""Autocast on the virtual device: what CUDA's casts, seen by torchao and by whoever asks for its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from harness.worker.virtual import autocast, device

BF16, F32 = torch.bfloat16, torch.float32
DEVICES = ("cpu", "cuda")
X = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    device.install(compiled=False)


def test_every_operator_that_cuda_casts_has_its_rule():
    ours = {*autocast.LOWER, *autocast.FLOAT32, *autocast.TO_FLOAT32, *autocast.WIDEST, *autocast.NORMS}
    stock = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    of_cudnn = {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert {name.removeprefix("aten::") for name in stock} == ours | of_cudnn | {autocast.BANNED}


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_float8_linear_does_what_it_does_with_bfloat16_input(name, recipe):
    config = Float8LinearConfig.from_recipe_name(recipe)
    seen = []
    for within in (True, False):
        torch.manual_seed(0)
        model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 48)), config=config)
        x = X.clone().requires_grad_()
        with torch.autocast(name, dtype=BF16, enabled=within):
            out = model(x if within else x.to(BF16))
        out.sum().backward()
        seen.append((out, x.grad, *(parameter.grad for parameter in model.parameters())))
    assert seen[0][0].dtype == BF16
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.dtype | None]] = {
    "linear": (lambda x: functional.linear(x, x), BF16),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), BF16),
    "attention": (lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]), BF16),
    "layer_norm": (lambda x: functional.layer_norm(x, (32,)), F32),
    "rms_norm": (lambda x: functional.rms_norm(x, (32,)), F32),
    "exp": (torch.exp, F32),
    "softmax": (lambda x: x.softmax(-1), F32),
    "softmax with a dtype": (lambda x: x.softmax(-1, dtype=torch.float64), torch.float64),
    "cross_entropy": (lambda x: functional.cross_entropy(x, torch.arange(32)), F32),
    "norm": (lambda x: torch.ops.aten.norm.Scalar(x, 2), F32),
    "addcmul": (lambda x: torch.addcmul(x, X, X), F32),
    "relu": (torch.relu, None),
    "pad": (lambda x: functional.pad(x, (1, 1), "reflect"), None),  # the CPU's own list casts it
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_an_operator_returns_what_cuda_does(call, dtype):
    run, expected = CALLS[call]
    x = X.to(dtype)
    with torch.autocast("cuda", dtype=BF16):
        assert run(x).dtype == (expected or dtype)
        with torch.autocast("cpu", enabled=False):
            assert run(x.double()).dtype == torch.float64
    if call == "exp":
        with torch.autocast("cuda", dtype=BF16):
            assert torch.equal(run(x), x.float().exp())


def test_what_is_unsafe_is_banned_and_float64_left_alone():
    with torch.autocast("cuda", dtype=BF16):
        assert (X.double() @ X.double()).dtype == torch.float64
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            functional.binary_cross_entropy(X.sigmoid(), X.sigmoid())
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.addcmul(X.half(), X.half(), X.half())


@pytest.mark.parametrize(("cached", "casts"), [(True, 1), (False, 2)])
def test_a_weight_is_cast_once_until_the_outermost_ends(cached, casts):
    weight = X.clone().requires_grad_()
    for _ in range(2):
        with torch.autocast("cuda", dtype=BF16, cache_enabled=cached):
            first = functional.linear(X, weight)
            with torch.autocast("cpu", dtype=BF16, cache_enabled=cached):
                second = torch.einsum("ij,jk->ik", X, weight)
        assert not autocast._cast_weights
        nodes = {node for out in (first, second) for node in to_weight(out.grad_fn)}
        assert len(nodes) == casts
        with torch.no_grad():
            weight.mul_(2)


def to_weight(node: Any) -> set[Any]:
    """The casts of a weight behind a result."""
    if type(node).__name__ == "ToCopyBackward0":
        return {node}
    return {cast for before, _ in node.next_functions if before is not None for cast in to_weight(before)}


@pytest.mark.parametrize("name", DEVICES)
def test_state_is_that_of_cuda_and_is_put_back(name):
    def state():
        return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES]

    before = state()
    with torch.autocast(name):
        assert torch.is_autocast_enabled()
        assert state() == [(True, torch.float16)] * 2  # CUDA's default
        with torch.autocast("cuda", dtype=BF16, enabled=False):
            assert [enabled for enabled, _ in state()] == [False, False]
        assert state() == [(True, torch.float16)] * 2
    assert state() == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_computes_again_what_it_had(reentrant):
    grads = []
    for block in (lambda run, x: run(x), lambda run, x: checkpoint(run, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
        x = X.clone().requires_grad_()
        with torch.autocast("cuda", dtype=BF16):
            out = block(model, x)
        out.float().pow(2).sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_compiled_function_casts_as_it_does_eagerly():
    def run(x):
        with torch.autocast("cuda", dtype=BF16):
            return (x @ x).softmax(-1), x @ x

    for one, other in zip(torch.compile(run, backend="aot_eager", fullgraph=True)(X), run(X), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_inputs_of_a_custom_function_are_cast():
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=BF16)
        def forward(ctx, x):
            return x * 2

    with torch.autocast("cuda", dtype=torch.float16):
        assert Double.apply(X).dtype == BF16
