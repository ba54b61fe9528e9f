"""The autocast of CUDA on a CPU: its lists of operators, its weight cache, and its state, which torchao asks for.

On the virtual device autocast of "cpu" and of "cuda" are one: to enter either sets both states, and operators on CPU
tensors are cast as those on CUDA tensors are. Lists: `AT_FORALL_*` in aten/src/ATen/autocast_mode.h; the rules of each,
the cache and what is banned: `WrapFunction_` there, and `cached_cast` in aten/src/ATen/autocast_mode.cpp.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import DispatchKey, DispatchKeySet
from torch.utils._pytree import tree_leaves, tree_map_only

Tensor = torch.Tensor
_KEY = DispatchKey.AutocastCPU


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER = _names("""
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
""")
FLOAT32 = _names("""
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
""")
TO_FLOAT32 = _names("""
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
""")  # float32 is what they return, unless another dtype is given
NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}  # and what takes a dtype
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
BANNED = "binary_cross_entropy"

_cast_weights: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}


def _eligible(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Cast a tensor. A float32 leaf that needs a gradient is cast once, until the outermost autocast ends."""
    if not _eligible(tensor) or tensor.dtype == dtype:
        return tensor
    leaf = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    if not leaf or dtype != torch.get_autocast_dtype("cpu") or not torch.is_autocast_cache_enabled():
        return tensor.to(dtype)
    known, cast = _cast_weights.get(id(tensor), (None, None))
    if known is None or cast is None or known() is not tensor:
        cast = tensor.to(dtype)
        _cast_weights[id(tensor)] = weakref.ref(tensor), cast
    return cast


def _casting(operator: Any, dtype_of: Callable[[Iterable[Any]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
            dtype = dtype_of(tree_leaves((args, kwargs)))
            args, kwargs = tree_map_only(Tensor, functools.partial(_cast, dtype), (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _lower(_: Iterable[Any] = ()) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(values: Iterable[Any]) -> torch.dtype:
    dtypes = {value.dtype for value in values if _eligible(value)}
    if torch.float32 in dtypes:
        return torch.float32
    if dtypes - {_lower()}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return _lower()


def _with_dtype(operator: Any, untouched: Any) -> Callable[..., Any]:
    """Kernel of an operator that gets a dtype of its result where none is given, if its first argument is eligible."""
    names = [argument.name for argument in operator._schema.arguments]
    defaults = [argument.default_value for argument in untouched._schema.arguments]
    position = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
            given = args[position] if position < len(args) else kwargs.get("dtype")
            if not _eligible(args[0]) or given is not None:
                return untouched(*args, **kwargs)
            filled = (*args[:position], *defaults[len(args) : position])
            return operator(*filled, **kwargs | {"dtype": torch.float32})

    return kernel


def _banned(*_: object) -> Tensor:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )


def _operator(name: str) -> Any:
    name, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")


def kernels() -> dict[str, Callable[..., Any]]:
    """What acts on CPU tensors inside of autocast, by the name of the operator: the rule of CUDA where this torch has
    one. The rest of the CPU's own list is not cast at all.
    """
    rules: dict[str, Callable[..., Any]] = {BANNED: _banned}
    rules |= {name: _casting(_operator(name), _lower) for name in LOWER}
    rules |= {name: _casting(_operator(name), lambda _: torch.float32) for name in FLOAT32}
    rules |= {name: _casting(_operator(name), _widest) for name in WIDEST}
    rules |= {name: _with_dtype(_operator(name), _operator(name)) for name in TO_FLOAT32}
    rules |= {name: _with_dtype(_operator(f"norm.{other}"), _operator(name)) for name, other in NORMS.items()}
    own: dict[str, Any] = dict.fromkeys(_registered(_KEY), torch.library.fallthrough_kernel)
    return own | {name: rules[name] for name in _registered(DispatchKey.AutocastCUDA) if name in rules}


def _registered(key: DispatchKey) -> list[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key.name)
    return [name.removeprefix("aten::") for name in names if name.startswith("aten::")]


def install_state() -> None:
    """Make one of the autocast of "cpu" and of "cuda", as if a GPU were there."""
    autocast: Any = torch.amp.autocast_mode.autocast
    autocast.__init__ = _init(autocast.__init__)
    autocast.__enter__ = _enter(autocast.__enter__)
    autocast.__exit__ = _exit(autocast.__exit__)
    mode: Any = torch.amp.autocast_mode
    mode._cast = _cast_inputs(mode._cast)
    module: Any = torch
    module.clear_autocast_cache = _clear(module.clear_autocast_cache)


def _init(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        on_device = device_type in ("cpu", "cuda")
        # disabled, torch does not look for a GPU
        stock(self, "cuda" if on_device else device_type, dtype, enabled and not on_device, cache_enabled)
        if on_device:
            self._enabled = enabled

    return init


def _enter(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(stock)
    def enter(self: Any) -> Any:
        self.prev_of_cpu = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        result = stock(self)
        if self.device == "cuda":
            torch.set_autocast_enabled("cpu", self._enabled)
            torch.set_autocast_dtype("cpu", self.fast_dtype)
        return result

    return enter


def _exit(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def leave(self: Any, *error: Any) -> Any:
        result = stock(self, *error)
        if self.device == "cuda":
            enabled, dtype = self.prev_of_cpu
            torch.set_autocast_enabled("cpu", enabled)
            torch.set_autocast_dtype("cpu", dtype)
        return result

    return leave


def _cast_inputs(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what `custom_fwd` casts with: CPU tensors are those of CUDA."""

    @functools.wraps(stock)
    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return stock(value, "cpu" if device_type == "cuda" else device_type, dtype)

    return cast


def _clear(stock: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(stock)
    def clear_autocast_cache() -> None:
        _cast_weights.clear()
        stock()

    return clear_autocast_cache
