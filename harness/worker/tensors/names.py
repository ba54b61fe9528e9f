"""The names of modules and dtypes, as every record has them, and what belongs to whom: optimizers to a model, and
tensors to probes alone.
"""

import functools
import gc
import weakref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

IN_PIECES = "harness_in_pieces"  # the module itself in its wrapper, see `targets/in_pieces.py`


@functools.lru_cache(maxsize=1024)
def clean_fqn(fqn: str) -> str:
    """Return the FQN without what checkpointing wrappers, compilation and pieces of sequences add to it."""
    whole = fqn.removesuffix(f".{IN_PIECES}").replace(f"{IN_PIECES}.", "")
    return whole.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def is_compiled(module: nn.Module) -> bool:
    """Return True for what `torch.compile` made of a module, which has that module as its child."""
    return any(name == "_orig_mod" for name, _ in module.named_children())


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Tensors that only probes hold. The census of live memory leaves them out.
_MARK = "held_by_a_probe"


def mark_owned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark `tensor` as held by a probe alone, and return it. Its storage may be shared, the tensor object must not."""
    setattr(tensor, _MARK, True)
    return tensor


def is_owned(tensor: torch.Tensor) -> bool:
    return getattr(tensor, _MARK, False)


_OPTIMIZERS: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Optimizer]]] = weakref.WeakKeyDictionary()


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Those that update parameters of the model. They are searched for once: later, gc may no longer list them."""
    known = [alive for reference in _OPTIMIZERS.get(model, ()) if (alive := reference()) is not None]
    if known:
        return known
    mine = {id(param) for param in model.parameters()}
    optimizers = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), Optimizer)
        and any(id(param) in mine for group in candidate.param_groups for param in group["params"])
    ]
    _OPTIMIZERS[model] = [weakref.ref(optimizer) for optimizer in optimizers]
    return optimizers
