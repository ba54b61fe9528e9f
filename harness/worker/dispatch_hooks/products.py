"""Hooks on the operators that multiply in high precision: matmuls, batched matmuls and fused attention.

Scaled matmuls have a hook of their own. A kernel of the virtual device that multiplies by calling one of these
operators hides it (`unobserved`), so that a product counts once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from harness.worker.dispatch_hooks.hook import install_hook

Tensor = torch.Tensor


class Product(NamedTuple):
    """One executed operator with its FLOPs. `part`: "matmuls" or "attention"; `dtype`: of its first factor."""

    part: str
    dtype: torch.dtype
    flops: int


# Called before every operator that multiplies. Probes append themselves; they must not write to tensors.
observers: list[Callable[[Product], None]] = []

# Of every operator with two factors [.., m, k] x [.., k, n]: the position of the first one.
_MATMULS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
# Of every fused attention: the position of the queries, behind which come the keys, and its products. Kernels repeat
# one of the two of forward in backward; that is not counted.
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": (0, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 4),
    "_scaled_dot_product_flash_attention": (0, 2),
    "_scaled_dot_product_flash_attention_backward": (1, 4),
    "_scaled_dot_product_efficient_attention": (0, 2),
    "_scaled_dot_product_efficient_attention_backward": (1, 4),
    "_scaled_dot_product_cudnn_attention": (0, 2),
    "_scaled_dot_product_cudnn_attention_backward": (1, 4),
}


def matmul_flops(first: Tensor, second: Tensor) -> int:
    """Of [.., m, k] x [.., k, n]."""
    return 2 * first.numel() * second.shape[-1]


def precision_of(dtype: torch.dtype) -> str:
    """Return what a factor of this dtype is multiplied in: "float8" for both of its formats, or the dtype."""
    name = str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def _notify(part: str, first: Tensor, flops: int) -> None:
    for observe in observers:
        observe(Product(part, first.dtype, flops))


def _multiplying(at: int) -> Callable[..., None]:
    def before(*args: Any, **_: Any) -> None:
        if observers:
            first, second = args[at : at + 2]
            _notify("matmuls", first, matmul_flops(first, second))

    return before


def _attending(at: int, products: int) -> Callable[..., None]:
    def before(*args: Any, **_: Any) -> None:
        if observers:
            queries, keys = args[at : at + 2]
            _notify("attention", queries, 2 * products * queries.numel() * keys.shape[-2])

    return before


def install() -> list[torch.library.Library]:
    hooks = {name: _multiplying(at) for name, at in _MATMULS.items()}
    hooks |= {name: _attending(at, products) for name, (at, products) in _ATTENTION.items()}
    return [
        install_hook(getattr(packet, overload), before=before)
        for name, before in hooks.items()
        for packet in [getattr(torch.ops.aten, name)]
        for overload in {"default", "out"} & set(packet.overloads())
    ]
