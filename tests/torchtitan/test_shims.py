"""One test per shim. It fails when the shim is no longer needed: remove the shim then, and this test with it."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys

import pytest
import torch

from tests.torchtitan.conftest import Script

SHIMS = "from harness.plugins.torchtitan.worker.v0_2 import shims;"
THREADS = "len(os.listdir('/proc/self/task'))"


def test_arrow_starts_a_thread_without_its_shim(script: Script) -> None:
    code = f"import os, numpy; before = {THREADS}; import pyarrow; print({THREADS} - before)"
    assert script(code) == "1", "pyarrow starts no thread: `without_arrow_thread` can go"
    assert script(SHIMS + "shims.without_arrow_thread();" + code) == "0"


def test_torchtitan_imports_arrow() -> None:
    assert "pyarrow" in sys.modules, "torchtitan imports no pyarrow: `without_arrow_thread` can go"


def test_tqdm_starts_a_thread_without_its_shim(script: Script) -> None:
    code = "import threading, tqdm; bar = tqdm.tqdm(total=1, disable=False); print(threading.active_count())"
    assert script(code) == "2", "tqdm starts no thread: `without_progress_thread` can go"
    without = "from harness.worker.warmup import without_progress_thread; without_progress_thread();"
    assert script(without + code) == "1"


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_torchtitan_imports_triton_without_its_shim(script: Script) -> None:
    code = "try:\n    import torchtitan\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    assert script(code) == "triton", "torchtitan can be imported without Triton: `without_triton` can go"


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this build of torch has CUDA")
def test_torchtitan_takes_cuda_without_its_shim(script: Script) -> None:
    device_type = script(
        SHIMS + "shims.without_triton('torchtitan'); import torchtitan.tools.utils as utils; print(utils.device_type)"
    )
    assert device_type == "cuda", "torchtitan finds the CPU by itself: `device_named` can go"


def test_import_is_for_the_virtual_device() -> None:
    from torchtitan.tools import utils

    assert utils.device_type == "cpu"


def test_converter_asks_for_cuda_without_its_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.components.quantization import float8
    from torchtitan.config import JobConfig

    monkeypatch.setattr(float8, "has_cuda_capability", lambda *_: False)
    with pytest.raises(ValueError, match="only supported on SM89"):  # else: `capability` can go
        float8.Float8LinearConverter(JobConfig(), _dims())


def test_configuration_has_no_float64_without_its_shim(script: Script) -> None:
    code = "shims.without_triton('torchtitan'); from torchtitan.config import TORCH_DTYPE_MAP; print(*TORCH_DTYPE_MAP)"
    names = script(SHIMS + code).split()
    assert "float32" in names
    assert "float64" not in names, "`float64_dtype` can go"


def test_trainer_needs_a_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.config import JobConfig
    from torchtitan.train import Trainer

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(KeyError, match="LOCAL_RANK"):  # else: `local_rank` can go
        Trainer(JobConfig())


def test_local_rank_is_only_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.plugins.torchtitan.worker.v0_2.shims import local_rank

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with local_rank(torch.device("cuda", 3)):
        assert os.environ["LOCAL_RANK"] == "3"
    assert "LOCAL_RANK" not in os.environ


def test_trainer_turns_garbage_collection_off() -> None:
    from torchtitan.tools.utils import GarbageCollection

    from harness.plugins.torchtitan.worker.v0_2.shims import garbage_collected

    with garbage_collected():
        GarbageCollection()
        assert not gc.isenabled(), "`garbage_collected` can go"
    assert gc.isenabled()


def test_one_rank_has_no_fsdp() -> None:
    assert not _dims().fsdp_enabled, "torchtitan applies FSDP2 on one rank: `_OneRankFsdp` can go"


def test_metrics_need_an_accelerator() -> None:
    from torchtitan.components.metrics import build_device_memory_monitor

    with pytest.raises((AttributeError, RuntimeError)):  # else: `_Metrics` need no memory monitor of its own
        build_device_memory_monitor()


def test_loss_rounds_to_float32() -> None:
    from torchtitan.components.loss import cross_entropy_loss

    loss = cross_entropy_loss(torch.zeros(1, 2, 4, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.int64))
    assert loss.dtype is torch.float32, "torchtitan's loss keeps float64: `_loss_builder` is for padding only"


def _dims() -> object:
    from torchtitan.distributed import ParallelDims

    return ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
