"""Keeps torchao from importing inductor, which takes 0.3 s, to change what it writes for Triton: nothing on a CPU."""

from contextlib import suppress


def leave_out() -> None:
    """Have `convert_to_float8_training` find its patch of inductor done."""
    with suppress(ImportError):  # it came with torchao 0.18
        from torchao.float8 import _inductor_patch

        _inductor_patch._PATCHED = True
