"""The names of modules and dtypes, as every record has them."""

import functools

import torch
from torch import nn

IN_PIECES = "harness_in_pieces"  # the module itself in its wrapper, see `targets/in_pieces.py`


@functools.lru_cache(maxsize=1024)
def clean_fqn(fqn: str) -> str:
    """The FQN without what checkpointing wrappers, compilation and pieces of sequences add to it."""
    whole = fqn.removesuffix(f".{IN_PIECES}").replace(f"{IN_PIECES}.", "")
    return whole.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def is_compiled(module: nn.Module) -> bool:
    """True for what `torch.compile` made of a module, which has that module as its child."""
    return any(name == "_orig_mod" for name, _ in module.named_children())


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
