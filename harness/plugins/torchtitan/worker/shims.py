"""The shims: what stands in where torchtitan expects a GPU, or a process that is never forked.

Each is one function that says why it is needed and when it can go; `tests/plugins/torchtitan/test_shims.py` fails when
one can. None changes what is computed. Extension points of torchtitan (model spec, loss, metrics) are in `trainer.py`.
"""

import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from harness.worker.tensors.ranks import Given, along, on_ranks, whole
from harness.worker.virtual import collectives

_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


@functools.cache
def import_torchtitan() -> None:
    """Import torchtitan with every shim that its import needs, once per process."""
    without_data_sets()
    without_triton()
    virtual = on_virtual_device()
    with device_named("cpu" if virtual else "cuda"), without_inductor() if virtual else nullcontext():
        importlib.import_module("torchtitan.trainer")
        importlib.import_module("torchtitan.models.llama3")
    if virtual:
        capability()
        attention_on_cpu()
        groups_on_cpu()
    float64_dtype()
    gc.enable()


def on_virtual_device() -> bool:
    """Return True if the virtual FP8 device is installed in this process."""
    return collectives.BACKEND in dist.Backend.backend_list


def without_data_sets() -> None:
    """Stand in for Hugging Face's `datasets`: its import takes as long as that of torchtitan, and starts a thread.

    A process with threads cannot be forked safely. The harness brings the tokens, so no case loads a data set.
    Can go when importing the Trainer imports no `datasets`.
    """
    for name in ("datasets", "datasets.distributed"):
        _stand_in(name, f"torchtitan's {{}} needs {name}, which is not imported: a case has its own tokens")


def without_triton() -> None:
    """Stand in for torchtitan's Triton kernels of mixture-of-experts where Triton is missing (a CPU torch).

    The Trainer imports them, and a Llama never calls them.
    Can go when these can be imported without Triton.
    """
    if importlib.util.find_spec("triton") is None:
        _stand_in(_KERNELS, "torchtitan's kernel {} needs Triton, which is not installed")


def _stand_in(name: str, says: str) -> None:
    """Put in the place of a module that is not imported one whose names raise NotImplementedError when called."""

    def named(missing: str) -> Any:
        if missing.startswith("__"):
            raise AttributeError(missing)

        def call(*_: object, **__: object) -> None:
            raise NotImplementedError(says.format(missing))

        return call

    made: Any = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    made.__getattr__ = named
    sys.modules.setdefault(name, made)


@contextmanager
def without_inductor() -> Iterator[None]:
    """While torchtitan is imported, `torch.compile` returns what it is given: it would import inductor for attention.

    `attention_on_cpu` replaces what is compiled then. Can go when importing torchtitan's models compiles nothing.
    """
    compiles, module = torch.compile, cast("Any", torch)
    module.compile = lambda model, **_: model
    try:
        yield
    finally:
        module.compile = compiles


@contextmanager
def device_named(kind: str) -> Iterator[None]:
    """While torchtitan is imported, its question for the device of this machine is answered with `kind`.

    `torchtitan.tools.utils` asks once, at import, and takes CUDA where torch finds no accelerator. Asking the driver
    would also make a process unfit to be forked.
    Can go when torchtitan takes the device type from its configuration.
    """
    utils: Any = torch._utils
    asked = utils._get_available_device_type
    utils._get_available_device_type = lambda: kind
    try:
        yield
    finally:
        utils._get_available_device_type = asked


def capability() -> None:
    """Answer the converters' question for the compute capability of FP8 and MXFP8: the virtual device has both matmuls.

    Can go when the converters do not ask for CUDA on a device that is not CUDA.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.components.quantization.") and hasattr(module, "has_cuda_capability"):
            setattr(module, "has_cuda_capability", lambda *_: True)  # noqa: B010  mypy knows no such attribute


def attention_on_cpu() -> None:
    """Let FlexAttention compute with torch's dense attention by its mask: its kernels have no backward on a CPU.

    Can go when torch's `flex_attention` has a backward on a CPU, in float64 too.
    """
    from torchtitan.distributed import compile as compiling
    from torchtitan.models.common import attention

    attention.FlexAttention._compiled_flex_attn = staticmethod(dense_attention)
    attention._compiled_create_block_mask = block_mask_with_dense
    cutting: Any = _attention
    cutting._compiled_create_block_mask = block_mask_with_dense  # of the queries that a CP rank has
    # Which leaves these kernels to inductor, and knows no other backend.
    compiling._maybe_regional_inductor_backend = lambda model, backend: backend


def groups_on_cpu() -> None:
    """Let torchao pad the tokens of experts with its own loop for a CPU: it launches a Triton kernel on any device.

    Without Triton there is nothing to replace, and no such case. Can go when `generate_permute_indices` chooses by the
    device.
    """
    if importlib.util.find_spec("triton") is not None:
        kernels: Any = importlib.import_module("torchao.prototype.moe_training.ep.kernels")
        kernels.fill_indices_wrapper = kernels.fill_indices_cpu


def block_mask_with_dense(mask_mod: Any, *sizes: Any, device: Any, **options: Any) -> BlockMask:
    """Return the mask by blocks, and beside it the whole one and its documents, which no graph has to compute."""
    of_sizes = inspect.signature(create_block_mask).bind(mask_mod, *sizes, device=device, **options).arguments
    made: Any = create_block_mask(mask_mod, *sizes, **options | {"device": device})
    made.dense = create_mask(mask_mod, 1, 1, of_sizes["Q_LEN"], of_sizes["KV_LEN"], device=device)
    made.documents = documents_of(made.dense[0, 0])
    made.ranks = 1  # that have the queries
    return made


def documents_of(mask: torch.Tensor) -> tuple[int, ...]:
    """Return the lengths of documents if each of its tokens sees those before it and no other; none for another mask.

    `mask`: [tokens, tokens], True where a token sees one.
    """
    tokens = torch.arange(len(mask), device=mask.device)
    number = (mask.int().argmax(1) == tokens).cumsum(0)  # a document begins where a token sees none before it
    apart = (number[:, None] == number) & (tokens[:, None] >= tokens)
    return tuple(number.bincount()[1:].tolist()) if torch.equal(mask, apart) else ()


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return what `flex_attention` does of [1, heads, tokens, head_dim], and no auxiliary results.

    Documents are pieces of the tensor, as in kernels of many lengths, so that one alone has the same bits. Where the
    queries are those of several ranks, one behind the other, it is what each of them computes.
    """
    assert options["score_mod"] is None, "torchtitan's models modify no score"
    assert block_mask.seq_lengths == (q.shape[2], k.shape[2])
    attend: Any = partial(F.scaled_dot_product_attention, scale=options["scale"], enable_gqa=options["enable_gqa"])
    ranks, mask = block_mask.ranks, block_mask.dense
    if ranks > 1:
        mine, gathered = along(2, [q.shape[2] // ranks] * ranks), whole(ranks)
        return on_ranks(attend, mine, Given(q, mine), Given(k, gathered), Given(v, gathered), Given(mask, mine)), None
    if not block_mask.documents:
        return attend(q, k, v, mask), None
    pieces = zip(*(each.split(block_mask.documents, 2) for each in (q, k, v)), strict=True)
    return torch.cat([attend(*piece, is_causal=True) for piece in pieces], 2), None


def float64_dtype() -> None:
    """Let torchtitan's configuration name float64, the dtype of proof of the virtual device.

    Can go when `TORCH_DTYPE_MAP` has it.
    """
    config: Any = importlib.import_module("torchtitan.config")
    config.TORCH_DTYPE_MAP.setdefault("float64", torch.float64)


@contextmanager
def local_rank(device: torch.device) -> Iterator[None]:
    """Give the Trainer the LOCAL_RANK that torchrun would set: the index of its device.

    Can go when the Trainer takes its device from the process group or its configuration.
    """
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


@contextmanager
def garbage_collected() -> Iterator[None]:
    """Keep Python's garbage collection on: the Trainer turns it off and collects in `train()`, which does not run here.

    Can go when creating a Trainer leaves `gc.isenabled()` as it was.
    """
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def float64_kept() -> Iterator[None]:
    """While torchtitan computes its loss, `Tensor.float` leaves float64 as it is: float64 is the dtype of proof.

    Can go when torchtitan's loss rounds no float64 to float32.
    """
    rounds = torch.Tensor.float
    tensor: Any = torch.Tensor
    tensor.float = lambda self: self if self.dtype is torch.float64 else rounds(self)
    try:
        yield
    finally:
        tensor.float = rounds
