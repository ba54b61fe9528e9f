"""One test per shim. It fails when the shim is no longer needed: remove the shim then, and this test with it."""

import gc
import importlib.util
import inspect
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tests.programs import run_script


def grads(result: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(result.sum(), of)


def test_torchtitan_imports_data_sets_without_its_shim() -> None:
    from torchtitan.components.data import sources

    assert sources.datasets is sys.modules["datasets"], "the Trainer imports no `datasets`: `without_data_sets` can go"
    with pytest.raises(NotImplementedError, match="load_dataset needs datasets"):
        sources.datasets.load_dataset("c4")


def test_models_compile_while_they_are_imported() -> None:
    source = inspect.getsource(sys.modules["torchtitan.models.common.attention"])
    assert "torch.compile(" in source, "`without_inductor` can go"
    assert torch.compile.__name__ == "compile", "`torch.compile` is not what it was"


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_trainer_imports_triton_without_its_shim() -> None:
    code = "try:\n    import torchtitan.trainer\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    assert run_script(code) == "triton", "torchtitan.trainer imports no Triton: `without_triton` can go"


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_a_kernel_that_needs_triton_says_so() -> None:
    from torchtitan.distributed.minimal_async_ep import kernels

    with pytest.raises(NotImplementedError, match="kernel dispatch needs Triton"):
        kernels.dispatch()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_torchao_pads_groups_with_triton_on_a_cpu_without_its_shim() -> None:
    from torchao.prototype.moe_training.ep import kernels

    asked = inspect.signature(kernels.generate_permute_indices).parameters["use_cpu"]
    assert asked.default is False, "`groups_on_cpu` can go"
    assert kernels.fill_indices_wrapper is kernels.fill_indices_cpu


def test_import_is_for_the_virtual_device() -> None:
    from torchtitan.tools import utils

    assert utils.device_type == "cpu"


def test_converter_asks_for_cuda_without_its_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.components.quantization import Float8LinearConverter, float8

    monkeypatch.setattr(float8, "has_cuda_capability", lambda *_: False)
    with pytest.raises(ValueError, match="only supported on NVIDIA SM89"):  # else: `capability` can go
        Float8LinearConverter.Config().build()


def test_converter_to_mxfp8_asks_for_cuda_without_its_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.components.quantization import mx

    monkeypatch.setattr(mx, "has_cuda_capability", lambda *_: False)
    with pytest.raises(ValueError, match="only supported on SM100"):  # else: `capability` can go
        mx.MXFP8LinearConverter.Config().build()


def test_flex_attention_has_no_backward_on_a_cpu() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, 1, 8, 8, requires_grad=True) for _ in range(3))
    with pytest.raises(NotImplementedError, match="not support backward on CPU"):  # else `attention_on_cpu` can go
        flex_attention(q, k, v)


@pytest.mark.parametrize(
    ("least", "documents"), [([0, 0, 0, 3, 3, 3, 3, 7], (3, 4, 1)), ([0, 0, 1, 2, 3, 4, 5, 6], ())]
)
def test_dense_attention_is_flex_attention(least: list[int], documents: tuple[int, ...]) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    from harness.plugins.torchtitan.worker.shims import block_mask_with_dense, dense_attention

    first = torch.tensor(least)  # that a token sees: of its document, or of a window
    causal = lambda b, h, i, j: (i >= j) & (j >= first[i])  # noqa: E731
    mask = block_mask_with_dense(causal, 1, None, 8, 8, device="cpu")
    assert mask.documents == documents
    q, (k, v) = torch.randn(1, 4, 8, 16), torch.randn(2, 1, 2, 8, 16)
    options = {"score_mod": None, "scale": None, "enable_gqa": True}
    expected = flex_attention(q, k, v, block_mask=mask, **options)
    torch.testing.assert_close(dense_attention(q, k, v, block_mask=mask, **options)[0], expected)


def test_attention_of_ranks_is_that_of_each() -> None:
    from harness.plugins.torchtitan.worker.shims import block_mask_with_dense, dense_attention

    mask = block_mask_with_dense(lambda b, h, i, j: i >= j, 1, None, 8, 8, device="cpu")
    q, (k, v) = torch.randn(1, 4, 8, 16), torch.randn(2, 1, 2, 8, 16, requires_grad=True)
    options = {"score_mod": None, "scale": None, "enable_gqa": True}
    whole, _ = dense_attention(q, k, v, block_mask=mask, **options)
    mask.ranks = 2
    of_ranks, _ = dense_attention(q, k, v, block_mask=mask, **options)
    for one, other in zip((whole, *grads(whole, k, v)), (of_ranks, *grads(of_ranks, k, v)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_cut_mask_has_no_dense_one_without_its_shim() -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    from harness.plugins.torchtitan.worker.shims import block_mask_with_dense

    assert _attention._compiled_create_block_mask is block_mask_with_dense
    made = create_block_mask(lambda b, h, i, j: i >= j, 1, None, 128, 128, device="cpu")
    assert not hasattr(made, "dense"), "torch keeps the whole mask: `block_mask_with_dense` can go"


def test_configuration_has_no_float64_without_its_shim() -> None:
    names = run_script("from torchtitan.config import TORCH_DTYPE_MAP; print(*TORCH_DTYPE_MAP)").split()
    assert "float32" in names
    assert "float64" not in names, "`float64_dtype` can go"


def test_trainer_needs_a_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.tools.utils import get_local_device

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises((KeyError, ValueError), match="LOCAL_RANK"):  # else: `local_rank` can go
        get_local_device()


def test_trainer_turns_garbage_collection_off() -> None:
    from torchtitan.tools.utils import GarbageCollection

    from harness.plugins.torchtitan.worker.shims import garbage_collected

    with garbage_collected():
        GarbageCollection()
        assert not gc.isenabled(), "`garbage_collected` can go"
    assert gc.isenabled()


def test_loss_rounds_to_float32_without_its_shim() -> None:
    from torchtitan.components.loss import cross_entropy_loss

    from harness.plugins.torchtitan.worker.shims import float64_kept

    logits, labels = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    assert cross_entropy_loss(logits, labels).dtype is torch.float32, "`float64_kept` can go"
    with float64_kept():
        assert cross_entropy_loss(logits, labels).dtype is torch.float64
    assert logits.float().dtype is torch.float32


def test_metrics_need_an_accelerator() -> None:
    from torchtitan.components.metrics import DeviceMemoryMonitor

    with pytest.raises((AttributeError, RuntimeError)):  # else: `Metrics` need no memory monitor of its own
        DeviceMemoryMonitor()


@pytest.mark.skipif(not torch.backends.cuda.is_built() or torch.cuda.is_available(), reason="needs CUDA and no GPU")
def test_fake_tensors_start_threads_without_the_virtual_device() -> None:
    trains = (
        "import os, time, torch;"
        "from torch._subclasses.fake_tensor import FakeTensorMode;"
        "FakeTensorMode().__enter__().__exit__(None, None, None);"
        "torch.ones(2, requires_grad=True).sum().backward();"
        "time.sleep(1);"  # threads name themselves when they run
        "names = [open(f'/proc/self/task/{task}/comm').read() for task in os.listdir('/proc/self/task')];"
        "print(sum('pt_autograd' in name for name in names))"
    )
    assert run_script(trains) == "8", "backward starts no thread: `_without_pretended_gpus` can go"
    assert run_script("from harness.worker.virtual import device; device.install();" + trains) == "0"
