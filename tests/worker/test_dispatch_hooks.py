"""Dispatcher hooks see everything that runs, once, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from harness.matrix.caseid import parse_case_id
from harness.worker.dispatch_hooks import collectives
from harness.worker.dispatch_hooks.hook import install_hook, unobserved
from harness.worker.dispatch_hooks.scaled_mm import ScaledMMCounter
from harness.worker.virtual import device
from tests.programs import run_script

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
